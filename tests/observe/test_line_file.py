"""Lines beside those of an earlier run, and on from those of an interrupted one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fxpipe.observe.line_file import LineFile, partial_lines
from fxpipe.typed_json import parse_lines


def lines(*steps: int, run: int = 1) -> str:
    return "".join(json.dumps({"step": step, "run": run}) + "\n" for step in steps)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def write(file: LineFile, *steps: int, run: int = 2) -> None:
    for step in steps:
        file.write({"step": step, "run": run})


def test_a_new_file_is_there_at_once(path: Path) -> None:
    file = LineFile(path)
    write(file, 1)
    assert path.read_text() == lines(1, run=2)
    file.take_place()
    write(file, 2)
    file.close()
    assert path.read_text() == lines(1, 2, run=2)
    assert list(path.parent.iterdir()) == [path]


def test_lines_that_are_no_json_are_left_out() -> None:
    good = [b'{"a":1}\n', b'{"a":-Infinity,"b":1e400}\n', b'{"a":"\\ud800"}\n', b"12345678901234567890123\n"]
    bad = [b'{"a"', b"\xff\xfe\n", b"[" * 100_000 + b"\n", b"\n", b"1" * 5000 + b"\n", b'"\xff"\n']
    found = list(parse_lines([*bad, *good, *bad]))
    assert [line for line, _ in found] == good
    assert [row for _, row in found] == [json.loads(line) for line in good]


def test_an_earlier_file_stays_until_the_run_has_ended(path: Path) -> None:
    path.write_text(lines(1, 2, 3))
    file = LineFile(path)
    write(file, 1)
    assert path.read_text() == lines(1, 2, 3)
    assert partial_lines(path).read_text() == lines(1, run=2)
    file.take_place()
    write(file, 2)
    file.close()
    assert path.read_text() == lines(1, 2, run=2)
    assert list(path.parent.iterdir()) == [path]


def test_an_earlier_file_stays_if_the_run_does_not_end(path: Path) -> None:
    path.write_text(lines(1, 2, 3))
    file = LineFile(path)
    write(file, 1)
    file.close()
    assert path.read_text() == lines(1, 2, 3)
    assert partial_lines(path).read_text() == lines(1, run=2)
    LineFile(path).close()
    assert list(path.parent.iterdir()) == [path], "a run without a line leaves none"


def test_a_run_goes_on_where_it_was_interrupted(path: Path) -> None:
    path.write_text(lines(1, 2, 3, 3, 4, 5) + '{"step": 6, "ru')
    kept: list[dict[str, Any]] = []
    file = LineFile(path, continue_after=3, kept=kept.append)
    assert path.read_text() == lines(1, 2, 3, 3)
    write(file, 4, 5)
    file.take_place()
    file.close()
    assert path.read_text() == lines(1, 2, 3, 3) + lines(4, 5, run=2)
    assert [row["step"] for row in kept] == [1, 2, 3, 3]
    assert list(path.parent.iterdir()) == [path]


def test_a_run_that_goes_on_leaves_the_file_of_one_that_has_ended(path: Path) -> None:
    path.write_text(lines(1, 2, 3))
    file = LineFile(path, continue_after=2, in_place=False)
    write(file, 3)
    assert path.read_text() == lines(1, 2, 3)
    file.take_place()
    file.close()
    assert path.read_text() == lines(1, 2) + lines(3, run=2)


@pytest.mark.parametrize(("partial", "after", "expected"), [((1, 2), 4, 1), ((1, 2, 3, 4, 5), 4, 2), ((1, 2), 2, 2)])
def test_it_goes_on_with_the_lines_of_the_run_that_came_so_far(
    path: Path, partial: tuple[int, ...], after: int, expected: int
) -> None:
    """Beside an ended or interrupted run, another was started and interrupted: which of them does go on?"""
    path.write_text(lines(1, 2, 3, 4))
    partial_lines(path).write_text(lines(*partial, run=2))
    file = LineFile(path, continue_after=after)
    write(file, after + 1, run=3)
    file.take_place()
    file.close()
    assert path.read_text() == lines(*range(1, after + 1), run=expected) + lines(after + 1, run=3)


@pytest.mark.parametrize("there", ["file", "partial file"])
def test_from_another_folder_it_takes_no_lines_of_this_ones_run(path: Path, there: str) -> None:
    """Both have as many lines: which run's they are, only the folder says."""
    earlier = path.parent / "earlier" / path.name
    earlier.parent.mkdir()
    earlier.write_text(lines(1, 2, 3, run=5))
    (path if there == "file" else partial_lines(path)).write_text(lines(1, 2, 3, 4))
    file = LineFile(path, continue_after=2, earlier=earlier)
    write(file, 3)
    file.take_place()
    file.close()
    assert path.read_text() == lines(1, 2, run=5) + lines(3, run=2)
    assert earlier.read_text() == lines(1, 2, 3, run=5)


def test_in_another_folder_it_begins_where_it_goes_on(path: Path) -> None:
    file = LineFile(path, continue_after=7)
    write(file, 8)
    file.close()
    assert path.read_text() == lines(8, run=2)

"""Next to an earlier run's files, and on from those of an interrupted one: the folder has the files of one run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fxpipe.observe.out_folder import METRICS, PARTIAL, OutFolder


def lines(*steps: int, run: int = 1) -> str:
    return "".join(json.dumps({"step": step, "run": run}) + "\n" for step in steps)


def leave(folder: Path, **texts: str) -> Path:
    """Files with these texts, by names in which a dot is `__`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def content(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def metrics(folder: OutFolder, *steps: int, run: int = 2) -> None:
    with (folder.own / METRICS).open("a") as file:
        file.write(lines(*steps, run=run))


def going_on(out: Path, after: int, earlier: Path | None = None) -> OutFolder:
    folder = OutFolder(out, after, earlier)
    folder.continue_lines(METRICS, after, lambda row: None)
    return folder


def test_the_first_run_writes_in_place(tmp_path: Path) -> None:
    folder = OutFolder(tmp_path / "far" / "out")
    assert folder.own == tmp_path / "far" / "out"
    metrics(folder, 1)
    folder.take_place(())
    folder.close()
    assert content(folder.own) == {METRICS: lines(1, run=2)}


def test_an_earlier_run_stays_until_this_one_has_ended(tmp_path: Path) -> None:
    earlier = {"metrics__jsonl": lines(1, 2, 3), "ema__safetensors": "old", "profile_3__json": "old"}
    leave(tmp_path, **earlier, model__safetensors="new", notes__txt="mine")
    leave(tmp_path / PARTIAL, best__json="of a run that was killed")
    folder = OutFolder(tmp_path)
    assert content(folder.own) == {}
    metrics(folder, 1)
    (folder.own / "best.json").write_text("new")
    assert (tmp_path / METRICS).read_text() == lines(1, 2, 3)
    folder.take_place({"model.safetensors"})
    assert folder.own == tmp_path
    new = {METRICS: lines(1, run=2), "best.json": "new", "model.safetensors": "new", "notes.txt": "mine"}
    assert content(tmp_path) == new
    assert not (tmp_path / PARTIAL).exists()


def test_a_run_that_has_written_nothing_leaves_nothing(tmp_path: Path) -> None:
    leave(tmp_path, metrics__jsonl=lines(1))
    OutFolder(tmp_path).close()
    assert [path.name for path in tmp_path.iterdir()] == [METRICS]


def test_a_file_that_cannot_take_its_place_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / METRICS).mkdir()
    folder = OutFolder(tmp_path)
    metrics(folder, 1)
    folder.take_place(())
    assert f"{tmp_path / METRICS} cannot be written: Is a directory; it is in {tmp_path / PARTIAL}" in (
        capsys.readouterr().err
    )


def test_a_run_goes_on_where_it_was_interrupted(tmp_path: Path) -> None:
    leave(tmp_path, metrics__jsonl=lines(1, 2, 3, 3, 4, 5) + '{"step": 6, "ru')
    kept: list[dict[str, Any]] = []
    folder = OutFolder(tmp_path, 3)
    folder.continue_lines(METRICS, 3, kept.append)
    assert content(tmp_path) == {METRICS: lines(1, 2, 3, 3)}
    assert [row["step"] for row in kept] == [1, 2, 3, 3]


def test_a_run_that_goes_on_leaves_the_files_of_one_that_has_ended(tmp_path: Path) -> None:
    leave(tmp_path, metrics__jsonl=lines(1, 2, 3), run__json="{}")
    folder = going_on(tmp_path, 2)
    metrics(folder, 3)
    assert (tmp_path / METRICS).read_text() == lines(1, 2, 3)
    folder.take_place(())
    assert content(tmp_path) == {METRICS: lines(1, 2) + lines(3, run=2), "run.json": "{}"}


@pytest.mark.parametrize(("partial", "after", "expected"), [((1, 2), 4, 1), ((1, 2, 3, 4, 5), 4, 2), ((1, 2), 2, 2)])
def test_it_goes_on_with_the_run_that_came_so_far(
    tmp_path: Path, partial: tuple[int, ...], after: int, expected: int
) -> None:
    """Beside an ended or interrupted run, another was started and interrupted: which of them does go on?"""
    leave(tmp_path, metrics__jsonl=lines(1, 2, 3, 4))
    leave(tmp_path / PARTIAL, metrics__jsonl=lines(*partial, run=2))
    folder = going_on(tmp_path, after)
    metrics(folder, after + 1, run=3)
    folder.take_place(())
    assert (tmp_path / METRICS).read_text() == lines(*range(1, after + 1), run=expected) + lines(after + 1, run=3)


@pytest.mark.parametrize("there", [".", PARTIAL])
def test_from_another_folder_it_takes_no_files_of_this_ones_run(tmp_path: Path, there: str) -> None:
    """Both have as many lines: which run's they are, only the folder says."""
    earlier = leave(tmp_path / "earlier", metrics__jsonl=lines(1, 2, 3, run=5))
    leave(tmp_path / "out" / there, metrics__jsonl=lines(1, 2, 3, 4))
    folder = going_on(tmp_path / "out", 2, earlier)
    metrics(folder, 3)
    folder.take_place(())
    assert content(tmp_path / "out") == {METRICS: lines(1, 2, run=5) + lines(3, run=2)}
    assert content(earlier) == {METRICS: lines(1, 2, 3, run=5)}

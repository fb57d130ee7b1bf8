"""What a run that goes on after a step keeps of what it wrote before."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fxpipe.observe.rates import Work
from fxpipe.observe.record import Record, RecordedStep
from fxpipe.observe.run_folder import read_run


def samples(count: int) -> Callable[[int], Work]:
    return lambda minibatch: Work(count)


def train(record: Record, *steps: int, evaluate: int = 2) -> None:
    for step in steps:
        record.step(RecordedStep(step - 1, 1.0 / step if step != 4 else math.nan, 0.1))
        if step % evaluate == 0:
            record.evaluated(step, {"accuracy": step / 10}, 0.0)
            record.averages_evaluated(step, {"accuracy": step / 20}, 0.0)


def told(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    return [{k: v for k, v in row.items() if k not in ("seconds", "samples_per_second")} for row in rows]


@pytest.fixture
def whole(tmp_path: Path) -> list[dict[str, Any]]:
    record = Record(tmp_path / "whole", samples(4), 9)
    train(record, *range(1, 10))
    record.close()
    return told(tmp_path / "whole")


@pytest.mark.parametrize("after", [1, 4, 5, 6])
def test_a_run_that_goes_on_tells_the_same(tmp_path: Path, whole: list[dict[str, Any]], after: int) -> None:
    interrupted = Record(tmp_path, samples(4), 9)
    train(interrupted, *range(1, 7))
    del interrupted  # killed
    record = Record(tmp_path, samples(4), 9, continue_after=after)
    assert record.pace.steps == 0
    if after % 2 == 0:
        record.evaluated(after, {"accuracy": after / 10}, 0.0)  # again, because the checkpoint was before it
        record.averages_evaluated(after, {"accuracy": after / 20}, 0.0)
    train(record, *range(after + 1, 10))
    record.take_place({"model.safetensors"})
    record.close()
    assert told(tmp_path) == whole
    assert record.pace.steps == 9 - after
    wanted = array("d", [1.0 / step if step != 4 else math.nan for step in range(1, 10)])
    assert record.losses.tobytes() == wanted.tobytes()
    evaluations = [{"step": s, "metrics": {"accuracy": s / 10}, "averaged": {"accuracy": s / 20}} for s in (2, 4, 6, 8)]
    assert record.evaluations == evaluations
    assert read_run(tmp_path)["evaluations"] == evaluations
    assert len(read_run(tmp_path)["metrics"]["step"]) == 9
    seconds = read_run(tmp_path)["metrics"]["seconds"]
    assert seconds == sorted(seconds)
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["metrics.jsonl"]


def test_missing_lines_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = Record(tmp_path, samples(4), 9)
    train(record, 1, 2, 3)
    record.close()
    Record(tmp_path, samples(4), 9, continue_after=5).close()
    assert "has no lines of some of the 5 steps that were made before" in capsys.readouterr().err


def test_lines_of_a_run_in_another_folder_are_taken_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint's run stays as it is, and so does what an earlier run has left in the new folder."""
    first = Record(tmp_path / "first", samples(4), 9)
    train(first, *range(1, 7))
    first.close()
    before = (tmp_path / "first" / "metrics.jsonl").read_bytes()
    for there in (False, True):
        out = tmp_path / str(there)
        if there:
            old = Record(out, samples(4), 9)
            train(old, 1)
            old.close()
            earlier = (out / "metrics.jsonl").read_bytes()
        record = Record(out, samples(4), 9, continue_after=5, earlier=tmp_path / "first")
        train(record, *range(6, 10))
        if there:
            assert (out / "metrics.jsonl").read_bytes() == earlier
        assert (record.pace.first, record.pace.steps, len(record.losses)) == (5, 4, 9)
        record.take_place({"model.safetensors"})
        record.close()
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows if "loss" in row] == list(range(1, 10))
    assert (tmp_path / "first" / "metrics.jsonl").read_bytes() == before
    assert not capsys.readouterr().err
    gone = Record(tmp_path / "gone", samples(4), 9, continue_after=5, earlier=tmp_path / "none")
    train(gone, 6, 7)
    gone.close()
    assert (gone.pace.first, gone.pace.steps, len(gone.losses)) == (5, 2, 2)
    assert "has no lines of some of the 5 steps" in capsys.readouterr().err


def test_a_resumed_runs_steady_rate_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("fxpipe.observe.pace.perf_counter", lambda: now[0])
    record = Record(tmp_path, samples(10), 30, workers=2)
    train(record, *range(1, 11), evaluate=100)
    record.close()
    record = Record(tmp_path, samples(10), 30, workers=2, continue_after=10)
    for step in range(11, 21):
        now[0] += 5.0 if step in (11, 12, 13, 19, 20) else 1.0
        record.step(RecordedStep(step - 1, 1.0))
    assert record.pace.steady == 10.0
    assert record.pace.rates["samples_per_second"] == pytest.approx(100 / 30)


def test_what_a_record_keeps_of_a_step_is_its_loss(tmp_path: Path) -> None:
    import tracemalloc

    record = Record(tmp_path, samples(4), 100_000, workers=2)
    train(record, *range(1, 1001), evaluate=10**9)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    train(record, *range(1001, 6001), evaluate=10**9)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    record.close()
    assert after - before < 5000 * 8 * 1.3, "8 bytes a step, and what an array reserves"


def test_a_display_that_takes_nothing_ends_no_run(tmp_path: Path) -> None:
    class Closed:
        def watch(self, board: object) -> None:
            raise AssertionError

        def __call__(self, *step: object) -> None:
            raise BrokenPipeError

        def evaluated(self, *found: object) -> None:
            raise AssertionError

        def close(self) -> None:
            raise AssertionError

    record = Record(tmp_path, samples(4), 3, Closed())
    train(record, 1, 2, 3)
    record.close()
    assert len(told(tmp_path)) == 5

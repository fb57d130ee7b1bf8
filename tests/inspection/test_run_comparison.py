"""Two runs are compared number by number, and the verdict says why one is faster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from written_runs import write_run

from fxpipe.inspection.run_comparison import comparison, outcome
from fxpipe.observe.run_folder import read_run


def compared(first: Path, second: Path) -> Any:
    return comparison(read_run(first), read_run(second))


def test_two_runs_side_by_side(tmp_path: Path) -> None:
    one = write_run(tmp_path / "one")
    two = write_run(tmp_path / "two", 200.0, wait=0.55, schedule="gpipe", policy="latest", seed=1)
    found = compared(one, two)
    assert found["runs"] == [str(one), str(two)]
    assert found["settings"] == {"schedule": ["async", "gpipe"], "policy": ["spectrain", "latest"], "seed": [0, 1]}
    assert found["speed"]["samples_per_second"] == [320.0, 160.0]
    assert found["speed"]["step_ms"] == pytest.approx([100.0, 200.0])
    assert (found["faster"], found["ratio"]) == (0, 0.5)
    assert found["loss"]["raw"] == pytest.approx([1.22, 1.22])
    assert found["loss"]["smoothed"] == pytest.approx([2 - 0.02 * 29.5] * 2)
    then = found["loss"]["same_time"]
    assert (then["seconds"], then["smoothed"]) == (4.0, pytest.approx([2 - 0.02 * 29.5, 2 - 0.02 * 9.5]))
    assert found["evaluation"] == {"accuracy": [0.5, 0.5]}
    assert found["workers"][1]["busy"] == pytest.approx([0.9, 0.45])
    assert found["workers"][0]["spent"][1]["wait"] == pytest.approx(0.55)
    assert found["verdict"] == [
        "Run 1 is 2.00 times as fast (320.0 samples/s against 160.0).",
        "After the same time (4 s) run 1 has the lower loss: 1.41 against 1.81.",
    ]


def test_a_run_that_went_on_took_the_time_of_all_its_steps(tmp_path: Path) -> None:
    resumed = write_run(tmp_path / "one")
    body = json.loads((resumed / "run.json").read_text())
    (resumed / "run.json").write_text(json.dumps(body | {"resumed_after": 30, "seconds": 1.0}))
    assert outcome(read_run(resumed))["seconds"] == pytest.approx(4.0)


def test_runs_that_are_alike(tmp_path: Path) -> None:
    assert compared(write_run(tmp_path / "one"), write_run(tmp_path / "two", 100.5))["verdict"][0] == (
        "They are equally fast."
    )


def test_it_does_not_matter_which_stands_first(tmp_path: Path) -> None:
    one, two = write_run(tmp_path / "one"), write_run(tmp_path / "two", 250.0, wait=0.6)
    there, back = compared(one, two), compared(two, one)
    assert (there["faster"], back["faster"]) == (0, 1)
    assert there["verdict"][0].replace("Run 1", "Run 2") == back["verdict"][0]
    assert "2.50 times" in back["verdict"][0]


def write_losses(folder: Path, losses: list[float | None]) -> Path:
    rows = [{"step": i, "loss": loss, "seconds": 0.1 * i} for i, loss in enumerate(losses, start=1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_a_run_that_diverged_is_not_the_better_one(tmp_path: Path) -> None:
    one = write_run(tmp_path / "one")
    two = write_losses(write_run(tmp_path / "two"), [*[0.1] * 25, *[None] * 15])
    found = compared(one, two)
    assert (found["loss"]["raw"], found["loss"]["smoothed"]) == (
        [pytest.approx(1.22), None],
        [pytest.approx(1.41), None],
    )
    assert found["verdict"][1:] == ["Run 2's loss is not finite from step 26 on."]
    assert compared(two, one)["verdict"][1:] == ["Run 1's loss is not finite from step 26 on."]
    longer = write_losses(write_run(tmp_path / "longer"), [*[0.1] * 60, *[None] * 15])
    assert compared(one, longer)["verdict"][1:] == ["Run 2's loss is not finite from step 61 on."], (
        "later than run 1 is"
    )
    assert len(compared(two, longer)["verdict"]) == 3


def test_a_loss_that_was_not_finite_for_a_while(tmp_path: Path) -> None:
    two = write_losses(write_run(tmp_path / "two"), [*[0.1] * 19, None, *[0.1] * 20])
    found = compared(write_run(tmp_path / "one"), two)
    assert found["loss"]["smoothed"][1] == pytest.approx(0.1)
    assert found["verdict"][1].endswith("run 2 has the lower loss: 0.1 against 1.41.")

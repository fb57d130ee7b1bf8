"""Several runs in one table."""

from __future__ import annotations

from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest
from written_runs import write_run

from fxpipe.inspection.run_comparison import run_table
from fxpipe.observe.run_folder import read_run


def read(folder: Path, loss: float, **more: Any) -> dict[str, Any]:
    run = read_run(write_run(folder, **more))
    run["metrics"]["loss"] = [loss] * len(run["metrics"]["loss"])
    return run


def test_each_run_has_a_row(tmp_path: Path) -> None:
    runs = [read(tmp_path / str(i), float(i), seed=i % 2, settings={"lr": i // 2}) for i in range(4)]
    found = run_table(runs)
    assert found["settings"] == ["setting lr", "seed"]
    assert [row["runs"] for row in found["rows"]] == [[str(tmp_path / str(i))] for i in range(4)]
    assert [row["settings"] for row in found["rows"]] == [{"setting lr": i // 2, "seed": i % 2} for i in range(4)]
    assert [row["outcomes"]["loss"] for row in found["rows"]] == [[float(i), None] for i in range(4)]


def test_seeds_share_a_row(tmp_path: Path) -> None:
    losses = [1.0, 4.0, 2.0, 8.0, 6.0, 9.0]
    runs = [read(tmp_path / str(i), loss, seed=i // 2, settings={"lr": i % 2}) for i, loss in enumerate(losses)]
    found = run_table(runs, seeds=True)
    assert found["settings"] == ["setting lr"]
    assert [row["seeds"] for row in found["rows"]] == [[0, 1, 2], [0, 1, 2]]
    wanted = [[mean(own), stdev(own)] for own in (losses[::2], losses[1::2])]
    assert [row["outcomes"]["loss"] for row in found["rows"]] == [pytest.approx(own) for own in wanted]


def test_a_number_that_a_run_lacks_is_not_made_up(tmp_path: Path) -> None:
    runs = [read(tmp_path / str(i), 1.0, seed=i) for i in range(2)]
    runs[1]["metrics"]["loss"][-1] = None  # as a loss that is not finite is read
    runs[0]["evaluation"], runs[1]["evaluation"] = {"accuracy": 0.5}, None
    (row,) = run_table(runs, seeds=True)["rows"]
    assert row["outcomes"]["loss"] == row["outcomes"]["held out accuracy"] == [None, None]

"""Whatever ends a run of processes early, its first cause is what one reads, and nothing is left of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fxpipe.errors import RunError
from fxpipe.runtime.options import RunOptions
from fxpipe.runtime.process.launch import launch
from fxpipe.runtime.process.start import run_local

pytestmark = pytest.mark.multiproc
MIXED = {"forward": (0, 0, 1, 2, 2), "backward": (0, 1, 1, 1, 2), "tied": True, "dropout": True}


@pytest.mark.slow
def test_the_first_error_is_the_one_reported(toy: Any, tmp_path: Path, capfd: Any) -> None:
    folder = toy(**MIXED, spoil={1: ("z = g2", "z = g2 @ g2[:2]")}).save(tmp_path / "build")
    with pytest.raises(RunError) as caught:
        launch(RunOptions(str(folder), steps=50), 3)
    assert "backward of step 1 (B0) failed on worker 1: RuntimeError" in str(caught.value)
    assert "stage_1.py:" in str(caught.value)
    assert "z = g2 @ g2[:2] * (1" in str(caught.value)
    _, err = capfd.readouterr()
    assert err.count("\n") == 1
    assert "was edited" in err


def test_threads_are_restored_after_a_local_run(toy: Any, tmp_path: Path) -> None:
    before = torch.get_num_threads()
    run_local(RunOptions(str(toy().save(tmp_path / "build")), steps=1, threads=1))
    assert torch.get_num_threads() == before


def test_what_is_done_is_said_from_the_start(toy: Any, tmp_path: Path, capfd: Any) -> None:
    """Before torch is imported, and only where progress is shown."""
    folder = str(toy().save(tmp_path / "build"))
    launch(RunOptions(folder, steps=1, threads=1, progress=True), 2)
    first, *more = capfd.readouterr().err.splitlines()
    assert first == "starting 2 processes"
    assert "step 1/1" in more[-1]
    launch(RunOptions(folder, steps=1, threads=1), 2)
    assert capfd.readouterr().err == ""

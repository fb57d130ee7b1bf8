"""Whatever ends a run of processes early, its first cause is what one reads, and nothing is left of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from fxpipe.errors import RunError
from fxpipe.runtime.options import RunOptions
from fxpipe.runtime.process.launch import launch
from fxpipe.runtime.process.local_run import run_local

pytestmark = pytest.mark.multiproc
MIXED = {"forward": (0, 0, 1, 2, 2), "backward": (0, 1, 1, 1, 2), "tied": True, "dropout": True}


@pytest.mark.slow
def test_a_killed_worker_is_named_soon(toy: Any, tmp_path: Path) -> None:
    suicide = ("loss = (", "import os\n    os.kill(os.getpid(), 9)\n    loss = (")
    folder = toy(spoil={1: suicide}).save(tmp_path / "build")
    begin = time.monotonic()
    with pytest.raises(RunError, match=r"worker 1 was killed by signal 9 \(SIGKILL\)"):
        launch(RunOptions(str(folder), steps=1000), 2)
    assert time.monotonic() - begin < 60


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


@pytest.mark.slow
def test_interrupt_leaves_nothing_behind(toy: Any, tmp_path: Path) -> None:
    folder = toy().save(tmp_path / "build")
    (tmp_path / "tmp").mkdir()
    out = tmp_path / "out"
    options = RunOptions(str(folder), steps=10**7, out=str(out))
    script = f"""from fxpipe.runtime.options import RunOptions
from fxpipe.runtime.process.launch import launch
launch(RunOptions.from_json({options.to_json()!r}), 2)"""
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        env={**os.environ, "TMPDIR": str(tmp_path / "tmp")},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 60
        while not (out / "metrics.jsonl").exists() or not (out / "metrics.jsonl").read_text():
            assert time.monotonic() < deadline
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
    finally:
        process.kill()
    assert err.strip().endswith("KeyboardInterrupt"), err
    left = [p.name for p in (tmp_path / "tmp").iterdir()]
    assert [name for name in left if not name.startswith("torchinductor_")] == []  # a cache of torch's own
    assert not [p for p in running() if str(folder) in p]
    assert not (out / "model.safetensors").exists()


def running() -> list[str]:
    """The command lines of all processes."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return lines


def test_threads_are_restored_after_a_local_run(toy: Any, tmp_path: Path) -> None:
    before = torch.get_num_threads()
    run_local(RunOptions(str(toy().save(tmp_path / "build")), steps=1, threads=1))
    assert torch.get_num_threads() == before

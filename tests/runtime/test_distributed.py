"""Worker processes give the local run's bits; whatever ends a run early, its first cause is what one reads."""

from __future__ import annotations

import dataclasses
import json
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


@pytest.mark.slow  # tests/cli/test_run.py compares the two in every run of the suite
@pytest.mark.parametrize(
    ("toy_options", "run_options"),
    [
        ({**MIXED, "policy": "spectrain"}, {"steps": 15, "seed": 3}),
        ({"microbatches": 4, "schedule": "1f1b", "tied": True, "forward": (0, 1, 1), "backward": (0, 0, 1)}, {}),
        ({**MIXED, "policy": "spectrain", "weights_codec": "int8"}, {"steps": 15, "seed": 3}),
        ({**MIXED, "policy": "stash", "weights_codec": "lowrank:2"}, {"steps": 15, "seed": 3}),
    ],
)
def test_distributed_is_local_bit_for_bit(
    toy: Any, tmp_path: Path, toy_options: dict[str, Any], run_options: dict[str, Any], capfd: Any
) -> None:
    built = toy(**toy_options)
    options = RunOptions(str(built.save(tmp_path / "build")), out=str(tmp_path / "local"), **run_options)
    local = run_local(options)
    options = dataclasses.replace(options, out=str(tmp_path / "real"))
    real = launch(options, built.workers)
    assert real["losses"] == local["losses"]
    assert real["steps"] == local["steps"] == run_options.get("steps", 6)
    assert real.keys() == local.keys()
    assert [row.keys() for row in real["workers"]] == [row.keys() for row in local["workers"]]
    assert (tmp_path / "real/model.safetensors").read_bytes() == (tmp_path / "local/model.safetensors").read_bytes()
    rows = [[json.loads(s) for s in (tmp_path / d / "metrics.jsonl").open()] for d in ("real", "local")]
    for a, b in zip(*rows, strict=True):
        assert a.keys() == b.keys()
        assert [a[k] for k in ("step", "loss", "lr")] == [b[k] for k in ("step", "loss", "lr")]
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")


def test_processes_of_two_workers_are_the_local_run(toy: Any, tmp_path: Path) -> None:
    """tests/test_hosting.py has the rest of it."""
    layers = {"forward": (0, 0, 1, 2, 3, 3), "backward": (0, 1, 1, 2, 2, 3), "tied": True, "dropout": True}
    built = toy(**layers, schedule="interleaved", placement=(0, 1, 0, 1), microbatches=4)
    options = RunOptions(str(built.save(tmp_path / "build")), out=str(tmp_path / "local"), clip_norm=0.1)
    local = run_local(options)
    real = launch(dataclasses.replace(options, out=str(tmp_path / "real")), 2, (0, 1, 0, 1))
    assert real["losses"] == local["losses"]
    assert [(row["worker"], row["rank"]) for row in real["workers"]] == [(0, 0), (1, 1), (2, 0), (3, 1)]
    assert (tmp_path / "real/model.safetensors").read_bytes() == (tmp_path / "local/model.safetensors").read_bytes()


@pytest.mark.slow
def test_a_shorter_run_with_encoded_weight_copies_goes_on_as_a_longer_one(toy: Any, tmp_path: Path) -> None:
    """Though its workers knew its end, and did not send what only later minibatches read."""
    folder = str(toy(**MIXED, policy="spectrain", weights_codec="int8").save(tmp_path / "build"))
    whole = launch(RunOptions(folder, steps=15, out=str(tmp_path / "whole")), 3)
    first = RunOptions(folder, steps=7, out=str(tmp_path / "first"), checkpoint_every="7")
    shorter = launch(first, 3)
    assert whole["losses"][:7] == shorter["losses"]
    path = str(tmp_path / "first" / "checkpoints" / "step-7")
    longer = launch(RunOptions(folder, steps=15, out=str(tmp_path / "longer"), resume=path, weights=path), 3)
    assert longer["losses"][-8:] == whole["losses"][-8:]
    assert (tmp_path / "longer/model.safetensors").read_bytes() == (tmp_path / "whole/model.safetensors").read_bytes()


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

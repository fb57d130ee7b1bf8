"""A worker dies while its device computes: the others end, and say which it was; a restart trains the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gpu_runs import CUT, MARKS, MICROBATCHES, NET, WIRES, compiled, started
from started_runs import started_command

from fxpipe.runtime.wires.shared_memory import SWITCH

pytestmark = MARKS
DYING = """
import signal

from fxpipe.runtime.worker.executor import Executor

os.environ["NCCL_HOSTID"] = f"host{rank()}"  # read when a run begins: the processes share a device
DEAD = Path(__file__).with_name("dead")


def die(executor, action, *given):
    if rank() == "1" and action.minibatch == 2 and not DEAD.exists():
        DEAD.touch()
        torch.cuda._sleep(2_000_000_000)  # about a second
        os.kill(os.getpid(), signal.SIGKILL)


before(Executor, "execute", die)
"""
CAUGHT = """
import sys
import threading

sys.path.insert(0, {folder!r})
import fxpipe
import torch
from fxpipe.errors import PeerLost, WorkerLost
from fxpipe.runtime.process.ends import end_process
from model import optimizer, rank, train_data

try:
    with fxpipe.join({folder!r} + "/build", optimizer=optimizer) as pipeline:
        for _, batch in zip(range(8), train_data()):
            float(pipeline.step(batch))
except (PeerLost, WorkerLost):
    waits = threading.Thread(target=torch.cuda.synchronize, daemon=True)
    waits.start()
    waits.join(20)
    print("the device", "waits for ever" if waits.is_alive() else "goes on")
end_process(0)
"""


def build_of(folder: Path) -> Path:
    return compiled(folder, NET + DYING, *MICROBATCHES, *CUT)


def losses(out: Path) -> list[float]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


@pytest.mark.parametrize("wires", WIRES)
def test_the_run_ends_and_names_it(tmp_path: Path, wires: str, monkeypatch: pytest.MonkeyPatch) -> None:
    build, temporary = build_of(tmp_path), tmp_path / "tmp"
    monkeypatch.setenv(SWITCH, str(int(wires == "peer memory")))
    command = ["-m", "fxpipe", "run", str(build), "--steps", "6", "--out", str(tmp_path / "out")]
    with started_command(command, temporary) as run:
        run.until((tmp_path / "dead").exists, 180)
        code, err = run.ends(30)
        assert code == 1
        assert f"messages: all pairs: {wires}" in err
        assert "worker 1 was killed by signal 9 (SIGKILL)" in err
        run.is_gone(10)


@pytest.mark.parametrize("wires", WIRES)
def test_a_restart_trains_the_same(tmp_path: Path, wires: str, monkeypatch: pytest.MonkeyPatch) -> None:
    build = build_of(tmp_path)
    monkeypatch.setenv(SWITCH, str(int(wires == "peer memory")))
    for out, restarts in (("restarted", 1), ("whole", 0)):  # the first one dies
        command = ["-m", "fxpipe", "run", str(build), "--steps", "6", "--checkpoint-every", "2"]
        command += ["--max-restarts", str(restarts), "--out", str(tmp_path / out)]
        with started_command(command, tmp_path / "tmp") as run:
            code, err = run.ends(240)
            assert code == 0, err
            assert ("restart 1 of 1" in err) == bool(restarts)
    assert losses(tmp_path / "restarted") == losses(tmp_path / "whole")


@pytest.mark.parametrize("wires", WIRES)
def test_a_script_learns_of_it(tmp_path: Path, wires: str) -> None:
    """Whether its device goes on then, CUDA does not say: what is printed belongs into docs/reference/gpu.md."""
    build_of(tmp_path)
    (tmp_path / "loop.py").write_text(CAUGHT.format(folder=str(tmp_path)))
    with started(wires, 2, tmp_path / "loop.py") as processes:
        out, err = processes[0].communicate(timeout=240)
    assert processes[0].returncode == 0, err
    assert out.startswith("the device ")
    print(wires, out)

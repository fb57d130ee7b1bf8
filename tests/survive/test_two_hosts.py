"""Two machines, as far as one can be two: hosts with a network and files of their own, and a real link between them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from moving import moving_build
from safetensors.torch import load_file
from two_hosts import Host, missing, slow_down, two_hosts

from fxpipe.lowering.lower import compile
from fxpipe.runtime.options import RunOptions
from fxpipe.runtime.process.start import run_local
from fxpipe.task.model_file import load_task

pytestmark = [pytest.mark.slow, pytest.mark.multiproc]
RATE = 200e6

MODEL = """
import torch
from torch import nn

def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 16))

def loss(model, batch):
    return ((model(batch) - batch) ** 2).mean()

def train_data():
    return [torch.randn(8, 16, generator=torch.Generator().manual_seed(i)) for i in range(6)]

def optimizer(named_parameters):
    return torch.optim.AdamW([p for _, p in named_parameters], lr=1e-2)
"""


@pytest.fixture(scope="module", autouse=True)
def _allowed() -> None:
    if reason := missing():
        pytest.skip(reason)


def begin(
    hosts: Sequence[Host], folder: Path, *arguments: object, environment: Mapping[str, str] | None = None
) -> list[subprocess.Popen[str]]:
    """Start torchrun on both hosts."""
    started = []
    for rank, host in enumerate(hosts):
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", 2, "--nproc-per-node", 1]
        torchrun += ["--node-rank", rank, "--master-addr", hosts[0].address, "--master-port", 29517, "-m", "fxpipe"]
        started.append(host.start([*torchrun, *arguments], folder, environment))
    return started


def together(hosts: Sequence[Host], folder: Path, *arguments: object) -> list[str]:
    """What torchrun, started on both hosts, prints on each."""
    started = begin(hosts, folder, *arguments)
    said = [process.communicate(timeout=120) for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    return [out for out, _ in said]


def test_a_link_takes_its_time(tmp_path: Path) -> None:
    if reason := missing(0.03):
        pytest.skip(reason)
    with two_hosts(RATE, latency=0.03) as hosts:
        first, _ = together(hosts, tmp_path, "doctor", "--links", "--json")
    report = json.loads(first)
    assert report["latency"] >= 0.03
    assert report["bandwidth"] * 8 < 1.1 * RATE


def test_a_lost_link_ends_both_hosts_and_the_run_goes_on(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    task = load_task(tmp_path / "model.py")
    build = compile(task.model(), task.loss, task.train_data()[0], workers=2, schedule="async", cost="analytic")
    build.save(tmp_path / "build", model_file=tmp_path / "model.py")
    run = ["run", tmp_path / "build", "--threads", 1, "--steps", 2000, "--checkpoint-every", 100]
    run += ["--out", tmp_path / "out"]
    saved = tmp_path / "out" / "checkpoints" / "step-200"
    with two_hosts(RATE) as hosts:
        started = begin(hosts, tmp_path, *run, "--stall-timeout", 1)
        until = time.monotonic() + 90
        while not saved.is_dir() and time.monotonic() < until and all(p.poll() is None for p in started):
            time.sleep(0.05)
        subprocess.run(["ip", "-n", hosts[1].name, "link", "set", hosts[1].interface, "down"], check=True)
        (_, first), (_, second) = (process.communicate(timeout=60) for process in started)
    assert [process.returncode for process in started] == [1, 1]
    assert "error: the run stood still for" in first
    assert "worker 1 does not answer" in first
    assert "the last good checkpoint is" in first
    assert "error: worker 1 has not reached the host of worker 0 for" in second
    with two_hosts(RATE) as hosts:
        together(hosts, tmp_path, *run, "--resume")
    build = {"build": str(tmp_path / "build"), "model_file": str(tmp_path / "model.py")}
    run_local(RunOptions(**build, steps=2000, threads=1, out=str(tmp_path / "local")))
    resumed = tmp_path / "out" / "model.safetensors"
    assert resumed.read_bytes() == (tmp_path / "local" / "model.safetensors").read_bytes()


def test_an_interface_that_is_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    task = load_task(tmp_path / "model.py")
    build = compile(task.model(), task.loss, task.train_data()[0], workers=2, schedule="async", cost="analytic")
    build.save(tmp_path / "build", model_file=tmp_path / "model.py")
    with two_hosts(RATE) as hosts:
        run = ["run", tmp_path / "build", "--threads", 1, "--steps", 2, "--out", tmp_path / "out"]
        started = begin(hosts, tmp_path, *run, environment={"GLOO_SOCKET_IFNAME": "eth77"})
        (_, first), (_, second) = (process.communicate(timeout=60) for process in started)
    for said in (first, second):
        assert re.search(r"error: GLOO_SOCKET_IFNAME=eth77, and .* has no network interface of this name", said)
        assert re.search(r"hint: it has .*fx-(left|right)", said)


def test_units_move_from_a_link_that_became_slower(tmp_path: Path) -> None:
    """Nothing is imitated: the hosts' clocks are one, but their link is real. The flush keeps the bits."""
    build = moving_build(tmp_path, 1500, widths=(12, 12, *(768,) * 4, 12), bandwidth="180Mbit")
    run = ["run", build, "--threads", 1, "--rebalance", "--out", tmp_path / "out", "--json"]
    metrics = tmp_path / "out" / "metrics.jsonl"
    with two_hosts(180e6) as hosts:
        started = begin(hosts, tmp_path, *run)
        until = time.monotonic() + 90
        while not (metrics.is_file() and metrics.read_text().count("\n") > 100) and time.monotonic() < until:
            time.sleep(0.1)
        slow_down(hosts, 8e6)
        said = [process.communicate(timeout=300) for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    summary = json.loads(said[0][0])
    (move,) = [move for move in summary["moves"] if "link" in move["because"]]
    assert move["gain"] > 0.1
    assert 0 < move["seconds"] < 90
    assert re.search(r"link 0→1 [5-8]\.?\d* of 180 Mbit/s", move["because"]), move
    run_local(RunOptions(str(build), threads=1, out=str(tmp_path / "local")))
    trained, alone = (load_file(tmp_path / out / "model.safetensors") for out in ("out", "local"))
    assert all(trained[name].equal(value) for name, value in alone.items())

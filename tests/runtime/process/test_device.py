"""NCCL where each process has a CUDA device of its own, whatever the environment says of ranks; else gloo."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cached import lowered

from fxpipe.observe.pulse import Pulse, PulseFile
from fxpipe.runtime.options import RunOptions
from fxpipe.runtime.process import device, world
from fxpipe.runtime.process.membership import Member
from fxpipe.runtime.process.world import AmongProcesses
from fxpipe.runtime.wires.board import DictBoard
from fxpipe.runtime.wires.meeting import CONNECTIONS

HERE = ("host", "GPU-0")


@pytest.mark.parametrize(
    ("others", "backend"),
    [
        pytest.param([("pod 1", "GPU-1"), ("pod 2", "GPU-2")], "nccl", id="one device a host"),
        pytest.param([("host", "GPU-1"), ("host", "GPU-2")], "nccl", id="one host"),
        pytest.param([("host", "GPU-1"), HERE], "gloo", id="two on one device"),
        pytest.param([("host", "GPU-1"), None], "gloo", id="one without a device"),
    ],
)
def test_by_the_devices_that_there_are(others: list[Any], backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def gathered(own: Any) -> list[Any]:
        assert own == HERE
        return [own, *others]

    monkeypatch.setattr(device, "gathered", gathered)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="GPU-0"))
    monkeypatch.setenv("NCCL_HOSTID", "host")
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert device.common_backend(torch.device("cuda", 0)) == backend


def test_gloo_on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "gathered", lambda own: [None] * 3)
    assert device.common_backend(torch.device("cpu")) == "gloo"


@pytest.mark.parametrize(
    ("own", "began", "local_rank", "late"),
    [(None, False, 0, False), (None, True, 0, True), (None, True, 1, False), ("8", True, 0, False)],
)
def test_queues_that_come_too_late_are_said(
    own: str | None,
    began: bool,
    local_rank: int,
    late: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of a script that had a context before; once for each machine."""
    values = {"is_initialized": began, "is_available": True, "device_count": 2, "set_device": None}
    for name, value in values.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    monkeypatch.setenv(CONNECTIONS, own or "")
    if own is None:
        monkeypatch.delenv(CONNECTIONS)
    for _ in range(2):
        assert device.own_device("cuda") == torch.device("cuda", local_rank)
    assert os.environ[CONNECTIONS] == (own or "32")
    assert capsys.readouterr().err.count("before fxpipe could set") == late


def test_throttled_messages_go_over_gloo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL begins messages that the device has not made yet: their time would count from too early."""
    plan = lowered("function", workers=2).plan
    monkeypatch.setattr(world, "common_backend", lambda *_: "nccl")
    for throttle, name in ((None, "nccl"), ("4Mbit,20ms", "gloo")):
        agreed: Any = SimpleNamespace(plan=plan, options=RunOptions("build", throttle=throttle))
        member = Member(agreed, 0, Pulse(), PulseFile(tmp_path / "pulses", 2), DictBoard())
        assert AmongProcesses(member).name == name

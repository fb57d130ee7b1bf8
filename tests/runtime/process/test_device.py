"""NCCL where each process has a CUDA device of its own, whatever the environment says of ranks; else gloo."""

from __future__ import annotations

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
from fxpipe.runtime.process.world import AmongProcesses

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
    def gathered(own: Any, rank: int, ranks: int) -> list[Any]:
        assert own == HERE
        return [own, *others]

    monkeypatch.setattr(device, "gathered", gathered)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="GPU-0"))
    monkeypatch.setenv("NCCL_HOSTID", "host")
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert device.common_backend(torch.device("cuda", 0), 0, 3) == backend


def test_gloo_on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "gathered", lambda own, rank, ranks: [None] * ranks)
    assert device.common_backend(torch.device("cpu"), 0, 3) == "gloo"


def test_throttled_messages_go_over_gloo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL begins messages that the device has not made yet: their time would count from too early."""
    plan = lowered("function", workers=2).plan
    monkeypatch.setattr(world, "common_backend", lambda *_: "nccl")
    for throttle, name in ((None, "nccl"), ("4Mbit,20ms", "gloo")):
        options = RunOptions("build", throttle=throttle, exchange=str(tmp_path))
        assert AmongProcesses(plan, options, 0, Pulse(), PulseFile(tmp_path / "pulses", 2)).name == name

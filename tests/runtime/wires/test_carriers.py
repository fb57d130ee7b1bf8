"""Each pair of processes is said with its transport, and with the reason that is true."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fxpipe.planner.links import Links
from fxpipe.runtime.options import RunOptions
from fxpipe.runtime.process.launch import launch
from fxpipe.runtime.process.start import run_local
from fxpipe.runtime.wires import processes, shared_memory
from fxpipe.runtime.wires.processes import Carrier, ProcessWires, carriers_text
from fxpipe.runtime.wires.shared_memory import Ends, Whereabouts
from fxpipe.runtime.wires.throttled import ThrottledWires

HERE = Whereabouts("", "one", (1, 2), 0)


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (HERE, ""),
        (HERE._replace(off="FXPIPE_SHARED_MEMORY=0"), "FXPIPE_SHARED_MEMORY=0"),
        (HERE._replace(host="two"), "different hosts"),
        (HERE._replace(spaces=(1, 3)), "different containers"),
        (HERE._replace(user=1000), "different users"),
    ],
)
def test_what_separates_two_processes(other: Whereabouts, why: str) -> None:
    assert HERE.separates(other) == other.separates(HERE) == why


def test_it_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Whereabouts.here().off == ""
    monkeypatch.setenv(shared_memory.SWITCH, "0")
    assert Whereabouts.here().off == "FXPIPE_SHARED_MEMORY=0"


def test_a_system_without_such_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("os.memfd_create")
    assert Whereabouts.here().separates(HERE) == "only Linux has such memory"


@pytest.mark.parametrize(
    ("without", "kinds"),
    [
        ({}, "nccl"),
        ({(0, 1): ""}, "peer memory"),
        ({(0, 1): "", (1, 0): "different hosts"}, "nccl and peer memory"),
    ],
)
def test_the_kinds_of_a_run(without: dict[tuple[int, int], str], kinds: str) -> None:
    assert Ends({}, {}, without).kinds("peer memory", "nccl") == kinds


def test_processes_with_cuda_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    place = [("weights", 0, 1)], torch.device("cuda", 0)
    lone, none = "not every process has a CUDA device of its own", "torch has no NCCL"
    monkeypatch.setattr(ProcessWires, "_connect", lambda self, directions: None)
    for backend, there, apart, transport, why in (
        ("nccl", True, "", "peer memory", "same machine, same user"),
        ("nccl", True, "different hosts", "nccl", "different hosts"),
        ("gloo", True, "different hosts", "gloo through CPU memory", f"different hosts; {lone}"),
        ("gloo", False, "different hosts", "gloo through CPU memory", f"different hosts; {none}"),
    ):
        monkeypatch.setattr(processes, "connected", lambda *_, apart=apart: Ends({}, {}, {(0, 1): apart}))
        monkeypatch.setattr(dist, "is_nccl_available", lambda there=there: there)
        assert ProcessWires(0, backend, *place).carriers == [Carrier(0, 1, transport, why)]
    slow = ThrottledWires(Links(1e9), 0.0, 0, "gloo", *place)
    assert slow.carriers == [Carrier(0, 1, "gloo through CPU memory", f"--throttle; {none}")]


def test_pairs_that_are_alike_are_one_line() -> None:
    ways = [Carrier(*way, "shared memory", "same machine, same user") for way in permutations(range(3), 2)]
    assert carriers_text(ways) == ["all pairs: shared memory: same machine, same user"]
    assert carriers_text([]) == []


def test_others_are_grouped() -> None:
    hosts = (0, 0, 1, 1)
    ways = [
        Carrier(one, other, "shared memory", "same machine, same user")
        if hosts[one] == hosts[other]
        else Carrier(one, other, "gloo", "different hosts")
        for one, other in permutations(range(4), 2)
    ]
    assert carriers_text(ways) == [
        "0 ↔ 1, 2 ↔ 3: shared memory: same machine, same user",
        "0 ↔ 2, 0 ↔ 3, 1 ↔ 2, 1 ↔ 3: gloo: different hosts",
    ]
    assert carriers_text(ways, most=1)[1] == "0 ↔ 2 and 3 more: gloo: different hosts"
    ways = [Carrier(1, 0, "gloo", "refused"), Carrier(0, 1, "shared memory", "same")]
    assert carriers_text(ways) == ["1 → 0: gloo: refused", "0 → 1: shared memory: same"]


@pytest.mark.slow
@pytest.mark.multiproc
def test_a_run_says_it_first(toy: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = str(toy().save(tmp_path / "build"))
    for more, transport in (
        ({}, "shared memory: same machine, same user"),
        ({"throttle": "1Gbit"}, "gloo: --throttle"),
    ):
        launch(RunOptions(folder, steps=2, progress=True, **more), 2)
        assert f"messages: all pairs: {transport}\n" in capfd.readouterr().err
    run_local(RunOptions(folder, steps=2, progress=True))
    assert "messages" not in capfd.readouterr().err

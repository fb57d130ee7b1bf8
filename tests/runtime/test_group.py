"""The user's code finds no process group, so that it does in a distributed run what it does in a local one."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import is_initialized
from torch.multiprocessing import start_processes

from fxpipe.errors import PeerLost
from fxpipe.runtime.wires import group
from fxpipe.runtime.wires.group import close_group, open_group, peers

pytestmark = pytest.mark.multiproc


def _meet(rank: int, folder: str) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT=Path(folder, "port").read_text()
    )
    open_group(rank, 2, timedelta(seconds=30))
    assert not is_initialized()
    with peers():
        assert is_initialized()
        found = [None, None]
        dist.all_gather_object(found, rank)
        assert found == [0, 1]
    assert not is_initialized()
    try:
        with peers():
            raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer")
    except PeerLost:
        assert not is_initialized()
    try:
        with peers():
            raise torch.OutOfMemoryError("CUDA out of memory")
    except torch.OutOfMemoryError:
        assert not is_initialized()
    close_group()
    assert not is_initialized()
    Path(folder, str(rank)).touch()


class _Nccl(dist.ProcessGroupGloo):
    """Refuses to be split off a group of gloo, as NCCL's does."""

    class Options:
        split_from: Any = None

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        assert options.split_from is None
        super().__init__(store, rank, size, timedelta(seconds=30))


def _meet_in_a_bound_group(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=3)
    own = dist.group.WORLD
    assert own is not None
    own.bound_device_id = device = torch.device("cuda", 0)  # as init_process_group("nccl", device_id=…) does
    with mock.patch.multiple(dist.distributed_c10d, _NCCL_AVAILABLE=True, ProcessGroupNCCL=_Nccl, create=True):
        for _ in range(2):
            open_group(rank, 3, timedelta(seconds=30))
            with peers():
                two = group.group_among((0, 1), "nccl")
            if two is not None:
                two._get_backend(device).allreduce([found := torch.ones(1)]).wait()
                assert float(found) == 2
            close_group()
            assert dist.group.WORLD is own
            assert own.bound_device_id == device
    dist.all_reduce(found := torch.ones(1))
    assert float(found) == 3
    Path(folder, str(rank)).touch()


def test_a_group_that_is_bound_to_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch split NCCL's groups off fxpipe's group over gloo, which had inherited the device."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    start_processes(_meet_in_a_bound_group, (str(tmp_path),), 3, start_method="fork")
    assert {"0", "1", "2"} <= {path.name for path in tmp_path.iterdir()}


def test_it_is_there_only_while_fxpipe_talks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    (tmp_path / "port").write_text(str(store.port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    start_processes(_meet, (str(tmp_path),), 2, start_method="fork")
    assert {path.name for path in tmp_path.iterdir()} == {"port", "0", "1"}


def test_a_group_of_some_processes_has_the_timeout_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's own, 10 minutes, ends the process when an evaluation takes longer."""
    given: dict[str, Any] = {}

    def new_group(processes: list[int], **options: Any) -> object:
        given.update(options, processes=processes)
        return object()

    monkeypatch.setattr(group, "_timeout", timedelta(hours=3))
    monkeypatch.setattr(group, "_parts", [])
    monkeypatch.setattr(dist, "new_group", new_group)
    made = group.group_among((0, 2), "nccl")
    assert given == {"processes": [0, 2], "backend": "nccl", "timeout": timedelta(hours=3)}
    assert group._parts == [made]

"""The user's code finds no process group, so that it does in a distributed run what it does in a local one."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

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
    with peers(rank):
        assert is_initialized()
        found = [None, None]
        dist.all_gather_object(found, rank)
        assert found == [0, 1]
    assert not is_initialized()
    try:
        with peers(rank):
            raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer")
    except PeerLost:
        assert not is_initialized()
    try:
        with peers(rank):
            raise torch.OutOfMemoryError("CUDA out of memory")
    except torch.OutOfMemoryError:
        assert not is_initialized()
    close_group()
    assert not is_initialized()
    Path(folder, str(rank)).touch()


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

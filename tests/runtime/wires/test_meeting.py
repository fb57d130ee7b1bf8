"""Who is let in while workers of one machine connect, and that nobody is afterwards."""

from __future__ import annotations

import socket
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes

from fxpipe.errors import RunError
from fxpipe.runtime.wires.board import FolderBoard
from fxpipe.runtime.wires.group import close_group, group_among, open_group, peers
from fxpipe.runtime.wires.meeting import MEETING, close_doors, greet, listening, prepare_meeting, read_meeting

pytestmark = pytest.mark.multiproc
MINUTE = timedelta(seconds=60)


def _closed(rank: int, folder: str) -> None:
    open_group(rank, 3, MINUTE, FolderBoard(folder))
    assert not listening()
    with peers():
        for _ in range(20):  # the connections that there are still carry
            total = torch.ones(1000)
            dist.all_reduce(total)
            assert total.eq(3).all()
        part = group_among((0, 2), "gloo")
        if part is not None:
            total = torch.ones(1000)
            dist.all_reduce(total, group=part)
            assert total.eq(2).all()
        assert (part is None) == (rank == 1)
    assert not listening()
    close_group()
    Path(folder, f"over{rank}").touch()


@pytest.mark.skipif(sys.platform != "linux", reason="doors close on Linux")
def test_connected_workers_listen_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    prepare_meeting(FolderBoard(tmp_path), [[0, 2]])
    start_processes(_closed, (str(tmp_path),), 3, start_method="fork")
    assert len(list(tmp_path.glob("over*"))) == 3


@pytest.mark.skipif(sys.platform != "linux", reason="doors close on Linux")
def test_a_closed_door_refuses() -> None:
    import select

    with socket.create_server(("127.0.0.1", 0)) as door, select.epoll() as epoll:
        before = listening() - {door.fileno()}
        epoll.register(door.fileno(), select.EPOLLIN)
        address = door.getsockname()
        socket.create_connection(address).close()
        assert epoll.poll(5)
        door.accept()[0].close()
        close_doors(listening() - before)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)
        assert epoll.poll(0.1) == []
        epoll.unregister(door.fileno())  # as gloo does at its end


def _strange(rank: int, folder: str) -> None:
    """Worker 1 does not know the secret."""
    store = dist.FileStore(str(Path(folder, "store")), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=MINUTE)
    secret = read_meeting(FolderBoard(folder))[0] if rank == 0 else bytes(32)
    with pytest.raises(RunError, match=f"process that is not worker {1 - rank} has connected to worker {rank}"):
        greet(rank, (0, 1), secret)
    Path(folder, f"over{rank}").touch()
    dist.barrier()


def test_who_does_not_know_the_secret_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    prepare_meeting(FolderBoard(tmp_path))
    assert (tmp_path / MEETING).stat().st_mode & 0o077 == 0
    start_processes(_strange, (str(tmp_path),), 2, start_method="fork")
    assert len(list(tmp_path.glob("over*"))) == 2

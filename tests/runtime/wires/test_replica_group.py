"""Sums over replicas in processes of their own: of every type, in one order, whatever is waited for first."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fxpipe.errors import PeerLost, RunError
from fxpipe.runtime.wires.collective import LocalCollective, ReplicaBoard, even_parts, summed
from fxpipe.runtime.wires.one_process import Turns
from fxpipe.runtime.wires.replica_group import ReplicaProcess

PROCESS = """
import sys, torch
import torch.distributed as dist
from fxpipe.runtime.wires.collective import summed
from fxpipe.runtime.wires.replica_group import ReplicaProcess
folder, rank, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
store = dist.FileStore(folder + "/store", size)
dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
group = dist.new_group(list(range(size)))
process = ReplicaProcess(group, rank, size, torch.device("cpu"), False, "worker 0")
first, second = process.of_worker(0), process.of_worker(2)
def given(replica, dtype, length):
    made = torch.randn(length, generator=torch.Generator().manual_seed(replica)) * 10
    return made.to(dtype)
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.complex64]
def sizes(length):
    return [length - length // 3] + [0] * (size - 2) + [length // 3]
cases = [(dtype, length) for dtype in DTYPES for length in (1, 5, 64, 1001, 300_007)]
for number, case in enumerate(cases):
    first.start_sum(("bucket", number), given(rank, *case))
    second.start_sum(("bucket", number), 2 * given(rank, *case))
    if case[0].is_floating_point:
        first.start_sum(("mean", number), given(rank, *case), 3)
    first.start_sum(("parts", number), given(rank, *case), 1, sizes(case[1]))
    first.start_gather(("all", number), given(rank, case[0], sizes(case[1])[rank]), sizes(case[1]))
    first.start_comparison(("read", number), number + (rank == 1))
for number, case in reversed(list(enumerate(cases))):
    for factor, end in ((2, second), (1, first)):
        expected = summed([factor * given(replica, *case) for replica in range(size)])
        assert torch.equal(end.take(("bucket", number)), expected), (case, factor)
    if case[0].is_floating_point:
        assert torch.equal(first.take(("mean", number)), expected / 3), case
    parts = sizes(case[1])
    begin = sum(parts[:rank])
    assert torch.equal(first.take(("parts", number)), expected[begin : begin + parts[rank]]), case
    assert first.unlike_first(("read", number)) == "replica 1"
    whole = torch.cat([given(replica, case[0], parts[replica]) for replica in range(size)])
    assert torch.equal(first.take(("all", number)), whole), case
process.end()
print("equal")
"""


@pytest.mark.parametrize("replicas", [2, 3])
def test_processes_have_the_sum_of_one(tmp_path: Path, replicas: int) -> None:
    script = tmp_path / "replica.py"
    script.write_text(PROCESS)
    command = [sys.executable, str(script), str(tmp_path)]
    started = [
        subprocess.Popen(
            [*command, str(rank), str(replicas)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(replicas)
    ]
    for process in started:
        out, err = process.communicate(timeout=120)
        assert out == "equal\n", err


class Broken:
    """A process group whose other end is gone, or what it has begun."""

    error = RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1\nmore")

    def recv(self, *given: object) -> None:
        raise self.error

    def allreduce(self, *given: object) -> Broken:
        return self

    def wait(self) -> None:
        self.recv()


@pytest.mark.parametrize("replicas", [2, 3])
def test_a_lost_replica_is_told_where_its_sum_is_taken(replicas: int) -> None:
    process = ReplicaProcess(Broken(), 1, replicas, torch.device("cpu"), False, "worker 3, replica 1")
    end = process.of_worker(3)
    end.start_sum(("bucket", 0), torch.ones(4))
    with pytest.raises(
        PeerLost, match=r"worker 3, replica 1 lost a connection to another replica: .*Connection closed"
    ):
        end.take(("bucket", 0))
    process.end()


@pytest.mark.parametrize("replicas", [2, 3])
def test_out_of_memory_is_no_lost_replica(replicas: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Broken, "error", torch.OutOfMemoryError("CUDA out of memory"))
    process = ReplicaProcess(Broken(), 1, replicas, torch.device("cpu"), False, "worker 3, replica 1")
    end = process.of_worker(3)
    end.start_sum(("bucket", 0), torch.ones(4))
    with pytest.raises(torch.OutOfMemoryError):
        end.take(("bucket", 0))
    process.end()


def test_numbers_that_are_compared_wait_for_no_device() -> None:
    """They go over gloo, whatever the vectors of the replicas go over."""
    notes = Broken()
    notes.wait = lambda: None  # type: ignore[method-assign]
    notes.allgather = lambda taken, given: taken[0][1].copy_(given[0]) and notes
    process = ReplicaProcess(None, 1, 3, torch.device("meta"), False, "worker 0, replica 1", notes=notes)
    end = process.of_worker(0)
    end.start_comparison(("batch", 0), 7)
    assert end.take(("batch", 0)).device.type == "cpu"
    process.end()


class Faulty:
    """A process group with a fault of ours in it."""

    calls = 0

    def recv(self, *given: object) -> None:
        self.calls += 1
        raise AttributeError("no such call")


@pytest.mark.parametrize("taken", ["first", "second"])
def test_any_error_of_an_exchange_ends_the_wait_for_it_and_for_later_ones(taken: str) -> None:
    group = Faulty()
    process = ReplicaProcess(group, 1, 3, torch.device("cpu"), False, "worker 3, replica 1")
    end = process.of_worker(3)
    for name in ("first", "second"):
        end.start_sum((name, 0), torch.ones(4))
    with pytest.raises(AttributeError, match="no such call"):
        end.take((taken, 0))
    process.end()
    assert group.calls == 1


def test_in_one_process_a_sum_arrives_with_the_last_replica() -> None:
    board = ReplicaBoard(3, Turns())
    ends = [LocalCollective(board, replica) for replica in range(3)]
    for end in ends[::-1]:
        with pytest.raises(RunError, match="the pipeline is stuck"):
            end.take(("bucket", 0))
        end.start_sum(("bucket", 0), torch.full((2,), 10.0**end.replica))
    taken = [end.take(("bucket", 0)) for end in ends]
    assert [value.tolist() for value in taken] == [[111.0, 111.0]] * 3
    assert len({value.data_ptr() for value in taken}) == 3
    assert not board.results


def test_in_one_process_each_replica_gets_its_own_part() -> None:
    board = ReplicaBoard(2, Turns())
    ends = [LocalCollective(board, replica) for replica in range(2)]
    for end in ends:
        end.start_sum(("parts", 0), torch.tensor([1.0, 2.0, 3.0]) * 10**end.replica, sizes=[1, 2])
    assert [end.take(("parts", 0)).tolist() for end in ends] == [[11.0], [22.0, 33.0]]
    for end in ends:
        with pytest.raises(RunError, match="the pipeline is stuck"):
            end.take(("all", 0))
        end.start_gather(("all", 0), torch.full((end.replica + 1,), float(end.replica)), [1, 2])
    assert [end.take(("all", 0)).tolist() for end in ends] == [[0.0, 1.0, 1.0]] * 2
    assert not board.results


def test_sums_have_the_order_of_replicas() -> None:
    parts = [torch.tensor([value]) for value in (1e8, 1.0, -1e8)]
    assert summed(parts).item() == ((parts[0] + parts[1]) + parts[2]).item() == 0.0
    assert parts[0].item() == 1e8
    for out in parts:  # a part's own memory
        values = [part.clone() for part in parts]
        place = next(i for i, part in enumerate(parts) if part is out)
        assert summed(values, out=values[place]) is values[place]
        assert values[place].item() == 0.0
    assert summed(parts[:1]).item() == 1e8


def test_parts_are_even_and_all_there() -> None:
    assert even_parts(4, 2) == [2, 2]
    assert even_parts(5, 3) == [1, 2, 2]
    assert even_parts(1, 3) == [0, 0, 1]

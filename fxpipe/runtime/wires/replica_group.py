"""The replicas of one worker in separate processes: a process group, over gloo or NCCL.

A sum is an exchange of parts. Each replica receives its part of all vectors, adds them in the order of replicas, and
sends the result to all: each sends 2(R − 1)/R of the vector, as in a ring, and fxpipe decides the order of sums. If
replicas share a worker's update, the two halves are separate exchanges. A sum of two vectors has only one order, so
over gloo it is gloo's own sum.

Over gloo a thread of the process does this while the worker computes, except for exchanges that are one call of the
group: gloo has its own threads for these. Over NCCL the thread puts the calls on a stream, when all replicas are ready
(`nccl_lines`).
"""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fxpipe.device_copies import mark
from fxpipe.errors import PeerLost
from fxpipe.observe.watch import Cause
from fxpipe.plan.plan import Plan
from fxpipe.runtime.wires.collective import Collective, Key, even_parts, summed
from fxpipe.runtime.wires.group import group_among, means_lost, peers
from fxpipe.runtime.wires.nccl_lines import JointLaunch, own_stream

_SUMMED_BY_GLOO = {torch.float32, torch.float64, torch.int64}
"""Dtypes for which gloo's sum of two has the same bits as torch's."""

Job = Callable[[], Callable[[], Tensor]]
"""Does or launches an exchange; what it returns waits for the result on the device."""


def replica_group(plan: Plan, backend: str) -> Any:
    """The process group of the replicas of this process's rank; None if there is one replica. All processes call it."""
    with peers():
        groups = [group_among(members, backend) for members in plan.mesh.groups]
    return next((group for group in groups if group is not None), None)


class ReplicaProcess:
    """The exchanges of one process, for all its workers, in one order.

    If the group is `staged`, it cannot carry the device's tensors: they go through the CPU's memory. Over NCCL the
    replicas have an agreement, and another group for notes, over gloo. `sent` counts the bytes sent to other processes,
    by worker and what was exchanged.
    """

    def __init__(
        self,
        group: Any,
        replica: int,
        replicas: int,
        device: torch.device,
        staged: bool,
        name: str,
        agreement: JointLaunch | None = None,
        notes: Any = None,
    ) -> None:
        self.replica, self.replicas = replica, replicas
        self.sent: Counter[tuple[int, str]] = Counter()
        self._now = (0, "")
        self._others = [j for j in range(replicas) if j != replica]
        self._group, self._device, self._staged, self._name = group, device, staged, name
        self._agreement, self._notes = agreement, group if notes is None else notes
        self._begun: dict[tuple[int, Key], Callable[[], Tensor]] = {}  # functions that wait for a result
        self._jobs: queue.SimpleQueue[tuple[Job, Future[Callable[[], Tensor]]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def of_worker(self, worker: int) -> WorkerCollective:
        """The exchanges of a worker of this process."""
        return WorkerCollective(self, worker)

    def start_sum(self, worker: int, key: Key, flat: Tensor, divisor: int, sizes: Sequence[int] | None) -> None:
        """Begin to add up a worker's vector, or this replica's part of it, over the replicas, and divide the sum."""
        if sizes is not None:
            self.begin(worker, key, partial(self.scatter, sizes=sizes, divisor=divisor), flat)
            return
        if self._agreement is not None or self.replicas != 2 or flat.dtype not in _SUMMED_BY_GLOO:
            self.begin(worker, key, partial(self.sum, divisor=divisor), flat)
            return
        flat = flat.cpu() if self._staged else flat
        with self._talk():
            work = self._group.allreduce([flat])
        self._begun[worker, key] = partial(self._called, work, flat, divisor)
        self.sent[worker, key[0]] += flat.nbytes  # half of it, and the sum of the other half

    def start_numbers(self, worker: int, key: Key, number: Tensor) -> None:
        """Begin to gather a whole number of each replica, over gloo: no device is waited for."""
        numbers = number.new_empty(self.replicas)
        with self._talk():
            work = self._notes.allgather([list(numbers.split(1))], [number])
        self._begun[worker, key] = partial(self._called, work, numbers, device=numbers.device)
        self.sent[worker, key[0]] += number.nbytes * len(self._others)

    def begin(self, worker: int, key: Key, run: Callable[[Tensor], Tensor], flat: Tensor) -> None:
        """Begin an exchange of a worker."""
        run = partial(self._counted, (worker, key[0]), run)
        result: Future[Callable[[], Tensor]] = Future()
        self._begun[worker, key] = lambda: result.result()()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="fxpipe-replicas", daemon=True)
            self._thread.start()
        if self._agreement is not None:
            job = partial(self._agreement.launch, mark(self._device), partial(self._launch, run, flat))
        else:
            job = partial(self._exchanged, run, flat.cpu() if self._staged else flat)
        self._jobs.put((job, result))

    def result(self, worker: int, key: Key) -> Tensor:
        """Wait for the result. PeerLost if another replica is gone; or any other error of this exchange or an earlier
        one."""
        return self._begun.pop((worker, key))()

    def end(self) -> None:
        """No more exchanges."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def sum(self, flat: Tensor, divisor: int = 1) -> Tensor:
        """Add up over the replicas, in the vector's memory; returns when that is done, or launched on the stream."""
        sizes = even_parts(len(flat), self.replicas)
        parts = flat.split(sizes)
        part = summed(self._parts(flat, sizes), divisor, parts[self.replica])
        self._exchange([part] * self.replicas, parts)
        return flat

    def scatter(self, flat: Tensor, sizes: Sequence[int], divisor: int) -> Tensor:
        """The sum of this replica's part over all replicas; `sizes` are those of each replica's part of the vector."""
        return summed(self._parts(flat, sizes), divisor)

    def gather(self, own: Tensor, sizes: Sequence[int]) -> Tensor:
        """The vectors of all replicas, one after the other."""
        vectors = own.new_empty(sum(sizes))
        parts = vectors.split(list(sizes))
        parts[self.replica].copy_(own)
        self._exchange([own] * self.replicas, parts)
        return vectors

    def _parts(self, flat: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """This replica's part of the vector, from each replica."""
        vectors = flat.split(list(sizes))
        part = vectors[self.replica]
        taken = [part if j == self.replica else torch.empty_like(part) for j in range(self.replicas)]
        self._exchange(vectors, taken)
        return taken

    def _exchange(self, given: Sequence[Tensor], taken: Sequence[Tensor]) -> None:
        """Send each replica its tensor of `given`, and receive one from each into `taken`.

        gloo's own exchanges of several parts take twice as long as sends and receives (benchmarks/replicas).
        """
        give, take = [_bytes(part) for part in given], [_bytes(part) for part in taken]
        self.sent[self._now] += sum(give[j].numel() for j in self._others)
        with self._talk():
            if self._agreement is not None:
                give[self.replica] = take[self.replica] = give[self.replica][:0]
                self._group.alltoall(take, give).wait()
                return
            under_way = [self._group.recv([take[j]], j, 0) for j in self._others if take[j].numel()]
            under_way += [self._group.send([give[j]], j, 0) for j in self._others if give[j].numel()]
            for one in under_way:
                one.wait()

    def _called(self, work: Any, result: Tensor, divisor: int = 1, device: torch.device | None = None) -> Tensor:
        with self._talk():
            work.wait()
        return (result.div_(divisor) if divisor > 1 else result).to(device or self._device)

    def _exchanged(self, run: Callable[[Tensor], Tensor], flat: Tensor) -> Callable[[], Tensor]:
        result = run(flat)
        return lambda: result.to(self._device)

    def _launch(self, run: Callable[[Tensor], Tensor], flat: Tensor) -> Callable[[], Tensor]:
        """Put an exchange on the current stream. Returns a function whose caller's stream waits for the result."""
        stream = torch.cuda.current_stream(self._device)
        flat.record_stream(stream)
        result = run(flat)
        event = torch.cuda.Event()
        event.record(stream)
        return partial(self._on_device, result, event)

    def _on_device(self, found: Tensor, event: Any) -> Tensor:
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(event)
        found.record_stream(stream)
        return found

    @contextmanager
    def _talk(self) -> Iterator[None]:
        """An error of the group means that another replica is gone."""
        try:
            yield
        except RuntimeError as error:
            if not means_lost(error):
                raise
            raise PeerLost(
                f"{self._name} lost a connection to another replica: {str(error).splitlines()[0]}",
                hint="another worker stopped first: its own error says why",
            ) from error

    def _counted(self, what: tuple[int, str], run: Callable[[Tensor], Tensor], flat: Tensor) -> Tensor:
        self._now = what
        return run(flat)

    def _work(self) -> None:
        """Run begun exchanges in order. After an error run no more: the replicas may have begun different ones."""
        failed: Exception | None = None
        with torch.no_grad(), own_stream(self._device):
            while (job := self._jobs.get()) is not None:
                run, result = job
                try:
                    if failed is not None:
                        raise failed
                    with self._talk():
                        result.set_result(run())
                except Exception as error:
                    failed = error
                    result.set_exception(error)
                del job, run, result  # their memory is the worker's


class WorkerCollective(Collective):
    """The exchanges of one worker."""

    def __init__(self, process: ReplicaProcess, worker: int) -> None:
        self.replica, self.replicas = process.replica, process.replicas
        self._process, self._worker = process, worker

    @property
    def sent(self) -> Mapping[str, int]:
        return {what: size for (worker, what), size in sorted(self._process.sent.items()) if worker == self._worker}

    def start_sum(self, key: Key, flat: Tensor, divisor: int = 1, sizes: Sequence[int] | None = None) -> None:
        self._process.start_sum(self._worker, key, flat, divisor, sizes)

    def start_numbers(self, key: Key, number: Tensor) -> None:
        self._process.start_numbers(self._worker, key, number)

    def start_gather(self, key: Key, own: Tensor, sizes: Sequence[int]) -> None:
        self._process.begin(self._worker, key, partial(self._process.gather, sizes=sizes), own)

    def take(self, key: Key) -> Tensor:
        if self.watch is None:
            return self._process.result(self._worker, key)
        self.watch.open("wait", Cause("sum", key[0], self._worker))
        result = self._process.result(self._worker, key)
        self.watch.close()
        return result


def _bytes(flat: Tensor) -> Tensor:
    """A vector as bytes, which the group can carry for any dtype."""
    return flat.view(torch.uint8)

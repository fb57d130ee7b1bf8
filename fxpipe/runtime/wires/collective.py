"""Sums and gathers among the replicas of one worker: sums in the order of replicas, with the same bits everywhere."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from fxpipe.errors import RunError, listed
from fxpipe.observe.watch import Watch
from fxpipe.runtime.wires.one_process import Turns

Key = tuple[str, int]
"""What is exchanged, and the minibatch it belongs to."""


class Collective(ABC):
    """One replica's part in the exchanges. All replicas of a worker begin the same exchanges in the same order. The
    worker's own `watch` records a 'wait' whenever the worker waits for other replicas."""

    replica: int
    replicas: int
    watch: Watch | None = None

    @property
    def sent(self) -> Mapping[str, int]:
        """The bytes sent to other replicas' processes, by what was exchanged."""
        return {}

    @abstractmethod
    def start_sum(self, key: Key, flat: Tensor, divisor: int = 1, sizes: Sequence[int] | None = None) -> None:
        """Begin to add up a vector over the replicas; the sum may be written into it.

        The sum is divided by the divisor. `sizes` are those of the vector's parts, one for each replica, which receives
        only the sum of its own part; without them each receives the whole sum.
        """

    @abstractmethod
    def start_gather(self, key: Key, own: Tensor, sizes: Sequence[int]) -> None:
        """Begin to send each replica's vector to all; the result is all of them, one after the other. `sizes` says how
        many elements each vector has."""

    def start_comparison(self, key: Key, value: object) -> None:
        """Begin to compare a plain value of each replica; `unlike_first` takes the result."""
        self.start_numbers(key, torch.tensor([zlib.crc32(repr(value).encode())]))

    def start_numbers(self, key: Key, number: Tensor) -> None:
        """Begin to gather a whole number of each replica, in the CPU's memory, as the result is."""
        self.start_gather(key, number, [1] * self.replicas)

    def unlike_first(self, key: Key) -> str:
        """Wait for a comparison; the replicas whose value differs from replica 0's, for a message; empty if none."""
        first, *others = self.take(key).tolist()
        unlike = [f"replica {j}" for j, number in enumerate(others, 1) if number != first]
        return listed(unlike) if unlike else ""

    @abstractmethod
    def take(self, key: Key) -> Tensor:
        """Wait for the result of an exchange; the caller owns the vector.

        Raises:
            PeerLost: another replica is gone.
        """


def check_read_alike(collective: Collective, key: Key, what: str, hook: str) -> None:
    """Compare what the replicas of worker 0 have read; waits for them.

    Args:
        key: of the comparison, which has begun.
        what: names the data, such as `step 3`.
        hook: gives the data.

    Raises:
        RunError: replicas read different data from replica 0; names them all.
    """
    if others := collective.unlike_first(key):
        raise RunError(
            f"the replicas of worker 0 read different batches in {what}: {others} unlike replica 0",
            where=hook,
            hint="every replica reads all data and takes its share, so every process must read the same batches in the "
            "same order; fxpipe seeds the default generators of Python, numpy and torch alike in all processes",
        )


def summed(parts: Sequence[Tensor], divisor: int = 1, out: Tensor | None = None) -> Tensor:
    """(((p0 + p1) + p2) + …) / divisor, in new memory or in `out`, which may be one of the parts."""
    if len(parts) == 1:
        result = parts[0].clone()
    else:
        total = parts[0]
        for part in parts[1:-1]:
            total = total + part
        result = torch.add(total, parts[-1], out=out)
    return result.div_(divisor) if divisor > 1 else result


def even_parts(length: int, replicas: int) -> list[int]:
    """How many elements of a vector each replica adds up: equally many, or one more for some."""
    ends = [length * (replica + 1) // replicas for replica in range(replicas)]
    return [end - begin for begin, end in pairwise([0, *ends])]


class ReplicaBoard:
    """What the replicas of one worker exchange in one process."""

    def __init__(self, replicas: int, turns: Turns) -> None:
        self.replicas, self.turns = replicas, turns
        self.given: dict[Key, dict[int, Tensor]] = {}
        self.results: dict[Key, tuple[Tensor, int]] = {}

    def clear(self) -> None:
        """Forget all exchanges in flight."""
        self.given.clear()
        self.results.clear()

    def give(self, key: Key, replica: int, flat: Tensor, made: Callable[[list[Tensor]], Tensor]) -> None:
        """A replica gives its vector; the last one makes the result of all of them."""
        parts = self.given.setdefault(key, {})
        parts[replica] = flat
        if len(parts) == self.replicas:
            del self.given[key]
            self.results[key] = made([parts[j] for j in range(self.replicas)]), self.replicas

    def take(self, key: Key) -> Tensor:
        """The result, for one of the replicas."""
        result, left = self.results.pop(key)
        if left == 1:
            return result
        self.results[key] = result, left - 1
        return result.clone()


class LocalCollective(Collective):
    """Exchanges of a replica when all replicas are in one process."""

    def __init__(self, board: ReplicaBoard, replica: int) -> None:
        self.replica, self.replicas = replica, board.replicas
        self._board = board
        self._own: dict[Key, slice] = {}  # where this replica's part of a scattered vector is

    def start_sum(self, key: Key, flat: Tensor, divisor: int = 1, sizes: Sequence[int] | None = None) -> None:
        if sizes is not None:
            begin = sum(sizes[: self.replica])
            self._own[key] = slice(begin, begin + sizes[self.replica])
        self._board.give(key, self.replica, flat, partial(summed, divisor=divisor))

    def start_gather(self, key: Key, own: Tensor, sizes: Sequence[int]) -> None:
        self._board.give(key, self.replica, own, torch.cat)

    def take(self, key: Key) -> Tensor:
        if key not in self._board.results:
            self._board.turns.wait(
                lambda: key in self._board.results,
                lambda: f"replica {self.replica} waits for the {key[0]} of minibatch {key[1]}",
            )
        result = self._board.take(key)
        return result[self._own.pop(key)].clone() if key in self._own else result


class LoneCollective(Collective):
    """Exchanges of replica 0 with others that take no time and give zeros, to time its own work."""

    def __init__(self, replicas: int) -> None:
        self.replica, self.replicas = 0, replicas
        self._results: dict[Key, Tensor] = {}

    def start_sum(self, key: Key, flat: Tensor, divisor: int = 1, sizes: Sequence[int] | None = None) -> None:
        total = flat if sizes is None else flat[: sizes[0]].clone()
        self._results[key] = total.div_(divisor) if divisor > 1 else total

    def start_gather(self, key: Key, own: Tensor, sizes: Sequence[int]) -> None:
        self._results[key] = torch.cat([own, own.new_zeros(sum(sizes[1:]))])

    def take(self, key: Key) -> Tensor:
        return self._results.pop(key)

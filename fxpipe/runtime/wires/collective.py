"""What the replicas of one worker add up and hand out: sums in the order of replicas, the same bits everywhere."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from fxpipe.observe.watch import Watch
from fxpipe.runtime.wires.one_process import Turns

Key = tuple[str, int]
"""What is exchanged, and the minibatch that it is of."""


class Collective(ABC):
    """One replica's end. All replicas of a worker begin the same exchanges in the same order.

    Attributes:
        replica: which one this is.
        replicas: how many there are.
        watch: the worker's own; a 'wait' is opened in it wherever the worker waits for other replicas.
    """

    replica: int
    replicas: int
    watch: Watch | None = None

    @property
    def sent(self) -> Mapping[str, int]:
        """The bytes that have left for other replicas' processes, by what was exchanged."""
        return {}

    @abstractmethod
    def start_sum(self, key: Key, flat: Tensor, divisor: int = 1) -> None:
        """Begin to add up a vector over the replicas, which takes it over: the sum may be written into it.

        Args:
            divisor: of the sum.
        """

    @abstractmethod
    def start_scatter(self, key: Key, flat: Tensor, sizes: Sequence[int], divisor: int = 1) -> None:
        """Begin to add up a vector of parts, one for each replica, which gets the sum of its own part alone.

        Args:
            sizes: how many elements each part has, the same on all replicas.
            divisor: of the sum.
        """

    @abstractmethod
    def start_gather(self, key: Key, own: Tensor, sizes: Sequence[int]) -> None:
        """Begin to hand out each replica's vector; all get all of them, one after the other.

        Args:
            sizes: how many elements each has.
        """

    @abstractmethod
    def start_copy(self, key: Key, flat: Tensor) -> None:
        """Begin to hand out replica 0's vector, which the others take; they give one of the same size and type."""

    @abstractmethod
    def take(self, key: Key) -> Tensor:
        """Wait for the result of an exchange; a vector of the caller's own.

        Raises:
            PeerLost: another replica is gone.
        """


def summed(parts: Sequence[Tensor], divisor: int = 1, out: Tensor | None = None) -> Tensor:
    """(((p0 + p1) + p2) + …) / divisor, in memory of its own or in `out`, which may be that of a part."""
    if len(parts) == 1:
        found = parts[0].clone()
    else:
        total = parts[0]
        for part in parts[1:-1]:
            total = total + part
        found = torch.add(total, parts[-1], out=out)
    return found.div_(divisor) if divisor > 1 else found


def even_parts(length: int, replicas: int) -> list[int]:
    """How many elements of a vector each replica adds up: the same for all, or one more for some."""
    ends = [length * (replica + 1) // replicas for replica in range(replicas)]
    return [end - begin for begin, end in pairwise([0, *ends])]


class ReplicaBoard:
    """What the replicas of one worker exchange in one process."""

    def __init__(self, replicas: int, turns: Turns) -> None:
        self.replicas, self.turns = replicas, turns
        self.given: dict[Key, dict[int, Tensor]] = {}
        self.results: dict[Key, tuple[Tensor, int]] = {}

    def clear(self) -> None:
        """Forget all that is under way."""
        self.given.clear()
        self.results.clear()

    def give(self, key: Key, replica: int, flat: Tensor, made: Callable[[list[Tensor]], Tensor]) -> None:
        """A replica gives its vector; the last one makes the result of all of them."""
        parts = self.given.setdefault(key, {})
        parts[replica] = flat
        if len(parts) == self.replicas:
            del self.given[key]
            self.results[key] = made([parts[j] for j in range(self.replicas)]), self.replicas

    def hand_out(self, key: Key, flat: Tensor) -> None:
        """Replica 0 gives its vector, which the others take."""
        self.results[key] = flat.clone(), self.replicas - 1

    def take(self, key: Key) -> Tensor:
        """The result, for one of the replicas."""
        found, left = self.results.pop(key)
        if left == 1:
            return found
        self.results[key] = found, left - 1
        return found.clone()


class LocalCollective(Collective):
    """The end of a replica in one process with all others."""

    def __init__(self, board: ReplicaBoard, replica: int) -> None:
        self.replica, self.replicas = replica, board.replicas
        self._board = board
        self._own: dict[Key, slice] = {}  # where its part is of what is scattered

    def start_sum(self, key: Key, flat: Tensor, divisor: int = 1) -> None:
        self._board.give(key, self.replica, flat, partial(summed, divisor=divisor))

    def start_scatter(self, key: Key, flat: Tensor, sizes: Sequence[int], divisor: int = 1) -> None:
        begin = sum(sizes[: self.replica])
        self._own[key] = slice(begin, begin + sizes[self.replica])
        self._board.give(key, self.replica, flat, partial(summed, divisor=divisor))

    def start_gather(self, key: Key, own: Tensor, sizes: Sequence[int]) -> None:
        self._board.give(key, self.replica, own, torch.cat)

    def start_copy(self, key: Key, flat: Tensor) -> None:
        if self.replica == 0:
            self._board.hand_out(key, flat)

    def take(self, key: Key) -> Tensor:
        if key not in self._board.results:
            self._board.turns.wait(
                lambda: key in self._board.results,
                lambda: f"replica {self.replica} waits for the {key[0]} of minibatch {key[1]}",
            )
        found = self._board.take(key)
        return found[self._own.pop(key)].clone() if key in self._own else found


class LoneCollective(Collective):
    """The end of replica 0 where the others take no time and give zeros: what it does by itself can be timed."""

    def __init__(self, replicas: int) -> None:
        self.replica, self.replicas = 0, replicas
        self._results: dict[Key, Tensor] = {}

    def start_sum(self, key: Key, flat: Tensor, divisor: int = 1) -> None:
        self._results[key] = flat.div_(divisor) if divisor > 1 else flat

    def start_scatter(self, key: Key, flat: Tensor, sizes: Sequence[int], divisor: int = 1) -> None:
        self.start_sum(key, flat[: sizes[0]].clone(), divisor)

    def start_gather(self, key: Key, own: Tensor, sizes: Sequence[int]) -> None:
        self._results[key] = torch.cat([own, own.new_zeros(sum(sizes[1:]))])

    def start_copy(self, key: Key, flat: Tensor) -> None:
        pass

    def take(self, key: Key) -> Tensor:
        return self._results.pop(key)

"""Sums a minibatch's gradients over the microbatches of all replicas of a worker.

A replica adds up its own microbatches' in their order. With its last one, each bucket's sum is sent off as soon as the
emitted code has made the last of its gradients (`comm.all_reduce`), and the rest of the backward hides that. What no
bucket of the code has taken is sent off at the backward's end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from fxpipe.runtime.wires.collective import Collective, Key
from fxpipe.runtime.worker.gradients import GradientSum
from fxpipe.runtime.worker.vector import VectorPart


class ReplicatedSum(GradientSum):
    """As `GradientSum`, over all replicas.

    Args:
        buckets: by name, the indices of their parameters.
        updaters: by index, the replica that updates a parameter and alone gets its sum; empty where all get all.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        order: Sequence[int],
        divisor: int,
        collective: Collective,
        buckets: Mapping[str, Sequence[int]],
        updaters: Sequence[int] = (),
    ) -> None:
        super().__init__(parameters, order, divisor)
        self._parts = [VectorPart(parameter) for parameter in parameters]
        self._updaters = updaters
        self._collective = collective
        self._buckets = buckets
        self._sent: dict[Key, list[int]] = {}  # the present minibatch's vectors under way, the parameters of each
        self._under_way: deque[dict[Key, list[int]]] = deque()  # those of the minibatches before
        self._taken: set[int] = set()  # those that a bucket of the present microbatch has

    def start(self, bucket: str, minibatch: int, gradients: Sequence[Tensor | None]) -> None:
        """The last microbatch's gradients of a bucket are there: send off the sums."""
        indices = self._buckets[bucket]
        self._start((bucket, minibatch), indices, gradients)
        self._taken |= set(indices)

    def add(self, gradients: Sequence[Tensor | None], taken: set[int]) -> None:
        if self._taken:
            gradients = [
                None if index in self._taken else gradient
                for index, gradient in zip(self._order, gradients, strict=True)
            ]
        super().add(gradients, taken)

    def close(self, minibatch: int) -> None:
        """All gradients of the minibatch are there: send off what is not under way."""
        rest: dict[torch.dtype, list[int]] = {}
        for index, value in enumerate(self._sums):
            if value is not None and index not in self._taken:
                rest.setdefault(value.dtype, []).append(index)
        for dtype, indices in rest.items():
            self._start((f"rest {dtype}", minibatch), indices, [None] * len(indices))
        self._taken = set()
        self._sums = [None] * len(self._parameters)
        self._under_way.append(self._sent)
        self._sent = {}

    def arrived(self) -> bool:
        """Whether `take` would find all sums."""
        return all(map(self._collective.arrived, self._under_way[0]))

    def take(self) -> list[Tensor | None]:
        """The oldest minibatch's sum over the replicas, divided, by parameter; waits for it."""
        sums: list[Tensor | None] = [None] * len(self._parameters)
        for key, indices in self._under_way.popleft().items():
            flat, place = self._collective.take(key), 0
            for index in indices:
                sums[index] = self._parts[index].laid_out(flat, place)
                place += self._parts[index].size
        return sums

    def _start(self, key: Key, indices: Sequence[int], last: Sequence[Tensor | None]) -> None:
        """Send off the sums so far, with the last microbatch's gradients added: straight into one vector."""
        addends = [
            (index, [value for value in (self._sums[index], gradient) if value is not None])
            for index, gradient in zip(indices, last, strict=True)
        ]
        addends = [(index, values) for index, values in addends if values]
        if not addends:
            return
        if self._updaters:
            addends.sort(key=lambda row: self._updaters[row[0]])
        elements, place = sum(self._parts[index].size for index, _ in addends), 0
        flat = addends[0][1][0].new_empty(elements)
        for index, values in addends:
            part = self._parts[index].of(flat, place)
            if len(values) == 2:
                torch.add(*values, out=part)
            else:
                part.copy_(values[0])
            place += self._parts[index].size
        if not self._updaters:
            self._sent[key] = [index for index, _ in addends]
            self._collective.start_sum(key, flat, self._divisor)
            return
        sizes = [0] * self._collective.replicas
        for index, _ in addends:
            sizes[self._updaters[index]] += self._parts[index].size
        self._sent[key] = [index for index, _ in addends if self._updaters[index] == self._collective.replica]
        self._collective.start_scatter(key, flat, sizes, self._divisor)

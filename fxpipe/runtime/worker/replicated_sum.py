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
from torch._prims_common import is_non_overlapping_and_dense_or_false

from fxpipe.runtime.wires.collective import Collective, Key
from fxpipe.runtime.worker.gradients import GradientSum


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
        collective: Collective,
        buckets: Mapping[str, Sequence[int]],
        updaters: Sequence[int] = (),
    ) -> None:
        super().__init__(parameters, order)
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

    def take(self, divisor: int) -> list[Tensor | None]:
        """The oldest minibatch's sum over the replicas, divided, by parameter; waits for it."""
        sums: list[Tensor | None] = [None] * len(self._parameters)
        for key, indices in self._under_way.popleft().items():
            flat, place = self._collective.take(key), 0
            if divisor > 1:
                flat /= divisor
            for index in indices:
                parameter = self._parameters[index]
                part = flat[place : place + parameter.numel()]
                sums[index] = like(part, parameter)
                place += parameter.numel()
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
        flat, place = addends[0][1][0].new_empty(sum(values[0].numel() for _, values in addends)), 0
        for index, values in addends:
            part = like(flat[place : place + values[0].numel()], self._parameters[index], of_memory=True)
            if len(values) == 1:
                part.copy_(values[0])
            else:
                torch.add(*values, out=part)
            place += part.numel()
        if not self._updaters:
            self._sent[key] = [index for index, _ in addends]
            self._collective.start_sum(key, flat)
            return
        sizes = [0] * self._collective.replicas
        for index, values in addends:
            sizes[self._updaters[index]] += values[0].numel()
        self._sent[key] = [index for index, _ in addends if self._updaters[index] == self._collective.replica]
        self._collective.start_scatter(key, flat, sizes)


def flattened(values: Sequence[Tensor], parameters: Sequence[nn.Parameter], kind: Tensor) -> Tensor:
    """Values of parameters in one vector, as `like` takes them out of it; of the type and device of another tensor."""
    flat, place = kind.new_empty(sum(value.numel() for value in values)), 0
    for value, parameter in zip(values, parameters, strict=True):
        like(flat[place : place + value.numel()], parameter, of_memory=True).copy_(value)
        place += value.numel()
    return flat


def like(part: Tensor, parameter: Tensor, of_memory: bool = False) -> Tensor:
    """A vector as a parameter's gradient, laid out as the parameter is.

    Args:
        of_memory: the very memory of the vector, in whichever layout.
    """
    if is_non_overlapping_and_dense_or_false(parameter):
        return part.as_strided(parameter.shape, parameter.stride(), part.storage_offset())
    shaped = part.view(parameter.shape)
    return shaped if of_memory else torch.empty_like(parameter, requires_grad=False).copy_(shaped)

"""Sums the gradients of a minibatch's microbatches, of one worker or over all its replicas."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from fxpipe.runtime.wires.collective import Collective, Key
from fxpipe.runtime.worker.clip import norms_of
from fxpipe.torch_private import foreach_add_, foreach_div_, is_non_overlapping_and_dense_or_false


def summed_in(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which gradients are added up: float32 for 16-bit dtypes, which would round every sum."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


class GradientSum:
    """The gradients of one worker's trained parameters, added over microbatches in their order.

    Sums of bfloat16 and float16 gradients are float32, and are rounded once, by `take`.

    Args:
        parameters: those of the gradients.
        order: for each gradient that a backward returns, the index of its parameter.
        divisor: `take` divides the sums by it.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], order: Sequence[int], divisor: int) -> None:
        self._parameters = parameters
        self._order = order
        self._divisor = divisor
        self._sums: list[Tensor | None] = [None] * len(parameters)
        self._closed: deque[list[Tensor | None]] = deque()  # of earlier minibatches that are not updated yet

    def add(self, gradients: Sequence[Tensor | None], taken: set[int]) -> None:
        """Add one microbatch's gradients.

        Optimizers and later additions write into a gradient. So a gradient is copied, as autograd does, if it shares
        memory with another gradient, with a weight that the action read or with a value that it sent (`taken`: storage
        addresses), or if its layout is not that of its parameter.
        """
        old: list[Tensor] = []
        new: list[Tensor] = []
        taken = set(taken)
        for index, gradient in zip(self._order, gradients, strict=True):
            if gradient is None:
                continue
            present = self._sums[index]
            if present is not None:
                self._sums[index] = present = present.to(summed_in(present.dtype))
                old.append(present)
                new.append(gradient)
                continue
            address = gradient.untyped_storage().data_ptr()
            parameter = self._parameters[index]
            if address in taken or gradient.stride() != parameter.stride():
                gradient = torch.empty_like(parameter, requires_grad=False).copy_(gradient)
            taken.add(address)
            self._sums[index] = gradient
        if old:
            foreach_add_(old, new)

    def close(self, minibatch: int) -> None:
        """The minibatch's sum is complete: the next sum starts empty."""
        self._closed.append(self._sums)
        self._sums = [None] * len(self._parameters)

    def take(self) -> list[Tensor | None]:
        """The oldest closed sum, divided, by parameter."""
        sums = self._closed.popleft()
        present = [gradient for gradient in sums if gradient is not None]
        if self._divisor > 1 and present:
            foreach_div_(present, self._divisor)
        rows = zip(sums, self._parameters, strict=True)
        return [None if gradient is None else gradient.to(parameter.dtype) for gradient, parameter in rows]


class VectorPart:
    """How a parameter or its gradient is stored in a vector of several, which replicas add up or send.

    Made once, since reading a layout takes microseconds.

    Attributes:
        size: number of elements.
    """

    def __init__(self, parameter: nn.Parameter) -> None:
        self.size = parameter.numel()
        self._parameter = parameter
        self._as_it_is = is_non_overlapping_and_dense_or_false(parameter)
        self._shape = parameter.shape
        self._stride = parameter.stride() if self._as_it_is else torch.empty(self._shape, device="meta").stride()

    def of(self, vector: Tensor, begin: int) -> Tensor:
        """A view that begins at an element of the vector, in the parameter's shape; for writing."""
        return vector.as_strided(self._shape, self._stride, vector.storage_offset() + begin)

    def laid_out(self, vector: Tensor, begin: int) -> Tensor:
        """The value that begins there, in the parameter's layout: a view if possible, else a copy."""
        found = self.of(vector, begin)
        return found if self._as_it_is else torch.empty_like(self._parameter, requires_grad=False).copy_(found)


def in_one(values: Sequence[Tensor], parts: Sequence[VectorPart], kind: Tensor) -> Tensor:
    """Values of these parts in one vector, with the dtype and device of `kind`."""
    vector, begin = kind.new_empty(sum(part.size for part in parts)), 0
    for value, part in zip(values, parts, strict=True):
        part.of(vector, begin).copy_(value)
        begin += part.size
    return vector


class ReplicatedSum(GradientSum):
    """As `GradientSum`, over all replicas.

    A replica adds up the gradients of its own microbatches in order. In its last microbatch it sends each bucket's sum
    once the emitted code has made the bucket's last gradient (`comm.all_reduce`), while the rest of the backward runs.
    It sends gradients that are in no bucket at the end of the backward.

    Args:
        buckets: by name, the indices of their parameters.
        updaters: by index, the replica that updates a parameter and alone receives its sum; empty if all receive all.
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
        self._sent: dict[Key, list[int]] = {}  # of this minibatch: the vectors in flight, with their parameters
        self._under_way: deque[dict[Key, list[int]]] = deque()  # the same, of earlier minibatches
        self._taken: set[int] = set()  # indices that are in a bucket of this microbatch

    def start(self, bucket: str, minibatch: int, gradients: Sequence[Tensor | None]) -> None:
        """The last microbatch's gradients of a bucket are made: send its sums."""
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
        """The minibatch's sums are complete: send those that are not in flight."""
        rest: dict[torch.dtype, list[int]] = {}
        for index, value in enumerate(self._sums):
            if value is not None and index not in self._taken:
                rest.setdefault(summed_in(value.dtype), []).append(index)
        for dtype, indices in rest.items():
            self._start((f"rest {dtype}", minibatch), indices, [None] * len(indices))
        self._taken = set()
        self._sums = [None] * len(self._parameters)
        self._under_way.append(self._sent)
        self._sent = {}

    def take(self) -> list[Tensor | None]:
        """Wait for the oldest minibatch's sum over the replicas; returns it divided, by parameter."""
        sums: list[Tensor | None] = [None] * len(self._parameters)
        for key, indices in self._under_way.popleft().items():
            flat, place = self._collective.take(key), 0
            for index in indices:
                sums[index] = self._parts[index].laid_out(flat, place).to(self._parameters[index].dtype)
                place += self._parts[index].size
        return sums

    def _start(self, key: Key, indices: Sequence[int], last: Sequence[Tensor | None]) -> None:
        """Add the last microbatch's gradients to the sums, directly in one vector, and send it."""
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
        first = addends[0][1][0]
        flat = first.new_empty(elements, dtype=summed_in(first.dtype))
        for index, values in addends:
            part = self._parts[index].of(flat, place)
            if len(values) == 2:
                torch.add(values[0].to(flat.dtype), values[1], out=part)
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


class SharedUpdate:
    """An update that the replicas of a worker share: each updates its own parameters, and sends the others the result.

        sums of gradients, each to the replica that updates its parameter     `ReplicatedSum`
        → norms of gradients, each from the replica that has the sum          if they are clipped
        → each replica: a step of its own optimizer, over its own parameters
        → new weights, to all replicas                                        by bucket

    Args:
        trained: the worker's trained parameters by name.
        updaters: by the same names, the replica that updates each.
        buckets: by name, the indices of their parameters; a bucket has one dtype.
    """

    def __init__(
        self,
        trained: Mapping[str, nn.Parameter],
        updaters: Mapping[str, int],
        buckets: Mapping[str, Sequence[int]],
        collective: Collective,
    ) -> None:
        self._collective = collective
        self._parameters = list(trained.values())
        self._parts = [VectorPart(parameter) for parameter in self._parameters]
        self._updaters = [updaters[name] for name in trained]
        self.own = {name: p for name, p in trained.items() if updaters[name] == collective.replica}
        groups = {f"weights of {name}": indices for name, indices in buckets.items()}
        known = {index for indices in buckets.values() for index in indices}
        for index, parameter in enumerate(self._parameters):
            if index not in known:  # it never gets a gradient, but some optimizers write to it
                rest = f"weights of rest {parameter.dtype}"
                groups[rest] = [*groups.get(rest, ()), index]
        self._groups = {name: sorted(indices, key=self._updaters.__getitem__) for name, indices in groups.items()}
        self._norms: tuple[int, list[float]] = (-1, [])

    def start_norms(self, minibatch: int) -> None:
        """Send the other replicas the norms of the gradients of this replica's parameters."""
        own = torch.tensor(norms_of(self._parameters), dtype=torch.float64, device=self._device)
        self._collective.start_gather(("norms", minibatch), own, [len(own)] * self._collective.replicas)

    def norms(self, minibatch: int, parameters: Sequence[nn.Parameter]) -> list[float]:
        """The norms of all gradients, as `norms_of` gives them; waits for the other replicas."""
        if self._norms[0] != minibatch:
            flat = self._collective.take(("norms", minibatch)).view(self._collective.replicas, -1)
            places = torch.tensor(self._updaters, device=flat.device).unsqueeze(0)
            self._norms = minibatch, flat.gather(0, places)[0].tolist()
        return self._norms[1]

    def start_weights(self, minibatch: int) -> None:
        """Send the weights that this replica has updated."""
        for name, members in self._groups.items():
            own = [i for i in members if self._updaters[i] == self._collective.replica]
            weights = [self._parameters[i].detach() for i in own]
            flat = in_one(weights, [self._parts[i] for i in own], self._parameters[members[0]])
            self._collective.start_gather((name, minibatch), flat, self._sizes(members))

    def take_weights(self, minibatch: int) -> None:
        """Wait for the weights that the other replicas have updated."""
        for name, members in self._groups.items():
            flat, place = self._collective.take((name, minibatch)), 0
            for index in members:
                part = self._parts[index]
                if self._updaters[index] != self._collective.replica:
                    self._parameters[index].detach().copy_(part.of(flat, place))
                place += part.size

    def _sizes(self, members: Sequence[int]) -> list[int]:
        sizes = [0] * self._collective.replicas
        for index in members:
            sizes[self._updaters[index]] += self._parts[index].size
        return sizes

    @property
    def _device(self) -> torch.device:
        return self._parameters[0].device

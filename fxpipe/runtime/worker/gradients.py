"""Sums the gradients of a minibatch's microbatches, of one worker or over all its replicas, and shares out the update.

What replicas add up or gather travels in vectors, each of tensors of one dtype.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from fxpipe.plan.packing import Layout, contiguous_stride
from fxpipe.plan.spec import TensorSpec
from fxpipe.runtime.wires.collective import Collective, Key
from fxpipe.runtime.worker.part import UpdatePart
from fxpipe.runtime.worker.setting import WorkerSetting
from fxpipe.task.batch import tensor_spec
from fxpipe.torch_private import foreach_add_, foreach_div_

Name = TypeVar("Name")


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


class Vector(Generic[Name]):
    """Tensors of one dtype in one vector: one after the other, without gaps, each with the strides of its `Layout`."""

    def __init__(self, specs: Mapping[Name, TensorSpec]) -> None:
        self._layouts = {name: Layout(spec) for name, spec in specs.items()}

    def size(self, names: Iterable[Name]) -> int:
        """How many elements a vector of these tensors has."""
        return sum(self._layouts[name].count for name in names)

    def views(self, flat: Tensor, names: Iterable[Name] | None = None) -> dict[Name, Tensor]:
        """The tensors of a vector, as views; `names` are those that it has, in its order, None all."""
        views, begin = {}, flat.storage_offset()
        for name in self._layouts if names is None else names:
            layout = self._layouts[name]
            views[name] = flat.as_strided(layout.shape, layout.stride, begin)
            begin += layout.count
        return views

    def joined(self, tensors: Mapping[Name, Tensor], names: Sequence[Name] | None = None) -> Tensor:
        """A new vector of tensors, on their device; `names` as for `views`."""
        names = list(self._layouts if names is None else names)
        first = next(iter(tensors.values()))
        flat = torch.empty(self.size(names), dtype=first.dtype, device=first.device)
        for name, view in self.views(flat, names).items():
            view.copy_(tensors[name].detach())
        return flat


def row_by_row(tensor: Tensor) -> TensorSpec:
    """Of a tensor like this one with row-major strides."""
    return TensorSpec(tuple(tensor.shape), contiguous_stride(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def buckets_of(setting: WorkerSetting) -> dict[str, list[int]]:
    """The buckets of a worker's gradients by name, as the indices of their parameters."""
    plan, index = setting.plan, {name: i for i, name in enumerate(setting.trained)}
    return {
        bucket.name: [index[plan.first_names[name]] for name in bucket.parameters]
        for bucket in plan.stages[setting.worker].buckets
    }


def vector_of(parameters: Sequence[nn.Parameter]) -> Vector[int]:
    """Of tensors like some of these parameters, by their indices."""
    return Vector({index: tensor_spec(parameter) for index, parameter in enumerate(parameters)})


def shares_of(vector: Vector[int], members: Sequence[int], updaters: Sequence[int], replicas: int) -> list[int]:
    """How many elements of a vector of these parameters each replica updates."""
    return [vector.size(index for index in members if updaters[index] == replica) for replica in range(replicas)]


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
        self._vector = vector_of(parameters)
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
        for key, members in self._under_way.popleft().items():
            for index, value in self._vector.views(self._collective.take(key), members).items():
                sums[index] = value.to(self._parameters[index].dtype)
        return sums

    def _start(self, key: Key, indices: Sequence[int], last: Sequence[Tensor | None]) -> None:
        """Add the last microbatch's gradients to the sums, directly in one vector, and send it."""
        rows = zip(indices, last, strict=True)
        addends = {i: [value for value in (self._sums[i], gradient) if value is not None] for i, gradient in rows}
        members, sizes = [index for index, values in addends.items() if values], None
        if not members:
            return
        self._sent[key] = members
        if self._updaters:
            members.sort(key=self._updaters.__getitem__)
            sizes = shares_of(self._vector, members, self._updaters, self._collective.replicas)
            self._sent[key] = [index for index in members if self._updaters[index] == self._collective.replica]
        first = addends[members[0]][0]
        flat = first.new_empty(self._vector.size(members), dtype=summed_in(first.dtype))
        for index, part in self._vector.views(flat, members).items():
            values = addends[index]
            if len(values) == 2:
                torch.add(values[0].to(flat.dtype), values[1], out=part)
            else:
                part.copy_(values[0])
        self._collective.start_sum(key, flat, self._divisor, sizes)


class SharedUpdate(UpdatePart):
    """An update that the replicas of a worker share: each updates its own parameters, and sends the others the result.

    sums of gradients, each to the replica that updates its parameter     `ReplicatedSum`
    → norms of gradients, each from the replica that has the sum          if they are clipped
    → each replica: a step of its own optimizer, over its own parameters
    → new weights, to all replicas                                        by bucket
    """

    def __init__(self, setting: WorkerSetting, collective: Collective) -> None:
        trained, updaters = setting.trained, setting.shares
        self._collective = collective
        self._parameters = list(trained.values())
        self._vector = vector_of(self._parameters)
        self._updaters = [updaters[name] for name in trained]
        buckets = buckets_of(setting)
        groups = {f"weights of {name}": indices for name, indices in buckets.items()}
        known = {index for indices in buckets.values() for index in indices}
        for index, parameter in enumerate(self._parameters):
            if index not in known:  # it never gets a gradient, but some optimizers write to it
                groups.setdefault(f"weights of rest {parameter.dtype}", []).append(index)
        self._groups = {name: sorted(indices, key=self._updaters.__getitem__) for name, indices in groups.items()}

    @classmethod
    def of(cls, setting: WorkerSetting) -> Iterator[UpdatePart]:
        if setting.shares and setting.collective is not None:
            yield cls(setting, setting.collective)

    def apply(self, minibatch: int) -> None:
        """Send the weights that this replica has updated, and wait for those that the others have."""
        for name, members in self._groups.items():
            weights = {index: self._parameters[index] for index in members}
            updated = [index for index in members if self._updaters[index] == self._collective.replica]
            flat = self._vector.joined(weights, updated)
            sizes = shares_of(self._vector, members, self._updaters, self._collective.replicas)
            self._collective.start_gather((name, minibatch), flat, sizes)
        for name, members in self._groups.items():
            for index, value in self._vector.views(self._collective.take((name, minibatch)), members).items():
                if self._updaters[index] != self._collective.replica:
                    self._parameters[index].detach().copy_(value)

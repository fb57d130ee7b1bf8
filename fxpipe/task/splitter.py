"""A minibatch cut into microbatches, checked against the batch that was captured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import torch

from fxpipe.device_copies import ToDevice, widest
from fxpipe.errors import BatchError
from fxpipe.plan.plan import Plan
from fxpipe.plan.spec import LeafSpec, TensorSpec
from fxpipe.task.batch import Batch, constant_of, is_number, said, unusual
from fxpipe.task.containers import tree_text
from fxpipe.torch_private import pytree


class Splitter:
    """Checks a minibatch against the captured leaves and cuts it into microbatches, as worker 0 does with its data.

    The leaves are those of one microbatch that the user's batches have, and `spec` is the serialised pytree, both from
    the plan.
    """

    def __init__(
        self, leaves: Sequence[LeafSpec], spec: str, microbatches: int, device: torch.device | str = "cpu"
    ) -> None:
        self.leaves = tuple(leaves)
        self.spec = spec
        self._known: pytree.TreeSpec | None = None
        self.microbatches = microbatches
        self.device = device
        self._to_device = ToDevice(device)

    def cut(self, batch: Batch, minibatch: int) -> list[Batch]:
        """The microbatches: views of the batch's memory."""

        if not self._is_built_so(batch.tree):
            raise BatchError(
                f"the batch of step {minibatch + 1} is built differently from the one captured: "
                f"{batch.tree} for {tree_text(self.spec)}",
                hint="every batch of train_data() must have the same structure; compile again if it changed",
            )
        if wrong := self.differences(batch):
            raise BatchError(
                f"the batch of step {minibatch + 1} does not fit the captured program: " + "; ".join(wrong),
                hint="compile again with every shape of batch (--scan N; in Python shapes=...), or drop the last, "
                "smaller batch (drop_last=True), or pad it",
                page="batch-shapes",
            )
        return batch.cut_as(self.leaves).split(self.microbatches)

    def differences(self, batch: Batch) -> list[str]:
        """How the leaves of a batch with the captured structure differ from the captured leaves, in words."""
        return [text for text in map(self._difference, self.leaves, batch.values) if text]

    def distance(self, batch: Batch) -> float:
        """How far a batch is from the captured ones: 0 if it fits, infinite if its structure differs.

        Each leaf that differs counts 1, and so does each of its dimensions that differs.
        """
        if not self._is_built_so(batch.tree):
            return math.inf
        return sum(self._distance(leaf, value) for leaf, value in zip(self.leaves, batch.values, strict=True))

    def fits(self, batch: Batch) -> bool:
        """Whether a batch agrees with the captured ones in everything that the step reads."""
        return self.distance(batch) == 0

    def _distance(self, leaf: LeafSpec, value: Any) -> int:
        if not self._difference(leaf, value):
            return 0
        if leaf.tensor is None or not isinstance(value, torch.Tensor) or unusual(value):
            return 1
        return 1 + sum(a != b for a, b in zip_longest(value.shape, self._expected(leaf, leaf.tensor)))

    def _is_built_so(self, spec: pytree.TreeSpec) -> bool:
        if spec != self._known:
            if pytree.treespec_dumps(spec) != self.spec:
                return False
            self._known = spec
        return True

    def leaves_of(self, part: Batch) -> tuple[Any, ...]:
        """A microbatch's tensors and constants, in the plan's order.

        Tensors are copies, because an iterable may reuse their memory while the minibatch is in flight. They have the
        captured strides, because the captured code may rely on them.
        """
        return tuple(map(self._placed, self.leaves, part.values))

    def read_of(self, part: Batch) -> list[Any]:
        """What a step reads of a microbatch, where it is."""
        return [value for leaf, value in zip(self.leaves, part.values, strict=True) if leaf.read]

    def __call__(self, batch: Any, minibatch: int) -> list[tuple[Any, ...]]:
        """The leaves of each microbatch."""
        return [self.leaves_of(part) for part in self.cut(Batch.of(batch), minibatch)]

    def _placed(self, leaf: LeafSpec, value: Any) -> Any:
        if not leaf.read:
            return None
        if leaf.tensor is None:
            return value
        if not isinstance(value, torch.Tensor):
            dtype = widest(self.device) if leaf.tensor.dtype == "float64" else getattr(torch, leaf.tensor.dtype)
            return torch.full((), value, dtype=dtype, device=self.device)
        if value.is_meta:
            raise BatchError(
                f"{leaf.name} is on the meta device and has no values",
                hint="train_data() must return tensors with values",
            )
        placed = torch.empty_strided(leaf.tensor.shape, leaf.tensor.stride, dtype=value.dtype, device=self.device)
        return placed.copy_(self._to_device(value.detach()))

    def _is_constant(self, leaf: LeafSpec, value: Any) -> bool:
        """Whether a leaf of the minibatch equals the one that every microbatch was captured with."""
        parts = [value]
        if isinstance(value, torch.Tensor) and leaf.dim is not None:
            parts = list(torch.chunk(value, self.microbatches, leaf.dim))
        return all(repr(constant_of(part)) == repr(leaf.constant) for part in parts)

    def _difference(self, leaf: LeafSpec, value: Any) -> str:
        """How a leaf differs from the captured one, in words; '' if it does not."""
        if not leaf.read:
            return ""
        if leaf.tensor is None:
            constant = said(constant_of(value))
            same = self._is_constant(leaf, value)
            return "" if same else f"{leaf.name} is {constant}, captured as the constant {said(leaf.constant)}"
        if is_number(value) and not leaf.tensor.shape:
            whole = isinstance(value, float) and leaf.tensor.dtype == "int64"
            return f"{leaf.name} is {value}, captured as an int" if whole else ""
        if not isinstance(value, torch.Tensor):
            return f"{leaf.name} is a {type(value).__name__}, captured as a tensor"
        if kind := unusual(value):
            return f"{leaf.name} is {kind}, captured as a dense one"
        expected, dtype = self._expected(leaf, leaf.tensor), str(value.dtype).removeprefix("torch.")
        if tuple(value.shape) == expected and dtype == leaf.tensor.dtype:
            return ""
        return f"{leaf.name} is {dtype}{list(value.shape)}, captured as {leaf.tensor.dtype}{list(expected)}"

    def _expected(self, leaf: LeafSpec, tensor: TensorSpec) -> tuple[int, ...]:
        """The shape of the minibatch's tensor."""
        if leaf.dim is None:
            return tensor.shape
        return (*tensor.shape[: leaf.dim], tensor.shape[leaf.dim] * self.microbatches, *tensor.shape[leaf.dim + 1 :])


def splitter_of(plan: Plan, device: torch.device | str = "cpu") -> Splitter:
    """The splitter of the user's minibatches for a build."""
    return Splitter(plan.step.given, plan.step.batch_spec, plan.microbatches, device)

"""Cuts a minibatch into microbatches: the user's leaves, padded, and leaves that are computed from them."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fxpipe.errors import BatchError, TaskError
from fxpipe.plan.plan import Plan
from fxpipe.plan.spec import LOSS_SCALE, LOSS_WEIGHT, StepSpec
from fxpipe.stages.loaded import load_stages
from fxpipe.task.batch import Batch
from fxpipe.task.loss_weights import LossWeight, weight_of
from fxpipe.task.splitter import Splitter, splitter_of

TRIED_SCALE = 1024.0
"""The loss scale of a float16 step that is compared, measured or exported. A run has its own (see `LossScaler`). Both
are divided by the number of microbatches, whose gradients are then added up."""


Compare = Callable[[int, int], None]
"""Takes a minibatch and its checksum."""

SAMPLED = 1024
"""About how many values of a tensor its checksum reads."""


class Minibatches:
    """Pads and cuts minibatches, and computes leaves that need the whole minibatch: totals, weights of microbatches.

    Args:
        source: the build's folder, or the texts of its files by name.
        tensors: what totals are computed with, by name, on the plan's device, as it is when a minibatch is cut.

    Raises:
        BuildError: the file of the totals does not fit the plan.
        TaskError: the build needs the hook `loss_weight`, and there is none.
    """

    def __init__(
        self,
        plan: Plan,
        source: Path | Mapping[str, str],
        tensors: Mapping[str, Tensor],
        loss_weight: LossWeight | None,
    ) -> None:
        if plan.loss.weighted and loss_weight is None:
            raise TaskError(
                "the build was compiled with loss_weight(batch), and this hook is missing",
                hint="define loss_weight in the model file (Python: loss_weight=...), or compile again without it",
            )
        self._plan = plan
        self._loss_weight = loss_weight if plan.loss.weighted else None
        self.splitter = splitter_of(plan, plan.device)
        self._names = [leaf.name for leaf in plan.step.given]
        self._made = [leaf.name for leaf in plan.step.made]
        losses = 1 if plan.outer is None else plan.dp
        self._shares = [slice(replica, None, losses) for replica in range(losses)]  # microbatches that share a loss
        if plan.step.totals is not None:
            (spec,), (code,) = plan.step.totals.stages, load_stages(plan.step.totals, source)
            self._function = code.functions["F"]
            self._arguments = spec.forward.batch
            self._taken = {
                leaf.name: torch.ones(leaf.tensor.shape, dtype=getattr(torch, leaf.tensor.dtype), device=plan.device)
                for leaf in plan.step.totals.batch
                if leaf.tensor is not None and leaf.name in plan.step.totals.metrics
            }
            self._tensors, self._read = tensors, spec.forward.buffers

    def __call__(self, batch: Any, minibatch: int, compare: Compare | None = None) -> list[tuple[Any, ...]]:
        """Each microbatch's leaves, in the plan's order.

        Raises:
            BatchError: the batch differs from the captured one; names every leaf that differs.
            TaskError: `loss_weight` failed, or returned something that is not a weight.
        """
        parts = self.splitter.cut(Batch.of(batch).padded(self._plan.padding), minibatch)
        leaves = [self.splitter.leaves_of(part) for part in parts]
        if compare is not None:
            compare(minibatch, number_of([self.splitter.read_of(part) for part in parts]))
        computed: dict[str, list[Any]] = {}
        if self._plan.step.totals is not None:
            computed.update(self._added_up(self._plan.step.totals, leaves))
        if self._loss_weight is not None:
            computed[LOSS_WEIGHT] = [torch.empty(())] * len(parts)
            for share in self._shares:
                computed[LOSS_WEIGHT][share] = weights_of(self._loss_weight, parts[share], minibatch, self._plan.device)
        if self._plan.scales_loss:
            scale = torch.full((), TRIED_SCALE / self._plan.loss_divisor, device=self._plan.device)
            computed[LOSS_SCALE] = [scale] * len(parts)
        return [(*of_user, *(computed[name][j] for name in self._made)) for j, of_user in enumerate(leaves)]

    def _added_up(self, step: StepSpec, leaves: Sequence[tuple[Any, ...]]) -> dict[str, list[Tensor]]:
        """Each total, once for every microbatch; if replicas train separately, over the microbatches of its replica."""

        def add(part: tuple[Any, ...], totals: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
            values = {**dict(zip(self._names, part, strict=True)), **totals}
            terms: tuple[Tensor, ...] = self._function((), buffers, tuple(values[n] for n in self._arguments), None)
            return terms

        buffers = tuple(self._tensors[name] for name in self._read)
        rows: dict[str, list[Any]] = {name: [None] * len(leaves) for name in step.metrics}
        with torch.no_grad():
            for share in self._shares:
                for name, total in totals_of(add, leaves[share], step.metrics, self._taken).items():
                    rows[name][share] = [total] * len(rows[name][share])
        return rows


class ShapedMinibatches:
    """As `Minibatches`, with the same arguments, for a build of several shapes of batches.

    Attributes:
        make: called with a batch that fits no shape, its minibatch, and the error that says so; adds the batch's shape,
            or raises an error. None allows only the shapes of the plan.
        compare: called with each minibatch and a checksum of what its steps read, as it was given; None if nothing
            compares it.
    """

    def __init__(
        self,
        plan: Plan,
        source: Path | Mapping[str, str],
        tensors: Mapping[str, Tensor],
        loss_weight: LossWeight | None,
    ) -> None:
        self._tensors, self._loss_weight = tensors, loss_weight
        self._of_shapes = [Minibatches(of_shape, source, tensors, loss_weight) for of_shape in plan.of_shapes]
        self._padding = plan.padding
        self.make: Callable[[Batch, int, BatchError], None] | None = None
        self.compare: Compare | None = None

    def add(self, of_shape: Plan, source: Mapping[str, str]) -> None:
        """Add a shape, with the texts of its files; `tensors` already has the constants of its totals."""
        self._of_shapes.append(Minibatches(of_shape, source, self._tensors, self._loss_weight))

    def __call__(self, batch: Any, minibatch: int) -> tuple[int, list[tuple[Any, ...]]]:
        """The index of the batch's shape, and each microbatch's leaves; errors as of `Minibatches`."""
        read = Batch.of(batch).padded(self._padding)
        shape, fits = nearest([of_shape.splitter for of_shape in self._of_shapes], read)
        if not fits and self.make is not None:
            try:
                return shape, self._of_shapes[shape](read, minibatch, self.compare)
            except BatchError as refusal:
                self.make(read, minibatch, refusal)
            shape = len(self._of_shapes) - 1
        return shape, self._of_shapes[shape](read, minibatch, self.compare)


def nearest(shapes: Sequence[Splitter], batch: Batch) -> tuple[int, bool]:
    """The index of the captured shape that is nearest to a padded batch, and whether the batch fits it."""
    distances = [shape.distance(batch) for shape in shapes]
    index = distances.index(min(distances))
    return index, not distances[index]


def number_of(parts: Sequence[Sequence[Any]]) -> int:
    """A checksum of a minibatch, from some of each tensor's values, by which replicas compare what they read.

    It waits at most once for a device, and not for one that has none of the values.
    """
    some: dict[torch.device, list[Tensor]] = {}
    for leaf in (leaf for part in parts for leaf in part if isinstance(leaf, Tensor) and leaf.numel()):
        flat = leaf.detach().reshape(-1)
        sampled = flat[:: max(1, len(flat) // SAMPLED)].contiguous()
        some.setdefault(leaf.device, []).append(sampled.view(torch.uint8))
    checksum = 0
    for of_device in some.values():
        checksum = zlib.crc32(torch.cat(of_device).cpu().numpy().tobytes(), checksum)
    return checksum


def totals_of(
    add: Callable[[Any, Mapping[str, Tensor]], Sequence[Tensor]],
    parts: Sequence[Any],
    names: Sequence[str],
    taken: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """The totals of a minibatch by name: the sums of what its microbatches add to them.

    A total may depend on earlier totals, as squared distances from the mean do. So all are summed again and again: each
    round makes at least one more of them right.

    Args:
        add: returns what a microbatch adds to each total, given the microbatch and the totals so far.
        taken: the totals that others depend on; all ones at first.
    """
    totals = dict(taken)
    for _ in range(len(taken) + 1):
        columns = zip(*(add(part, totals) for part in parts), strict=True)
        sums = [torch.stack(column).sum(0, dtype=column[0].dtype) for column in columns]
        totals = dict(zip(names, sums, strict=True))
    return totals


def weights_of(hook: LossWeight, parts: Sequence[Batch], minibatch: int, device: str) -> list[Tensor]:
    """The `loss_weight` of each microbatch divided by their mean: float32 scalars.

    Raises:
        TaskError: the hook failed, or returned something that is not a weight.
    """
    weights = [weight_of(hook, part.given) for part in parts]
    mean = math.fsum(weights) / len(weights)
    if not all(math.isfinite(w) and w >= 0 for w in weights) or mean == 0:
        raise TaskError(
            f"loss_weight(batch) gave {', '.join(f'{w:g}' for w in weights)} in step {minibatch + 1}",
            hint="return weights of 0 or more, not all 0",
        )
    return [torch.full((), w / mean, dtype=torch.float32, device=device) for w in weights]


def evenly(batch: Any) -> float:
    """A `loss_weight` that weighs all microbatches equally, for timing or exporting a build."""
    return 1.0

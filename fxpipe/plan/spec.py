"""What the workers compute of batches of one shape: the step, its stages and their parts, edges, leaves, tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

LOSS_WEIGHT = "loss_weight"  # the hook, and the leaf with its result
LOSS_SCALE = "loss_scale"  # the leaf with which a float16 backward begins
Phase = Literal["F", "B", "W"]  # forward, backward, and weight gradients if a schedule separates them
PHASES: tuple[Phase, ...] = ("F", "B", "W")
FUNCTIONS: dict[Phase, Literal["forward", "backward", "weights"]] = {"F": "forward", "B": "backward", "W": "weights"}
"""The name of the function of each phase in the code."""
EdgeKind = Literal["input", "activation", "saved", "gradient", "token"]  # copies of weights follow from `parameters`


@dataclass(frozen=True)
class TensorSpec:
    """Shape, stride (in elements) and dtype (`float32`, …) of one tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        return self._elements * self._item

    @property
    def sum_bytes(self) -> int:
        """Bytes of a sum of gradients of this type: 16-bit ones are added up in float32."""
        return self._elements * max(4, self._item)

    @property
    def _elements(self) -> int:
        return math.prod(self.shape)

    @property
    def _item(self) -> int:
        import torch

        item: int = getattr(torch, self.dtype).itemsize
        return item


@dataclass(frozen=True)
class EdgeSpec:
    """A value that crosses workers once per microbatch, sent in `src_phase` and received in `dst_phase`.

    A `token` carries nothing: it keeps a worker after its neighbour if no value does.

    Attributes:
        tensor: the value, with its layout in the code at both ends.
        codec: what packs it to travel (`fxpipe.codecs`), '' if nothing does.
        packed: the packed value.
    """

    name: str
    kind: EdgeKind
    src: int
    src_phase: Phase
    dst: int
    dst_phase: Phase
    tensor: TensorSpec
    codec: str = ""
    packed: TensorSpec | None = None

    @property
    def sent(self) -> TensorSpec:
        """The value that travels."""
        return self.packed or self.tensor


@dataclass(frozen=True)
class LeafSpec:
    """One leaf of the batch: a tensor (of one microbatch), or a constant.

    A number that the step computes with is a tensor without dimensions. A constant is plain Python; for a tensor, its
    dtype and values, the same in every microbatch. `dim` is the dimension along which the minibatch's tensor is cut;
    None: every microbatch gets all of it. A leaf that the step does not `read` may be anything.
    """

    name: str
    tensor: TensorSpec | None
    constant: Any = None
    dim: int | None = None
    read: bool = True


@dataclass(frozen=True)
class PadSpec:
    """What is appended to leaves of the user's batches before anything else sees them.

    Attributes:
        leaf: the leaf's name, or the key in its name, as the user wrote it.
        value: the appended number.
        dims: the dimensions to pad to the next multiple of `multiple`.
    """

    leaf: str
    value: Any
    dims: tuple[int, ...]
    multiple: int


@dataclass(frozen=True)
class BucketSpec:
    """Gradients of one dtype that a worker's replicas add up in one go.

    Attributes:
        name: unique among the worker's buckets.
        parameters: those of the gradients, in the order in which the code hands them over.
        bytes: of all of them.
        sharded: whether each replica gets only its own part of the sums (`comm.reduce_scatter`), not all of them
            (`comm.all_reduce`).
        updaters: if sharded, for each parameter the replica that gets the sum of its gradient and updates it.
    """

    name: str
    parameters: tuple[str, ...]
    bytes: int
    sharded: bool = False
    updaters: tuple[int, ...] = ()

    @property
    def call(self) -> Literal["all_reduce", "reduce_scatter"]:
        """The method of `comm` that the code calls."""
        return "reduce_scatter" if self.sharded else "all_reduce"


@dataclass(frozen=True)
class PartSpec:
    """The interface of one function of a stage: `forward`, `backward`, `weights`; every tuple in the code's order.

    Attributes:
        weights: parameter names, the order of the `weights` argument.
        buffers: buffer names, the order of the `buffers` argument.
        batch: batch leaf names, the order of the `batch` argument (worker 0's forward only).
        receives, sends: edge names, in the order of the code.
        saved: names of the values that forward returns and backward takes.
        deferred: names of the values that backward returns and `weights` takes, if it makes gradients.
        updates: buffer names whose new values are returned by forward, or after the metrics by an evaluation.
        gradients: parameter names whose gradients the function returns: `weights`, or backward without it.
        loss: whether forward returns the loss (else it returns None there).
        random: whether the code draws random numbers.
        metrics: of an evaluation: the names of the metrics that its function returns first; of a forward that returns
            the loss: of those after the loss, in one float32 tensor.
        reduces: names of the buckets that the function hands to the worker's replicas to add up.
    """

    weights: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    batch: tuple[str, ...] = ()
    receives: tuple[str, ...] = ()
    sends: tuple[str, ...] = ()
    saved: tuple[str, ...] = ()
    updates: tuple[str, ...] = ()
    gradients: tuple[str, ...] = ()
    loss: bool = False
    random: bool = False
    metrics: tuple[str, ...] = ()
    deferred: tuple[str, ...] = ()
    reduces: tuple[str, ...] = ()

    def third(self, phase: Phase) -> tuple[str, ...]:
        """The names in the third argument of the function of a phase: leaves of the batch, saved or deferred values."""
        return {"F": self.batch, "B": self.saved, "W": self.deferred}[phase]


@dataclass(frozen=True)
class StageSpec:
    """One worker's stage: its file, the file's digest, its units (half-open ranges) and its functions.

    `weight_units` are the units whose weight gradients it makes, except for operators that make them together with the
    input's gradient: those are in `backward_units`. `engines` run its forward and its backward. `weights` is present if
    weight gradients are separate from backward: it then returns all of the stage's gradients. `again` names the values
    of its forward that its backward computes again to save memory. `buckets` are those in which its gradients are added
    up over the worker's replicas, in the order of the code; without replicas there are none. A stage that does not
    train has only a forward, which its file calls `evaluate`, and no units.
    """

    file: str
    digest: str
    forward: PartSpec
    backward: PartSpec | None = None
    forward_units: tuple[int, int] = (0, 0)
    backward_units: tuple[int, int] = (0, 0)
    weight_units: tuple[int, int] = (0, 0)
    engines: tuple[str, str] = ("eager", "eager")
    weights: PartSpec | None = None
    again: tuple[str, ...] = ()
    buckets: tuple[BucketSpec, ...] = ()

    @property
    def parts(self) -> dict[Phase, PartSpec]:
        """The interfaces of its functions, in the order of phases."""
        parts: dict[Phase, PartSpec | None] = {"F": self.forward, "B": self.backward, "W": self.weights}
        return {phase: part for phase, part in parts.items() if part is not None}

    @property
    def functions(self) -> dict[Phase, str]:
        """The names of its functions in its file."""
        return {"F": "evaluate"} if self.backward is None else {phase: FUNCTIONS[phase] for phase in self.parts}

    def part(self, phase: Phase) -> PartSpec:
        """The interface of the function that runs in this phase; an empty one if there is none."""
        return self.parts.get(phase, PartSpec())

    @property
    def gradients(self) -> tuple[str, ...]:
        """The names of the parameters whose gradients it makes, in the order in which they are returned."""
        return (self.weights or self.backward or self.forward).gradients

    def engine(self, phase: Phase) -> str:
        """The engine of this phase's function: separate weight gradients are always made by the emitted code."""
        return {"F": self.engines[0], "B": self.engines[1], "W": "eager"}[phase]


@dataclass(frozen=True)
class StepSpec:
    """What the workers compute of batches of one shape: a step of training, an evaluation, or totals of a minibatch.

    A step of training for another shape than the first reads only the first's weights, has the same gradients and
    updates the same buffers. An evaluation is `metrics(model, batch)` in eval mode, on a whole batch of `eval_data()`.
    Totals are what worker 0 computes from each microbatch. Evaluations and totals have only forwards.

    Attributes:
        batch: the leaves in pytree order, of one microbatch in training, then those that worker 0 makes (`made`);
            `batch_spec` is the serialised pytree of the user's batches.
        edges: in the order in which they are sent.
        stages: one for each worker; for totals, only worker 0's.
        metrics: of an evaluation or of totals, the names, in the order of the user's dictionary.
        constants: the metrics that are plain numbers, the same for every batch.
        gathered: the metrics that are tensors with dimensions, from which the hook `metrics_of_all` makes numbers.
        of_all: the names of these numbers; empty if they are not known before the first evaluation.
        units: of a step of training: the module path that each unit starts in.
        differs_from_whole: of a step of training: why the loss of a minibatch differs from the whole batch's by design;
            '' if it does not.
        whole_numbers: of a step of training: whether microbatches take numbers of the whole batch, such as how many
            samples it has: a microbatch's loss is then not the user's function of that microbatch.
        totals: computes from each microbatch what is added up over the minibatch: its metrics are leaves of the batch
            with the same names. None if nothing is added up.
        flops: of a microbatch's forward and backward in the user's step, by the dtype that is multiplied; empty if
            unknown (`fxpipe.costs.step_work`).
        tokens: of a microbatch; 0 if it has none, or they are unknown.
    """

    batch: tuple[LeafSpec, ...]
    batch_spec: str
    edges: tuple[EdgeSpec, ...]
    stages: tuple[StageSpec, ...]
    metrics: tuple[str, ...] = ()
    constants: dict[str, float] = field(default_factory=dict)
    gathered: dict[str, TensorSpec] = field(default_factory=dict)
    of_all: tuple[str, ...] = ()
    units: tuple[str, ...] = ()
    differs_from_whole: str = ""
    whole_numbers: bool = False
    totals: StepSpec | None = None
    flops: dict[str, float] = field(default_factory=dict)
    tokens: int = 0

    @property
    def given(self) -> tuple[LeafSpec, ...]:
        """The leaves of the user's own batches."""
        made = self.made
        return tuple(leaf for leaf in self.batch if leaf not in made)

    @property
    def made(self) -> tuple[LeafSpec, ...]:
        """The leaves that worker 0 makes: the user's batches do not have them."""
        totals = self.totals.metrics if self.totals else ()
        return tuple(leaf for leaf in self.batch if leaf.name in (*totals, LOSS_WEIGHT, LOSS_SCALE))

    @property
    def numbers(self) -> list[str]:
        """The names of what an evaluation gives, as far as they are known."""
        return [*(name for name in self.metrics if name not in self.gathered), *self.of_all]

    def sizes(self, worker: int) -> list[int]:
        """How many numbers each metric has that a worker computes for a batch."""
        metrics = self.stages[worker].forward.metrics
        return [math.prod(self.gathered[name].shape) if name in self.gathered else 1 for name in metrics]

"""The plan: everything `run` needs to know about a build, and nothing that changes from one compile to the next.

`plan.json` is this file's dataclasses written as JSON. Measured times are not in it (they live in
`costs.json`), so that the same model, options and cuts give the same bytes.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal

from fxpipe.options import option
from fxpipe.plan.signed import digest_of, signed

FORMAT = 18
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
class ParameterSpec:
    """A parameter: all its names (tied ones share a row), its owner and who reads it where.

    `owner` holds the master weight and the optimizer state. `readers` lists every (worker, phase) whose code takes it
    as an argument, including the owner's own. All that they compute from it, they compute from a cast of it to the type
    `cast`, if there is one of fewer bits. `attributes` are what hangs on it, by name, as text
    (`fxpipe.task.parameter_attributes`).
    """

    names: tuple[str, ...]
    tensor: TensorSpec
    owner: int
    trained: bool
    readers: tuple[tuple[int, Phase], ...]
    cast: str | None = None
    attributes: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.names[0]


@dataclass(frozen=True)
class BufferSpec:
    """A buffer or a constant of the model. `home` updates it (None: no worker does, every reader has its own copy)."""

    names: tuple[str, ...]
    tensor: TensorSpec
    persistent: bool
    home: int | None
    workers: tuple[int, ...]

    @property
    def name(self) -> str:
        return self.names[0]


@dataclass(frozen=True)
class WatchedSpec:
    """A value of the user's program that the captured step has read, and that hooks of a run can reach.

    Attributes:
        holder: the name of what holds it: an object, a container, a module of Python.
        key: in the holder: the text of an attribute, a name or a key; `*` for everything in a container.
        place: how the hooks write the value: `NET.tau`.
        value: a text by which it is compared; of an object that is no plain value, its type.
        where: the line of the step that reads it.
        buffer: of a tensor, the buffer that gets its new values; '' if none can. None: it is no tensor.
        alias: the step has the tensor from elsewhere: another tensor in this place would not be its own.
    """

    holder: str
    key: str
    place: str
    value: str
    where: str | None
    buffer: str | None = None
    alias: bool = False


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


@dataclass(frozen=True)
class Mesh:
    """The processes of a run: those of a rank are neighbours, or, if `apart`, those of a replica.

    With equal numbers of replicas it has two dimensions: `pp`, the ranks of the pipeline, and `dp`, the replicas.

    Attributes:
        placement: as in `Plan`.
        replicas: how many each rank has; empty if each has one.
        `apart`: replicas are independent: the processes of a replica, not of a rank, are neighbours.
    """

    placement: tuple[int, ...] = ()
    replicas: tuple[int, ...] = ()
    apart: bool = False

    @property
    def plain(self) -> bool:
        """Whether each process has one worker without other replicas."""
        return not self.replicated and len(set(self.placement)) == len(self.placement)

    @property
    def replicated(self) -> bool:
        """Whether a rank has several replicas."""
        return max(self.replicas, default=1) > 1

    @property
    def noun(self) -> str:
        """The word for a process: worker, rank or replica."""
        return "worker" if self.plain else "process" if self.replicated else "rank"

    @property
    def groups(self) -> list[list[int]]:
        """The processes of each rank that has several."""
        return [list(self.of_rank(rank)) for rank, count in enumerate(self.replicas) if count > 1]

    def rank_of(self, worker: int) -> int:
        """The rank that a worker runs on."""
        return self.placement[worker] if self.placement else worker

    def process_of(self, worker: int, replica: int) -> int:
        """The process that has a replica of a worker."""
        return self.of_rank(self.rank_of(worker))[replica]

    def of_rank(self, rank: int) -> range:
        """The processes of a rank, one for each replica."""
        if not self.replicas:
            return range(rank, rank + 1)
        if self.apart:
            ranks = len(self.replicas)
            return range(rank, ranks * self.replicas[rank], ranks)
        first = sum(self.replicas[:rank])
        return range(first, first + self.replicas[rank])

    def seat(self, process: int) -> tuple[int, int]:
        """The rank of a process, and the number of its replica."""
        if self.apart:
            replica, rank = divmod(process, len(self.replicas))
            return rank, replica
        ends = list(accumulate(self.replicas))
        rank = bisect_right(ends, process) if ends else process
        return rank, process - self.of_rank(rank)[0]


MESH = Mesh()
"""One worker a process, and no replicas."""


@dataclass(frozen=True)
class OuterSpec:
    """How independent replicas combine their weights (`fxpipe/runtime/worker/outer_step.py`).

    Attributes:
        every: the number of updates before each outer step.
        lr, momentum: of the outer step, which is one of SGD with Nesterov momentum.
        delay: how many outer steps later the result of an exchange is applied: 0 or 1.
        codec: encodes what each replica sends (`fxpipe.codecs`), with its option; '' sends it as it is.
    """

    every: int = option(64, minimum=1, metavar="H", help="With --outer: average after H updates. [default: 64]")
    lr: float = option(
        0.7,
        above=0,
        below=1000,
        metavar="RATE",
        help="With --outer: learning rate of the step. [default: 0.7, or 1 with a codec that carries over]",
    )
    momentum: float = option(
        0.9,
        minimum=0,
        below=1,
        metavar="M",
        help="With --outer: Nesterov momentum of the step. [default: 0.9, or 0 with a codec that carries over]",
    )
    delay: int = option(
        0,
        minimum=0,
        maximum=1,
        metavar="D",
        help="With --outer: 1 applies an average one such step later, so that nothing waits for it. [default: 0]",
    )
    codec: str = ""

    @property
    def kept(self) -> int:
        """How many times a replica stores the bytes of trained weights for outer steps, at most: the common weights,
        the momentum, what a codec leaves out and, with a delay, this and the weights as an exchange began."""
        return 1 + (self.momentum > 0) + self.delay + (1 + self.delay) * bool(self.codec)

    def __str__(self) -> str:
        late = ", one step late" if self.delay else ""
        sent = f", sent as {self.codec}" if self.codec else ""
        return f"outer steps every {self.every} updates (lr {self.lr:g}, momentum {self.momentum:g}{late}{sent})"


@dataclass(frozen=True)
class SettingSpec:
    """A hyperparameter of the model file (`fxpipe.setting`).

    Attributes:
        value: its value when the build was compiled; None if nothing read it.
        given: the text that the compile was given for it; None if none was.
        captured: a part of the user's files that capture read and that reads it; '' if there is none.
    """

    name: str
    value: bool | int | float | str | None
    given: str | None = None
    captured: str = ""


@dataclass(frozen=True)
class ModelFileSpec:
    """The user's model file, and what a compile has read of it: other parts may change without compiling again.

    Attributes:
        path: relative to the build directory; None when compiled from objects.
        sources: digest of the file and of each file of the user's own that it imports, by relative path.
        parts: the digest of each part that counts (`fxpipe.plan.read_by_capture`); empty if that is unknown, and all of
            the files count.
        settings: all known ones.
        any_setting: a part that counts, and may have read any of them; '' if none.
        given_arguments: the model file's own command line.
        arguments: the parsed ones that parts that count read, as `model.py: args.width`, with their values as text.
        any_argument: a part that counts, and may have read any of it; '' if none.
        run_options: the options of `fxpipe run` that it gives, for runs whose command line does not.
        calls_model: whether `model()` changes what other hooks read: a run calls it, too, before them.
    """

    path: str | None = None
    sources: dict[str, str] = field(default_factory=dict)
    parts: dict[str, str] = field(default_factory=dict)
    settings: tuple[SettingSpec, ...] = ()
    any_setting: str = ""
    given_arguments: tuple[str, ...] = ()
    arguments: dict[str, str] = field(default_factory=dict)
    any_argument: str = ""
    run_options: dict[str, bool | int | float | str] = field(default_factory=dict)
    calls_model: bool = False

    @property
    def name(self) -> str:
        """The name of the file; '' when compiled from objects."""
        return (self.path or "").rpartition("/")[2]

    @property
    def given(self) -> dict[str, str]:
        """The texts given to the compile, by setting."""
        return {row.name: row.given for row in self.settings if row.given is not None}


@dataclass(frozen=True)
class WeightsSpec:
    """The file with the initial parameters, buffers and constants, each once, under its first name.

    Attributes:
        meta: whether the parameters had no values at compile time: the file holds only buffers and constants, and a run
            makes the parameters' initial values.
    """

    file: str
    digest: str = ""
    meta: bool = False


@dataclass(frozen=True)
class LossSpec:
    """How the loss of a minibatch follows from those of its microbatches.

    Attributes:
        worker: the one whose forward returns the loss.
        of_microbatches: whether a minibatch's loss and gradients are the microbatches' mean, or their sum.
        batch_norm: where the batch norms are that normalise each microbatch by itself; '' if there are none.
        weighted: whether the hook `loss_weight(batch)` weights the loss of each microbatch: a leaf of that name holds
            the weight over the mean weight of the minibatch's microbatches.
    """

    worker: int
    of_microbatches: Literal["mean", "sum"] = "mean"
    batch_norm: str = ""
    weighted: bool = False


@dataclass(frozen=True)
class PrecisionSpec:
    """The types in which the step computes.

    Attributes:
        autocast: 'bf16' or 'fp16' if it was captured under torch.autocast.
        params: 'bf16' if stages compute with bfloat16 casts of float32 parameters.
        flags: those of torch unlike its defaults when it was compiled (`fxpipe.precision`).
    """

    autocast: str | None = None
    params: str | None = None
    flags: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """See the module's docstring. Plain data: loads without the model, and (except TensorSpec.bytes) without torch.

    Attributes:
        microbatches: their number in the whole minibatch; each of a worker's replicas does its share.
        steps: what the workers compute of batches of each shape, the first shape first.
        codec: the requested codecs, in the form of `--codec`; the edges have the chosen ones.
        padding: how batches are padded, in training and in evaluation; the shapes are those of padded batches.
        evaluations: one for each shape of batch that `eval_data()` gives; empty without validation hooks.
        not_evaluated: why the validation hooks could not be cut into stages; '' if they were, or if there are none.
        placement: the rank that each worker runs on: a rank is a process with one device; empty if worker k is on rank
            k. Worker 0 is on rank 0.
        rows: what each rank does for a minibatch, by a schedule that was read from a file (`schedule` is 'csv') or that
            the model file registered.
        weights_codec: what packs the changes of weights that owners send to their readers (`fxpipe.codecs`), with its
            option; '' sends the weights as they are.
        replicas: how many processes each worker has, with the same stage and the same weights; empty if each has one.
            Microbatch i of a minibatch belongs to replica i mod r of a worker that has r.
        watched: what the step and evaluations have read of the state that hooks of a run can reach.
        outer: how independent replicas, each on its own share of a minibatch, combine their weights; None if they add
            up their gradients. The fields about losses are then for a replica's share, which is its whole batch.
    """

    fxpipe: str
    torch: str
    microbatches: int
    schedule: str
    policy: str
    device: str
    steps: tuple[StepSpec, ...]
    loss: LossSpec
    parameters: tuple[ParameterSpec, ...]
    buffers: tuple[BufferSpec, ...]
    weights: WeightsSpec
    model_file: ModelFileSpec = field(default_factory=ModelFileSpec)
    precision: PrecisionSpec = field(default_factory=PrecisionSpec)
    codec: str = "none"
    padding: tuple[PadSpec, ...] = ()
    evaluations: tuple[StepSpec, ...] = ()
    not_evaluated: str = ""
    weights_codec: str = ""
    placement: tuple[int, ...] = ()
    rows: tuple[str, ...] = ()
    replicas: tuple[int, ...] = ()
    outer: OuterSpec | None = None
    watched: tuple[WatchedSpec, ...] = ()

    @property
    def workers(self) -> int:
        """How many workers there are, each with a stage."""
        return len(self.stages)

    @property
    def step(self) -> StepSpec:
        """The step for batches of the first shape, or of the only one."""
        return self.steps[0]

    @property
    def edges(self) -> tuple[EdgeSpec, ...]:
        """The edges of the first shape's step."""
        return self.step.edges

    @property
    def stages(self) -> tuple[StageSpec, ...]:
        """The stages for batches of the first shape, one for each worker."""
        return self.step.stages

    def with_step(self, **changes: Any) -> Plan:
        """With changes to the step of the first shape."""
        return dataclasses.replace(self, steps=(dataclasses.replace(self.step, **changes), *self.steps[1:]))

    def watching(self, rows: Sequence[WatchedSpec]) -> Plan:
        """With more that is watched; worker 0 has all buffers that follow hooks."""
        known = {(row.holder, row.key, row.buffer): row for row in self.watched}
        for row in rows:
            known.setdefault((row.holder, row.key, row.buffer), row)
        plan = dataclasses.replace(self, watched=tuple(known.values()))
        followed = plan.followed
        buffers = (
            dataclasses.replace(b, workers=tuple(dict.fromkeys((0, *b.workers)))) if b.name in followed else b
            for b in plan.buffers
        )
        return dataclasses.replace(plan, buffers=tuple(buffers))

    @property
    def followed(self) -> tuple[str, ...]:
        """The buffers that get new values if hooks change a tensor: worker 0 has them, and sends them to the others."""
        names = {row.buffer for row in self.watched if row.buffer}
        return tuple(b.name for b in self.buffers if b.name in names and b.home is None)

    @property
    def ranks(self) -> int:
        """How many processes the pipeline has, each with one device; a rank has as many replicas as its workers."""
        return max(self.placement, default=self.workers - 1) + 1

    @property
    def dp(self) -> int:
        """How many pipelines run in parallel: the number of replicas if all workers have the same, else 1, which
        contains them all."""
        return self.replicas[0] if len(set(self.replicas)) == 1 else 1

    @property
    def crossing(self) -> bool:
        """Whether workers have different numbers of replicas, so messages cross between replicas."""
        return len(set(self.replicas)) > 1

    def replicas_of(self, worker: int) -> int:
        """How many processes a worker has."""
        return self.replicas[worker] if self.replicas else 1

    @property
    def first_names(self) -> dict[str, str]:
        """The first name of every parameter and buffer by each of its names."""
        rows = [row.names for row in self.parameters] + [row.names for row in self.buffers]
        return {name: names[0] for names in rows for name in names}

    @cached_property
    def mesh(self) -> Mesh:
        """Where workers and replicas are."""
        replicas = tuple(self.replicas_of(self.hosted(rank)[0]) for rank in range(self.ranks))
        return Mesh(self.placement, replicas, self.outer is not None)

    @property
    def processes(self) -> int:
        """How many processes a run has: all replicas of all ranks."""
        return sum(self.mesh.replicas)

    @property
    def own_microbatches(self) -> int:
        """How many microbatches the plan's schedule has: a minibatch's, divided among the pipelines (`dp`)."""
        return self.microbatches // self.dp

    def share(self, worker: int) -> int:
        """How many microbatches of a minibatch each replica of a worker does."""
        return self.microbatches // self.replicas_of(worker)

    def microbatch(self, own: int, worker: int, replica: int) -> int:
        """The number, in the whole minibatch, of a replica's own microbatch: replicas take turns."""
        return own * self.replicas_of(worker) + replica

    @property
    def of_one_replica(self) -> Plan:
        """The pipeline of one independent replica, as if it were alone; this plan if replicas are not independent."""
        if self.outer is None:
            return self
        return dataclasses.replace(self, microbatches=self.own_microbatches, replicas=(), outer=None)

    @property
    def virtual(self) -> bool:
        """Whether a rank has several workers."""
        return self.ranks < self.workers

    def rank_of(self, worker: int) -> int:
        """The rank that a worker runs on."""
        return self.placement[worker] if self.placement else worker

    def hosted(self, rank: int) -> tuple[int, ...]:
        """The workers of a rank, in rising order."""
        return tuple(worker for worker in range(self.workers) if self.rank_of(worker) == rank)

    @property
    def code(self) -> tuple[StageSpec, ...]:
        """Everything of the build that has its own file: the stages, then evaluations and totals."""
        stages = (stage for step in self.steps for stage in step.stages)
        return (*stages, *(share for e in self.alone for share in e.stages))

    @property
    def alone(self) -> tuple[StepSpec, ...]:
        """Evaluations, and the totals of every shape: everything with only forwards."""
        return (*self.evaluations, *(step.totals for step in self.steps if step.totals))

    @property
    def of_shapes(self) -> tuple[Plan, ...]:
        """For each shape of batch, the plan as if there were no other."""
        return tuple(dataclasses.replace(self, steps=(step,)) for step in self.steps)

    @property
    def weights_apart(self) -> bool:
        """Whether the stages make weight gradients in a separate function."""
        return any(stage.weights is not None for stage in self.stages)

    @property
    def all_edges(self) -> tuple[EdgeSpec, ...]:
        """The edges of every shape."""
        return tuple(edge for step in self.steps for edge in step.edges)

    @property
    def loss_divisor(self) -> int:
        """The divisor of the sum of the microbatches' losses, and of their gradients."""
        if self.loss.of_microbatches == "sum":
            return 1
        return self.microbatches if self.outer is None else self.own_microbatches

    @property
    def scales_loss(self) -> bool:
        """Whether backwards begin with a loss scale that changes from update to update (`--autocast fp16`)."""
        return any(leaf.name == LOSS_SCALE for leaf in self.step.batch)

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names of the metrics that the hook `loss` returns next to the loss."""
        return self.stages[self.loss.worker].forward.metrics

    @property
    def tensors(self) -> tuple[ParameterSpec | BufferSpec, ...]:
        """Every tensor that the model holds: its parameters, then its buffers and constants."""
        return (*self.parameters, *self.buffers)

    def owned(self, worker: int) -> tuple[ParameterSpec, ...]:
        """The parameters whose master weights live on `worker`."""
        return tuple(p for p in self.parameters if p.owner == worker)

    @property
    def sharded(self) -> bool:
        """Whether each replica of a worker updates only its own share of the worker's parameters."""
        return any(bucket.sharded for stage in self.stages for bucket in stage.buckets)

    def updaters(self, worker: int) -> dict[str, int]:
        """The replica that updates each trained parameter of a worker, by name; empty if all replicas update all.

        For a parameter that never gets a gradient it is the first.
        """
        shared = [bucket for bucket in self.stages[worker].buckets if bucket.sharded]
        known = {n: r for bucket in shared for n, r in zip(bucket.parameters, bucket.updaters, strict=True)}
        trained = [p for p in self.owned(worker) if p.trained] if shared else []
        return {p.name: next((known[name] for name in p.names if name in known), 0) for p in trained}

    def updated(self, worker: int, replica: int) -> tuple[ParameterSpec, ...]:
        """The trained parameters of a worker that one of its replicas updates."""
        updaters = self.updaters(worker)
        return tuple(p for p in self.owned(worker) if p.trained and updaters.get(p.name, replica) == replica)

    @property
    def digest(self) -> str:
        """The digest that identifies this plan; `plan.json` has it too."""
        return digest_of(self._body())

    def to_json(self) -> str:
        """Stable text: the same plan gives the same bytes; its own digest is inside it."""
        return signed(self._body())

    def _body(self) -> dict[str, Any]:
        return {"format": FORMAT, **dataclasses.asdict(self)}

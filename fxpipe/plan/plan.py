"""The plan: everything `run` needs to know about a build, and nothing that changes from one compile to the next.

`plan.json` is a `Plan` written as JSON. Measured times are not in it (they live in `costs.json`), so that the same
model, options and cuts give the same bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from fxpipe.plan.mesh import Mesh, OuterSpec
from fxpipe.plan.signed import Signed
from fxpipe.plan.spec import LOSS_SCALE, EdgeSpec, PadSpec, Phase, StageSpec, StepSpec, TensorSpec
from fxpipe.plan.user_files import ModelFileSpec, WatchedSpec

FORMAT = 18


def holder_of(names: Iterable[str], parameters: Container[str]) -> str | None:
    """Which of these parameters a tensor of these names is part of, or hangs from: `layer.weight` for
    `layer.weight.codes`."""
    for name in names:
        while "." in name:
            name = name.rpartition(".")[0]
            if name in parameters:
                return name
    return None


@dataclass(frozen=True)
class ParameterSpec:
    """A parameter: all its names (tied ones share a row), its owner and who reads it where.

    `owner` holds the master weight and the optimizer state. `readers` lists every (worker, phase) whose code takes it
    as an argument, including the owner's own. They take it in the type `cast`, if that is not None: cast once for each
    version (`fxpipe/passes/cast_weights.py`). Evaluations take it as it is. `attributes` are what hangs on it, by name,
    as text (`fxpipe.task.parameter_attributes`). `saved` are its names in files of weights, which are those of
    `state_dict()`: a wrapper of checkpointing, say, leaves itself out there. `packed` says of which packed form it is a
    part (`Params4bit nf4`), if of any.
    """

    names: tuple[str, ...]
    tensor: TensorSpec
    owner: int
    trained: bool
    readers: tuple[tuple[int, Phase], ...]
    cast: str | None = None
    attributes: dict[str, str] = field(default_factory=dict)
    saved: tuple[str, ...] = ()
    packed: str = ""

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def read(self) -> TensorSpec:
        """The tensor that stages take."""
        return replace(self.tensor, dtype=self.cast or self.tensor.dtype)


@dataclass(frozen=True)
class BufferSpec:
    """A buffer or a constant of the model. `home` updates it (None: no worker does, every reader has its own copy).

    `saved` are its names in `state_dict()`, and so in files of weights; () if it is not there.
    """

    names: tuple[str, ...]
    tensor: TensorSpec
    saved: tuple[str, ...]
    home: int | None
    workers: tuple[int, ...]

    @property
    def name(self) -> str:
        return self.names[0]


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
class Plan(Signed, form=FORMAT):
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

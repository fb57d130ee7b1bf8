"""What a compile is asked, as one value (`fxpipe/task/model_options.py`: how the model is made). Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from fxpipe.engines import BACKENDS
from fxpipe.errors import CutError, FxpipeError, ScheduleError, near
from fxpipe.options import flags, option
from fxpipe.plan.cost_records import UNKNOWN, OptimizerCosts
from fxpipe.plan.limits import MOST_MICROBATCHES, MOST_THREADS, MOST_WORKERS
from fxpipe.plan.spec import OuterSpec
from fxpipe.planner.cuts import Cuts
from fxpipe.planner.device import Device
from fxpipe.planner.links import GLOO_LOOPBACK, NCCL_NODE, Links
from fxpipe.planner.setting import Setting
from fxpipe.planner.workers import Recomputation
from fxpipe.policy import default_for
from fxpipe.policy import make as make_policy
from fxpipe.policy.option import policy_option
from fxpipe.policy.recipe import check_shares
from fxpipe.schedule import Schedule, kind_of, of_text, schedule_text, with_replicas
from fxpipe.schedule import make as make_schedule
from fxpipe.schedule.csv_rows import NAME, EndlessRows, RowsOfText
from fxpipe.schedule.loss_scaling import FLOAT16, check_loss_scaling

if TYPE_CHECKING:
    from fxpipe.codecs.encoding import Encoding
    from fxpipe.passes.reduce import Reduce
    from fxpipe.passes.whole_loss import WholeLoss
    from fxpipe.plan.spec import PadSpec, Plan
    from fxpipe.task.batch import Batch
    from fxpipe.task.hooks import MakeScheduler, OptimizerHook
    from fxpipe.task.model_file import Task
    from fxpipe.task.padding import Pad

IN_PYTHON = "fxpipe.compile(...)"
AUTO = "auto"
"""In place of a schedule's name: the one that takes least time, see `fxpipe.search`."""

OUTER = "diloco"
"""The kind of outer steps that there is."""

DILOCO = OuterSpec(every=64, lr=0.7, momentum=0.9)
"""The outer steps of Douillard et al. 2023 (arXiv 2311.08105), more often than theirs, after 500 updates."""

SCANNED = 8
"""Batches that are read for their shapes, where nothing is asked."""

CutsMode = Literal["auto", "same", "bidirectional", "three-way"]
CostMode = Literal["measured", "analytic"]
ShardMode = Literal["optimizer"]


def compile_schedule(text: str) -> str:
    """As `schedule_text`; or 'auto'."""
    return AUTO if text == AUTO else schedule_text(text)


def not_synchronous(schedule: str) -> ScheduleError:
    """Says why a schedule is not what `synchronous` asks for."""
    return ScheduleError(
        f"schedule '{schedule}' is not synchronous: its forwards miss updates, so that it does not train exactly as "
        "one worker would",
        hint="leave the schedule out for the fastest that does, or leave --synchronous out",
    )


def options_like(plan: Plan) -> dict[str, Any]:
    """The options of a compile that go on as a plan does: what its runs and its checkpoints depend on."""
    outer = {} if plan.outer is None else {"outer": OUTER, **{f"outer_{n}": v for n, v in asdict(plan.outer).items()}}
    return {
        "schedule": "\n".join(plan.rows) if plan.schedule == NAME else plan.schedule,
        "policy": plan.policy,
        "dp": plan.dp,
        **outer,
        "replicas": plan.replicas if plan.crossing else (),
        "microbatches": plan.own_microbatches,
        "autocast": plan.autocast,
        "codec": plan.codec,
        "accept_microbatch_loss": bool(plan.differs_from_whole),
    }


def _dims(text: str) -> dict[str, int | None]:
    """`batch[0]=1,batch[1]=none` as a dictionary."""
    found: dict[str, int | None] = {}
    for part in text.split(","):
        name, _, dim = part.strip().rpartition("=")
        if not name or not (dim == "none" or dim.isdigit()):
            raise FxpipeError(f"{part.strip()!r} is not NAME=DIM", hint="such as batch[0]=1 or batch['mask']=none")
        found[name] = None if dim == "none" else int(dim)
    return found


def _replicas(text: str) -> tuple[int, ...]:
    """`2,1,1` as numbers."""
    parts = [part.strip() for part in text.split(",")]
    if not all(len(part) < 9 and part.isdecimal() and 0 < int(part) <= MOST_WORKERS for part in parts):
        raise FxpipeError(f"{text!r} is not a number of processes for each worker", hint="such as 2,1,1")
    return tuple(map(int, parts))


@dataclass(frozen=True)
class CompileOptions:
    """What a compile is asked; the fields with flags are options of `fxpipe compile`, too.

    Attributes:
        workers: how many processes a run has, each with a device. Each runs a worker, which has a stage.
        virtual: how many workers each process runs in turn: a stage for each. As the schedule has it where None.
        dp: how many replicas each worker has: processes with the same stage and the same weights, which share each
            minibatch's microbatches and add up their gradients.
        outer: 'diloco' lets replicas train apart, each on its share of every minibatch, and bring their weights
            together by outer steps (`fxpipe/runtime/worker/outer_step.py`); None adds up gradients in every step.
        outer_every, outer_lr, outer_momentum: after how many updates, and by which SGD with Nesterov momentum; where
            None, those of `DILOCO`.
        outer_delay: 1 applies the result of an exchange one outer step later, so that nothing waits for it.
        replicas: of each worker its own number of them, in place of `dp`; they share all microbatches. Only with a
            schedule that has a worker in each process and no weight gradients apart.
        shard: 'optimizer': each replica of a worker has the optimizer's state of its own share of the worker's
            parameters, and updates these alone; then the replicas hand out the new weights.
        cuts: what the planner may choose: 'same' cuts for forward and backward, 'bidirectional' ones, 'three-way' ones
            (weight gradients apart, too), or 'auto': bidirectional where they gain more than 2%. Or the cuts
            themselves, as unit numbers, instead of all choosing.
        forward_at, backward_at: module paths to cut before, one for each boundary between workers; the planner chooses
            where both are empty, and one of them alone serves both. Where both are given, a path may be repeated: a
            worker between two cuts at one place has nothing to do in that phase.
        schedule: a name of `fxpipe.schedule.SCHEDULES`, where registered ones are, too; a file in torch's format
            (`….csv`), or the text of one. 'auto': that which takes least time, with the number of microbatches and the
            cuts that it takes it with.
        synchronous: train exactly as one worker would: only schedules with a flush. `compile(…, synchronous=True)`
            without a schedule takes the fastest of them.
        policy: where None, that of `fxpipe.policy.default_for`.
        microbatches: how many make a minibatch, or, with `dp`, the share of each replica; the step is captured on one
            of them. None: a divisor of the batch near the number of workers, which is 1 for async and two workers; 1
            for async, too, where microbatches would change the loss.
        microbatch_dims: along which dimension the leaves of a batch are cut into microbatches: in the place of every
            leaf a number, or None if every microbatch gets it whole; or by the leaves' names, `batch[0]`. Found by how
            the step uses them if it is not given.
        constant_batch: tensors of the batch whose values the step reads as numbers, shapes and branches: by their
            names, `batch['grid']`, or their keys. They become constants of the build, which every batch must have.
        scan: how many batches of a model file's data are read for their shapes, each of which gets stages of its own,
            as a DataLoader's last, smaller batch does; in Python, `compile(..., shapes=…)`.
        pad: what is appended to which leaves of every batch, by their names or keys, as `{"input_ids": 0, "labels":
            -100}`: along dimension 1, or `(value, dimension)`; or a function that makes that of a batch. A model file
            says it; only with `pad_to`.
        pad_to: of what the lengths of these leaves are made multiples, before anything sees a batch; the loss is
            compared with that of batches that are not padded.
        loss_weight: `loss_weight(batch)`, how much a microbatch counts in the loss of its minibatch, and a batch in an
            evaluation: its tokens, its samples. Sums, and means over what the batch alone selects, need none.
        accept_microbatch_loss: compile even if the microbatches make another loss than the whole batch.
        codec: what packs values to cross links: 'none', a codec's name, 'auto' for int8 on just those edges whose links
            the workers wait for, or one for each kind: 'activation=int4,gradient=int8,weights=int8'.
        autocast: 'bf16' or 'fp16' captures the step under torch.autocast; for a program that is captured already it
            says nothing. With 'fp16' a run scales the loss, and the schedule has a flush.
        threads: CPU threads while measuring.
        backend: the engine of all stages' parts, or 'auto' to take for each the fastest that agrees with eager.
        cost: 'measured' on this machine or 'analytic' from shapes; measured where None, if the parameters have values.
        split_backward: let operators that make input and weight gradients in one call make them in two, so that
            cuts of weight gradients can part them; three-way planning does so anyway.
        recompute: what backwards compute again of forward instead of saving it: 'none'; what it takes to fit into
            `memory`, in the least time, with 'auto'; or with 'full' all that does not enter a worker, and can be.
        device: what 'analytic' computes for; one core of a server where None.
        links: between the workers; what this kind of device usually has where None.
        speeds, memory: of each worker, relative to the device and in bytes; equal and without limit where empty.
        optimizer: as for a run: its update is timed, its state weighed, and it is tried whether each worker may have
            its own. SGD with momentum where None.
        lr_scheduler: as for a run: it is tried with the optimizer.
        accept_optimizer_per_worker: go on where one optimizer over all parameters would train otherwise than one for
            each worker, with a warning; without one where it is only not known whether it would.
        known_costs: the `node_costs.json` of an earlier compile; used if program, device and torch are the same. What
            engines made for that compile is taken likewise.
        command: what is written into the stages' headers.
    """

    workers: int = option(
        2,
        "-n",
        "--workers",
        minimum=1,
        maximum=MOST_WORKERS,
        metavar="N",
        help="Number of processes that share the model; each has a device and trains one stage.",
    )
    dp: int = option(
        1,
        minimum=1,
        maximum=MOST_WORKERS,
        metavar="R",
        help="Number of replicas of every stage, for data parallelism; they share the microbatches of each minibatch.",
    )
    replicas: tuple[int, ...] = option(
        (),
        on_command_line=None,
        kind=_replicas,
        metavar="R,R,…",
        help="Number of replicas of each stage, such as 2,1,1; the default of --schedule is then 1f1b.",
    )
    shard: ShardMode | None = option(
        None,
        choices=get_args(ShardMode),
        help="Let each replica hold the optimizer's state of its own share of the parameters only (ZeRO stage 1).",
    )
    outer: str | None = option(
        None,
        choices=(OUTER,),
        help="Let replicas train independently and average their changes now and then, for slow links between them.",
    )
    outer_every: int | None = option(
        None, minimum=1, metavar="H", help="With --outer: average after H updates. [default: 64]"
    )
    outer_lr: float | None = option(
        None,
        kind=float,
        above=0,
        metavar="RATE",
        help="With --outer: learning rate of the step that applies an average. [default: 0.7]",
    )
    outer_momentum: float | None = option(
        None,
        kind=float,
        minimum=0,
        below=1,
        metavar="M",
        help="With --outer: Nesterov momentum of the step that applies an average. [default: 0.9]",
    )
    outer_delay: int | None = option(
        None,
        minimum=0,
        maximum=1,
        metavar="D",
        help="With --outer: 1 applies an average one such step later, so that nothing waits for it. [default: 0]",
    )
    cuts: Cuts | CutsMode = option(
        "auto",
        choices=get_args(CutsMode),
        help="Cut forward and backward at the same places, or separately; three-way: cut weight gradients separately, "
        "too.",
    )
    forward_at: Sequence[str] = option(
        (), "--fp-cut", metavar="PATH", help="Cut the forward before this module; give it once for each boundary."
    )
    backward_at: Sequence[str] = option(
        (), "--bp-cut", metavar="PATH", help="Cut the backward before this module. [default: where the forward is cut]"
    )
    virtual: int | None = option(
        None,
        minimum=1,
        maximum=MOST_WORKERS,
        metavar="V",
        help="Number of stages that each process runs in turn. [default: 1; 2 for interleaved and V schedules]",
    )
    schedule: str = option(
        "async",
        metavar="NAME|FILE.csv",
        kind=compile_schedule,
        help="Order of forwards and backwards: gpipe, 1f1b, async, …; auto takes the fastest.",
    )
    synchronous: bool = option(False, help="Train exactly as one process would: take the fastest schedule that does.")
    policy: str | None = policy_option("by schedule, microbatches and optimizer")
    microbatches: int | None = option(
        None,
        minimum=1,
        maximum=MOST_MICROBATCHES,
        metavar="M",
        help="Cut a minibatch (or a replica's share) into M pieces. [default: near -n; 1 for async with -n 2]",
    )
    microbatch_dims: Any = option(
        None,
        kind=_dims,
        metavar="NAME=DIM,…",
        help="Dimension along which a tensor of the batch is cut: batch[0]=1, or batch['mask']=none. [default: found "
        "by its use]",
    )
    constant_batch: Sequence[str] = option(
        (),
        metavar="NAME",
        help="A small tensor of the batch whose values the step reads, the same in every batch; can be repeated.",
    )
    scan: int = option(
        SCANNED,
        metavar="N",
        minimum=1,
        help="Read the first N batches of train_data() and make stages for every shape of batch among them.",
    )
    pad: Pad | None = None
    pad_to: int | None = option(
        None,
        minimum=1,
        metavar="N",
        help="Pad the lengths of batches to multiples of N; `pad` in the model file says which tensors, and with what.",
    )
    loss_weight: Callable[[Any], Any] | None = None
    accept_microbatch_loss: bool = option(
        False, help="Compile even if microbatches change the loss, as they do with a contrastive loss."
    )
    codec: str = option(
        "none",
        metavar="NAME",
        help="Compress what workers send: none, bf16, fp16, int8, int4, auto, or by kind: "
        "activation=int4,gradient=int8,weights=int8.",
    )
    autocast: str | None = option(
        None, choices=("bf16", "fp16"), help="Run the step under torch.autocast; with fp16, runs scale the loss."
    )
    threads: int | None = option(
        None,
        minimum=1,
        maximum=MOST_THREADS,
        metavar="N",
        help="CPU threads of each worker. [default: cores / processes]",
    )
    backend: str = option(
        "eager",
        choices=BACKENDS,
        help="What executes the stages; auto measures all and takes the fastest for each part.",
    )
    cost: CostMode | None = option(
        None,
        choices=get_args(CostMode),
        help="Measure the times of operators here, or compute them. [default: measured]",
    )
    split_backward: bool = False
    recompute: Recomputation = option(
        "auto",
        choices=get_args(Recomputation),
        help="What backwards compute again instead of keeping it; auto: as much as it takes to fit into --memory.",
    )
    device: Device | None = None
    links: Links | None = None
    speeds: Sequence[float] = ()
    memory: Sequence[float] = ()
    optimizer: OptimizerHook | None = None
    lr_scheduler: MakeScheduler | None = None
    accept_optimizer_per_worker: bool = option(
        False, help="Allow an optimizer that looks at all parameters at once, though each worker has its own."
    )
    known_costs: Path | None = None
    command: str = IN_PYTHON

    def __post_init__(self) -> None:
        object.__setattr__(self, "replicas", tuple(self.replicas or ()))

    @property
    def encoding(self) -> Encoding:
        """Which codecs are asked for.

        Raises:
            CodecError: there is none of that name, or it is for other edges.
        """
        from fxpipe.codecs.encoding import Encoding  # which needs torch

        return Encoding.parse(self.codec)

    @property
    def count(self) -> int:
        """How many microbatches a minibatch has, over all replicas."""
        return self.own_count * self.dp

    @property
    def own_count(self) -> int:
        """How many of them each replica does."""
        return 1 if self.microbatches is None else self.microbatches

    @property
    def joint(self) -> int:
        """How many replicas share a minibatch and its loss: those that train apart have each its own."""
        return self.dp if self.outer is None else 1

    @property
    def outer_spec(self) -> OuterSpec | None:
        """How replicas that train apart come together; None where they add up gradients.

        Raises:
            CutError: there are no replicas; or an option of outer steps makes no sense, or comes without them.
        """
        asked = {name: getattr(self, f"outer_{name}") for name in ("every", "lr", "momentum", "delay")}
        given = {name: number for name, number in asked.items() if number is not None}
        if self.outer is None:
            if given:
                raise CutError(
                    f"outer_{min(given)} is given, and no outer steps are asked for", hint=f"--outer {OUTER}"
                )
            return None
        if self.dp == 1:
            what = "and there is one" if not self.replicas else "as many of each worker"
            raise CutError(f"outer steps bring replicas together, {what}", hint="--dp R with R above 1")
        if self.shard is not None:
            raise CutError(
                f"--outer and --shard {self.shard}: replicas that train apart share nothing out",
                hint="leave one of them out",
            )
        if self.kind.late:
            raise CutError(
                f"--outer and schedule '{self.schedule}': replicas that train apart have no sums that could be late",
                hint="--schedule async",
            )
        spec = replace(DILOCO, **given)
        rates = math.isfinite(spec.lr) and spec.lr > 0 and 0 <= spec.momentum < 1
        if spec.every < 1 or not rates or spec.delay not in (0, 1):
            raise CutError(
                f"outer steps make no sense with {', '.join(f'{name}={number!r}' for name, number in given.items())}",
                hint="every at least 1, lr above 0, momentum from 0 to below 1, delay 0 or 1",
            )
        return spec

    def cut(self, batch: Batch) -> Batch:
        """A batch that is cut where it is asked; the errors are those of `Batch.along`."""
        return batch if self.microbatch_dims is None else batch.along(self.microbatch_dims)

    def padding(self, batches: Sequence[Batch]) -> tuple[PadSpec, ...]:
        """How batches are padded, as it is asked; the arguments and errors are those of `padding_of`."""
        from fxpipe.task.padding import padding_of

        return padding_of(self.pad, self.pad_to, batches)

    def whole_loss(self) -> WholeLoss | None:
        """The pass that makes the microbatches' losses the whole batch's; None for a program of whole batches."""
        from fxpipe.passes.whole_loss import WholeLoss

        count = self.own_count * self.joint
        if count == 1:
            return None
        return WholeLoss(count, weighted=self.loss_weight is not None, accepted=self.accept_microbatch_loss)

    @property
    def reduce(self) -> Reduce | None:
        """The pass that puts gradients into buckets for replicas; None where none add them up."""
        from fxpipe.passes.reduce import Reduce

        if self.processes == self.workers or self.outer is not None:
            return None
        return Reduce(self.replicas or (self.dp,) * self.stages, sharded=self.shard is not None)

    @property
    def processes(self) -> int:
        """How many a run has."""
        return sum(self.replicas) or self.workers * self.dp

    @property
    def planned(self) -> bool:
        """Whether the planner chooses the cuts."""
        return not (isinstance(self.cuts, Cuts) or self.forward_at or self.backward_at)

    @property
    def splits_backward(self) -> bool:
        """Whether operators that make input and weight gradients in one call are to make them in two."""
        return self.split_backward or self.weights_apart or (self.planned and self.cuts == "three-way")

    @property
    def recomputes(self) -> bool:
        """Whether backwards may compute forward values again to save memory."""
        limited = any(math.isfinite(memory) for memory in self.memory)
        return self.recompute == "full" or (self.recompute == "auto" and limited)

    @property
    def weights_apart(self) -> bool:
        """Whether stages make weight gradients in a function of their own: as the schedule has it."""
        return self.kind.weights_apart

    @property
    def from_file(self) -> RowsOfText | EndlessRows | None:
        """The schedule, if it is that of a file.

        Raises:
            ScheduleError: the file is wrong, or for another number of processes or microbatches than is asked.
        """
        made = of_text(self.schedule)
        if made is None:
            return None
        if made.ranks != self.workers:
            raise ScheduleError(
                f"the schedule is for {made.ranks} ranks, not {self.workers}", hint=f"compile with -n {made.ranks}"
            )
        if self.microbatches not in (None, made.microbatches):
            raise ScheduleError(
                f"the schedule is for {made.microbatches} microbatches, not {self.microbatches}",
                hint="leave out --microbatches",
            )
        if self.virtual is not None:
            raise ScheduleError("the schedule says itself how many stages a process runs", hint="leave out --virtual")
        return made

    @property
    def kind(self) -> type[Schedule]:
        """The kind of the schedule.

        Raises:
            ScheduleError: there is none of that name.
        """
        return kind_of(self.schedule)

    @property
    def placement(self) -> tuple[int, ...]:
        """The rank, which is the number of the process, of each worker.

        Raises:
            ScheduleError: the schedule cannot have so many workers on a rank.
        """
        made = self.from_file
        return self.kind.usual_placement(self.workers, self.virtual) if made is None else made.placement

    @property
    def stages(self) -> int:
        """How many there are; each has a worker."""
        return len(self.placement)

    @property
    def made_schedule(self) -> Schedule:
        """The schedule, with one microbatch where their number is not known yet.

        Raises:
            ScheduleError: an unknown name, or it cannot have so many workers.
        """
        made: Schedule | None = self.from_file
        if made is None:
            made = make_schedule(self.schedule, self.stages, self.own_count, self.placement)
        if self.replicas and self.microbatches is None:
            made = replace(made, microbatches=math.lcm(*self.replicas))
        return with_replicas(made, self.replicas)

    def for_batches(self, batches: Sequence[Batch]) -> CompileOptions:
        """With the number of microbatches decided where it is not asked: it divides all of these minibatches.

        Raises:
            BatchError: a batch cannot be cut.
        """
        if self.microbatches is not None:
            return self
        if (made := self.from_file) is not None:
            return self.of_microbatches(made.microbatches)
        kind = self.kind
        if not self.replicas and kind.usual_microbatches(self.workers, 2 * self.workers) == 1:
            return self.of_microbatches(1)  # of any batch, also of one that cannot be cut
        samples, multiple = math.gcd(*(self.cut(batch).samples for batch in batches)), math.lcm(*self.replicas)
        # What replicas cannot share is refused with the batch.
        shares, ranks = max(1, samples // (self.dp * multiple)), -(-self.processes // (self.dp * multiple))
        return self.of_microbatches(multiple * kind.usual_microbatches(ranks, shares))

    def of_microbatches(self, count: int) -> CompileOptions:
        """With so many microbatches, also in the command that makes the build again."""
        own, dashes, arguments = self.command.partition(" -- ")
        command = self.command if own == IN_PYTHON else f"{own} --microbatches {count}{dashes}{arguments}"
        return replace(self, microbatches=count, command=command)

    def for_task(self, task: Task) -> CompileOptions:
        """With what a model file and this machine decide where nothing was asked."""
        from fxpipe.threads import threads_for

        threads = threads_for(self.threads, self.processes)
        pad_to = task.hooks.pad_to if self.pad_to is None else self.pad_to
        return replace(
            self,
            microbatch_dims=task.hooks.microbatch_dims if self.microbatch_dims is None else self.microbatch_dims,
            constant_batch=self.constant_batch or task.constant_batch,
            pad=self.pad or (None if pad_to is None else task.hooks.pad),
            pad_to=pad_to,
            loss_weight=self.loss_weight or task.loss_weight,
            optimizer=self.optimizer or task.optimizer,
            lr_scheduler=self.lr_scheduler or task.hooks.lr_scheduler,
            threads=threads,
        )

    def check(self) -> None:
        """Refuse what makes no sense for any model.

        Raises:
            CutError: a word that is none of an option's choices; cuts that are both chosen and given.
            ScheduleError, PolicyError: an unknown name, or a combination that makes no sense.
        """
        for name in ("cuts", "recompute", "cost", "shard", "outer"):
            given, flag = getattr(self, name), flags(CompileOptions)[name]
            known = flag.choices
            if given not in (flag.default, *known) and not (name == "cuts" and isinstance(given, Cuts)):
                nearest = near(given, known) if isinstance(given, str) else ""
                raise CutError(f"{name}={given!r} is none of {', '.join(known)}{nearest}")
        if (self.forward_at or self.backward_at) and self.cuts != "auto":
            raise CutError(
                "cuts are chosen or pinned, not both", hint="leave out cuts=, or forward_at= and backward_at="
            )
        self._check_replicas()
        if self.synchronous and not self.kind.synchronous:
            raise not_synchronous(self.schedule)
        check_loss_scaling(self.kind, self.autocast)
        _ = self.outer_spec
        self._check_shard()
        self.setting()
        encoding = self.encoding
        if self.autocast == FLOAT16:
            encoding.check_scaled()

    def _check_replicas(self) -> None:
        """Refuse numbers of replicas that are none, or said twice.

        Raises:
            CutError: with what to give instead.
        """
        if not self.replicas:
            return
        numbers = ",".join(map(str, self.replicas))
        if not all(isinstance(count, int) and 1 <= count <= MOST_WORKERS for count in self.replicas):
            raise CutError(f"{numbers} are no numbers of replicas", hint="one for each worker, such as 2,1,1")
        if self.dp > 1:
            raise CutError(
                f"all workers have {self.dp} replicas, or each its own number ({numbers}), not both",
                hint="--dp or --replicas",
            )
        if len(self.replicas) != self.workers:
            raise CutError(
                f"{numbers} are the replicas of {len(self.replicas)} workers, there are {self.workers}",
                hint=f"-n {len(self.replicas)}",
            )
        if len(set(self.replicas)) == 1:
            raise CutError(
                f"all workers have {self.replicas[0]} replicas", hint=f"--dp {self.replicas[0]} in place of --replicas"
            )

    def _check_shard(self) -> None:
        if self.shard is None:
            return
        if self.replicas:
            numbers = ",".join(map(str, self.replicas))
            raise CutError(
                f"--shard {self.shard} is for workers with equally many replicas, not {numbers}",
                hint="--dp R in place of --replicas, or leave --shard out",
            )
        if self.dp == 1:
            raise CutError(
                f"--shard {self.shard} shares out among the replicas of a worker, and each has one",
                hint="add --dp R, or leave --shard out",
            )
        if self.autocast == FLOAT16:
            raise CutError(
                f"--shard {self.shard} and --autocast fp16: a replica sees its own gradients alone, and not whether "
                "those of others overflow",
                hint="compile with --autocast bf16, which needs no loss scale, or leave --shard out",
            )

    def setting(self, device: str = "cpu", optimizer: OptimizerCosts = UNKNOWN) -> Setting:
        """What the planner plans for.

        Args:
            device: 'cpu' or 'cuda'; says what links there usually are.
            optimizer: what it costs, and whether it has momentum (see `default_for`).

        Raises:
            ScheduleError, PolicyError: as for `check`.
        """
        schedule = self.made_schedule
        policy = make_policy(self.policy or default_for(schedule, optimizer.momentum))
        policy.check(schedule)
        if self.shard is not None:
            check_shares(policy)
        links = self.links or (NCCL_NODE if device == "cuda" else GLOO_LOOPBACK)
        speeds, memory = tuple(self.speeds), tuple(self.memory)
        return Setting(
            *(schedule.name, str(policy), schedule.microbatches, links, speeds, memory),
            optimizer_bytes=optimizer.state_bytes / (1 if self.shard is None else self.dp),
            outer_bytes=0.0 if (outer := self.outer_spec) is None else outer.kept,
            policy_times=optimizer.policy,
            placement=schedule.placement if schedule.several else (),
            rows=() if (written := self.from_file) is None else written.lines,
            recompute=self.recompute,
            dp=self.joint,
            replicas=self.replicas,
        )

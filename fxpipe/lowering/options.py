"""The options of a compile as one value (`fxpipe/task/model_options.py`: how the model is made). Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from fxpipe.engines import BACKENDS
from fxpipe.errors import FxpipeError, ScheduleError
from fxpipe.options import check, flags, option, optional
from fxpipe.plan.limits import MOST_MICROBATCHES, MOST_THREADS, MOST_WORKERS
from fxpipe.plan.mesh import OuterSpec
from fxpipe.plan.plan import Plan
from fxpipe.plan.spec import PadSpec
from fxpipe.planner.cuts import Cuts
from fxpipe.planner.device import Device
from fxpipe.planner.links import Links
from fxpipe.planner.workers import Recomputation
from fxpipe.policy import policy_option
from fxpipe.schedule import Schedule, kind_of, of_text, schedule_text, with_replicas
from fxpipe.schedule import make as make_schedule
from fxpipe.schedule.csv_rows import NAME, EndlessRows, RowsOfText
from fxpipe.threads import threads_for

if TYPE_CHECKING:
    from fxpipe.codecs.encoding import Encoding
    from fxpipe.passes.whole_loss import WholeLoss
    from fxpipe.task.batch import Batch
    from fxpipe.task.model_file import Task

IN_PYTHON = "fxpipe.compile(...)"
AUTO = "auto"
"""In place of a schedule's name: the fastest one, see `fxpipe.search`."""

OUTER = "diloco"
"""The only kind of outer steps."""

OUTER_OPTIONS = tuple(flags(OuterSpec))
"""Each is an option `outer_…`."""

SCANNED = 8
"""How many batches are read for their shapes by default."""

CutsMode = Literal["auto", "same", "bidirectional", "three-way", "given"]
CostMode = Literal["measured", "analytic"]
ShardMode = Literal["optimizer"]


def compile_schedule(text: str) -> str:
    """As `schedule_text`; or 'auto'."""
    return AUTO if text == AUTO else schedule_text(text)


def options_like(plan: Plan) -> dict[str, Any]:
    """The compile options that another compile must share with a plan: its runs and checkpoints depend on them."""
    outer = {f"outer_{name}": getattr(plan.outer, name) for name in OUTER_OPTIONS if plan.outer is not None}
    return {
        "schedule": "\n".join(plan.rows) if plan.schedule == NAME else plan.schedule,
        "policy": plan.policy,
        "dp": plan.dp,
        **({"outer": OUTER, **outer} if outer else {}),
        "replicas": plan.replicas if plan.crossing else (),
        "microbatches": plan.own_microbatches,
        "autocast": plan.precision.autocast,
        "params": plan.precision.params,
        "codec": plan.codec,
        "accept_microbatch_loss": bool(plan.step.differs_from_whole),
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


def _replicas(numbers: str | tuple[int, ...]) -> tuple[int, ...]:
    """The number of each worker's replicas, also from a text: `2,1,1`."""
    text = numbers if isinstance(numbers, str) else ",".join(map(str, numbers))
    parts = [part.strip() for part in text.split(",")] if numbers != () else []
    if not all(len(part) < 9 and part.isdecimal() and 0 < int(part) <= MOST_WORKERS for part in parts):
        raise FxpipeError(f"{text!r} is not a number of processes for each worker", hint="such as 2,1,1")
    return tuple(map(int, parts))


@dataclass(frozen=True)
class CompileOptions:
    """The options of a compile; `fxpipe compile --help-all` explains those with flags that are not listed here.

    Attributes:
        workers: how many processes a run has, each with a device. Each runs one worker, which has one stage.
        dp: how many replicas each worker has: processes with the same stage and the same weights, which share each
            minibatch's microbatches and add up their gradients.
        outer: 'diloco' lets replicas train independently, each on its share of every minibatch, and combines their
            weights in outer steps (`fxpipe/runtime/worker/outer_step.py`); None adds up gradients in every step.
        outer_every, outer_lr, outer_momentum, outer_delay: see `OuterSpec`; None takes `DILOCO`'s or `SPARSELOCO`'s.
        replicas: the number of replicas for each worker, in place of `dp`; they share all microbatches. Only with a
            schedule that has one worker in each process and does not separate weight gradients.
        cuts: what the planner may choose: 'same' cuts for forward and backward, 'bidirectional' ones, 'three-way' ones
            (separate cuts for weight gradients, too), or 'auto': bidirectional if they gain more than 2%. 'given': the
            marks of the step itself, for torch's pipeline (`pipe_split()`, `annotate_split_points`), which 'auto'
            takes, too, if there is one for each boundary between workers. Or the cuts themselves, as unit numbers; then
            nothing is chosen.
        forward_at, backward_at: module paths to cut before, one for each boundary between workers; the planner chooses
            if both are empty, and one alone is used for both. If both are given, a path may be repeated: a worker
            between two cuts at one place has nothing to do in that phase.
        schedule: a name in `fxpipe.schedule.SCHEDULES`, which includes registered ones; a file in torch's format
            (`….csv`), or the text of one. 'auto' chooses the fastest, with its number of microbatches and its cuts.
        synchronous: train exactly as one worker would: only schedules with a flush are allowed. `compile(…,
            synchronous=True)` without a schedule takes the fastest of them.
        microbatches: how many microbatches a minibatch has, or with `dp` each replica's share; the step is captured on
            one of them. None: a divisor of the batch near the number of workers, which is 1 for async with two workers;
            1 for async, too, if microbatches would change the loss.
        microbatch_dims: along which dimension the leaves of a batch are cut into microbatches: a pytree with a number
            in place of each leaf, or None if every microbatch gets the whole leaf; or a dictionary by the leaves'
            names, `batch[0]`. By default found from how the step uses the leaves.
        constant_batch: tensors of the batch whose values the step reads as numbers, shapes and branches: by their
            names, `batch['grid']`, or their keys. They become constants of the build, the same in every batch.
        scan: for a model file's data; in Python, `compile(..., shapes=…)`.
        pad: the values that are appended to leaves of every batch, by their names or keys, as `{"input_ids": 0,
            "labels": -100}`: along dimension 1, or `(value, dimension)`; or a function that returns that for a batch.
            Set in a model file; only with `pad_to`.
        pad_to: the lengths of these leaves are padded to multiples of this, before anything sees a batch; the loss is
            compared with the loss without padding.
        loss_weight: `loss_weight(batch)`, how much a microbatch counts in the loss of its minibatch, and a batch in an
            evaluation: its tokens, its samples. Sums, and means over what the batch alone selects, need none.
        codec: what compresses values on links: 'none', a codec's name, 'auto' for int8 on only the edges whose links
            the workers wait for, or one for each kind: 'activation=int4,gradient=int8,weights=int8'. Outer steps have
            the kind 'outer'.
        autocast: 'bf16' or 'fp16' captures the step under torch.autocast; no effect on a program that is already
            captured. With 'fp16' a run scales the loss, and the schedule has a flush.
        params: 'bf16' computes as `model.to(torch.bfloat16)` would, but for batch and instance norms, which keep
            float32. What is trained, sums of its gradients and the optimizer are in float32. No effect on a program
            that is already captured.
        cost: 'measured' on this machine or 'analytic' from shapes; measured where None, if the parameters have values.
        split_backward: split operators that make input and weight gradients in one call into two calls, so that cuts of
            weight gradients can separate them; three-way planning always does so.
        recompute: which forward values backwards compute again instead of saving them: 'none'; 'auto', those that let
            it fit into `memory` in the least time; 'full', all but those that enter a worker or cannot be recomputed.
        device: what 'analytic' computes for; None is one core of a server.
        links: between the workers; None is what this kind of device usually has.
        speeds, memory: of each worker, relative to the device and in bytes; empty: equal, and without limit.
        optimizer: as for a run: its update is timed, its state counted, and a trial finds whether each worker may have
            its own. None is SGD with momentum.
        lr_scheduler: as for a run: tried with the optimizer.
        hooks: what a run calls between steps, and the functions of steps, by name: a run follows what hooks change.
        accept_optimizer_per_worker: continue with a warning if one optimizer over all parameters would train
            differently from one for each worker; without a warning if this is only unknown.
        known_costs: the `node_costs.json` of an earlier compile; used if program, device and torch are the same. The
            engines' files of that compile are reused in the same way.
        command: for the stages' headers.
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
    outer_every: int | None = optional(OuterSpec, "every")
    outer_lr: float | None = optional(OuterSpec, "lr")
    outer_momentum: float | None = optional(OuterSpec, "momentum")
    outer_delay: int | None = optional(OuterSpec, "delay")
    cuts: Cuts | CutsMode = option(
        "auto",
        choices=get_args(CutsMode),
        help="Cut forward and backward alike, or separately; three-way: weight gradients, too; given: at the model's "
        "pipe_split().",
    )
    forward_at: Sequence[str] = option(
        (),
        "--fp-cut",
        metavar="MODULE",
        help="Cut the forward before this module, such as blocks.4; give it once for each boundary.",
    )
    backward_at: Sequence[str] = option(
        (),
        "--bp-cut",
        metavar="MODULE",
        help="Cut the backward before this module. [default: where the forward is cut]",
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
        metavar="NAME|FILE",
        kind=compile_schedule,
        help="async, 1f1b, gpipe, zb-h1, … or auto (the fastest): the order of forwards and backwards.",
    )
    synchronous: bool = option(
        False, help="Choose the fastest that trains as one process would; with --schedule, refuse one that does not."
    )
    policy: str | None = policy_option("by schedule, microbatches and optimizer")
    microbatches: int | None = option(
        None,
        minimum=1,
        maximum=MOST_MICROBATCHES,
        metavar="M",
        help="Cut each batch into M microbatches; workers take them in turn. [default: near the number of workers; "
        "1 for async with two]",
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
    pad: Mapping[str, Any] | Callable[[Any], Mapping[str, Any]] | None = None
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
        "activation=int4,gradient=int8,outer=sparseloco.",
    )
    autocast: str | None = option(
        None, choices=("bf16", "fp16"), help="Run the step under torch.autocast; with fp16, runs scale the loss."
    )
    params: str | None = option(
        None, choices=("bf16",), help="Compute in bfloat16; workers keep and update float32 parameters."
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
        help="What backwards compute again instead of keeping it; auto: as much as needed to fit into --memory.",
    )
    device: Device | None = None
    links: Links | None = None
    speeds: Sequence[float] = ()
    memory: Sequence[float] = ()
    optimizer: Callable[..., Any] | None = None
    lr_scheduler: Callable[..., Any] | None = None
    hooks: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    outline: bool = option(
        True,
        "--outline/--no-outline",
        help="Write calls that repeat, as those of blocks do, once: as a function of the stage.",
    )
    accept_optimizer_per_worker: bool = option(
        False, help="Allow an optimizer that looks at all parameters at once, though each worker has its own."
    )
    known_costs: Path | None = None
    command: str = IN_PYTHON

    def __post_init__(self) -> None:
        if self.replicas is None:  # as on the command line
            object.__setattr__(self, "replicas", ())
        check(self)
        _replicas(self.replicas)

    @property
    def encoding(self) -> Encoding:
        """The codecs that are asked for.

        Raises:
            CodecError: no codec has that name, or it is for other edges.
        """
        from fxpipe.codecs.encoding import Encoding  # needs torch

        return Encoding.parse(self.codec)

    @property
    def count(self) -> int:
        """The number of microbatches of a minibatch, over all replicas."""
        return self.own_count * self.dp

    @property
    def own_count(self) -> int:
        """The number of microbatches of each replica."""
        return 1 if self.microbatches is None else self.microbatches

    @property
    def joint(self) -> int:
        """How many replicas share a minibatch and its loss: one if they train independently."""
        return self.dp if self.outer is None else 1

    def cut(self, batch: Batch) -> Batch:
        """A batch, cut along the given dimensions; errors as `Batch.along`."""
        return batch if self.microbatch_dims is None else batch.along(self.microbatch_dims)

    def padding(self, batches: Sequence[Batch]) -> tuple[PadSpec, ...]:
        """How batches are padded, from the options; arguments and errors as `padding_of`."""
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
    def processes(self) -> int:
        """How many processes a run has."""
        return sum(self.replicas) or self.workers * self.dp

    def takes_marks(self, count: int) -> bool:
        """Whether the cuts are where the step itself marks so many: asked for, or as many as boundaries."""
        wanted = self.cuts == "given" or (self.planned and self.cuts == "auto")
        return wanted and 0 < count == self.stages - 1

    @property
    def planned(self) -> bool:
        """Whether the planner chooses the cuts."""
        return not (isinstance(self.cuts, Cuts) or self.cuts == "given" or self.forward_at or self.backward_at)

    @property
    def splits_backward(self) -> bool:
        """Whether operators that make input and weight gradients in one call are split into two."""
        return self.split_backward or self.kind.weights_apart or (self.planned and self.cuts == "three-way")

    @property
    def recomputes(self) -> bool:
        """Whether backwards may compute forward values again to save memory."""
        limited = any(math.isfinite(memory) for memory in self.memory)
        return self.recompute == "full" or (self.recompute == "auto" and limited)

    @property
    def from_file(self) -> RowsOfText | EndlessRows | None:
        """The schedule, if it is from a file.

        Raises:
            ScheduleError: the file is wrong, or for another number of processes or microbatches.
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
            raise ScheduleError("the schedule itself says how many stages a process runs", hint="leave out --virtual")
        return made

    @property
    def kind(self) -> type[Schedule]:
        """The kind of the schedule.

        Raises:
            ScheduleError: no schedule has that name.
        """
        return kind_of(self.schedule)

    @property
    def placement(self) -> tuple[int, ...]:
        """The rank (process number) of each worker.

        Raises:
            ScheduleError: the schedule cannot have this number of workers on a rank.
        """
        made = self.from_file
        return self.kind.usual_placement(self.workers, self.virtual) if made is None else made.placement

    @property
    def stages(self) -> int:
        """How many stages there are; each has a worker."""
        return len(self.placement)

    @property
    def made_schedule(self) -> Schedule:
        """The schedule, with one microbatch if their number is not known yet.

        Raises:
            ScheduleError: an unknown name, or it cannot have this number of workers.
        """
        made: Schedule | None = self.from_file
        if made is None:
            made = make_schedule(self.schedule, self.stages, self.own_count, self.placement)
        if self.replicas and self.microbatches is None:
            made = replace(made, microbatches=math.lcm(*self.replicas))
        return with_replicas(made, self.replicas)

    def for_batches(self, batches: Sequence[Batch]) -> CompileOptions:
        """With a number of microbatches that divides all of these minibatches, if none is given.

        Raises:
            BatchError: a batch cannot be cut.
        """
        if self.microbatches is not None:
            return self
        if (made := self.from_file) is not None:
            return self.of_microbatches(made.microbatches)
        kind = self.kind
        if not self.replicas and kind.usual_microbatches(self.workers, 2 * self.workers) == 1:
            return self.of_microbatches(1)  # works for any batch, even one that cannot be cut
        samples, multiple = math.gcd(*(self.cut(batch).samples for batch in batches)), math.lcm(*self.replicas)
        # A batch that replicas cannot share is refused when it is cut.
        shares, ranks = max(1, samples // (self.dp * multiple)), -(-self.processes // (self.dp * multiple))
        return self.of_microbatches(multiple * kind.usual_microbatches(ranks, shares))

    def of_microbatches(self, count: int) -> CompileOptions:
        """With this number of microbatches, also in the command that makes the build again."""
        own, dashes, arguments = self.command.partition(" -- ")
        command = self.command if own == IN_PYTHON else f"{own} --microbatches {count}{dashes}{arguments}"
        return replace(self, microbatches=count, command=command)

    def for_task(self, task: Task) -> CompileOptions:
        """With what a model file and this machine decide where no option is given."""
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
            hooks=task.hooks.of_run,
            threads=threads,
        )


DEFAULTS = CompileOptions()

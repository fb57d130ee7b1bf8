"""What the options of a compile mean together: which are refused, how replicas train, and the planner's setting."""

from __future__ import annotations

from dataclasses import replace

from fxpipe.errors import CutError, ScheduleError
from fxpipe.lowering.options import OUTER, OUTER_OPTIONS, CompileOptions
from fxpipe.plan.cost_records import UNKNOWN, OptimizerCosts
from fxpipe.plan.mesh import OuterSpec
from fxpipe.planner.links import GLOO_LOOPBACK, NCCL_NODE
from fxpipe.planner.setting import Setting
from fxpipe.policy import default_for, make
from fxpipe.policy.recipe import check_shares
from fxpipe.schedule.base import FLOAT16, check_loss_scaling

DILOCO = OuterSpec()
"""The outer steps of Douillard et al. 2023 (arXiv 2311.08105), which step after 500 updates, not 64."""

SPARSELOCO = OuterSpec(lr=1.0, momentum=0.0)
"""The outer steps of Sarfi et al. 2025 (arXiv 2508.15706), for codecs that carry over: their memory takes the place of
momentum."""


def check(options: CompileOptions) -> None:
    """Refuse what makes no sense for any model.

    Raises:
        CutError: cuts that are both chosen and given.
        ScheduleError, PolicyError: an unknown name, or a combination that makes no sense.
    """
    if (options.forward_at or options.backward_at) and options.cuts != "auto":
        raise CutError("cuts are chosen or pinned, not both", hint="leave out cuts=, or forward_at= and backward_at=")
    _check_replicas(options)
    if options.synchronous and not options.kind.synchronous:
        raise not_synchronous(options.schedule)
    check_loss_scaling(options.kind, options.autocast)
    if options.params and options.autocast:
        raise CutError(
            f"--params {options.params} and --autocast {options.autocast}: each says in which type the step computes",
            hint="leave out one of them",
        )
    outer_spec(options)
    _check_shard(options)
    setting_of(options)
    if options.autocast == FLOAT16:
        options.encoding.check_scaled()


def not_synchronous(schedule: str) -> ScheduleError:
    """The error for a schedule that `synchronous` does not allow."""
    return ScheduleError(
        f"schedule '{schedule}' is not synchronous: its forwards miss updates, so it does not train exactly as "
        "one worker would",
        hint="leave out the schedule, for the fastest synchronous one, or leave out --synchronous",
    )


def outer_spec(options: CompileOptions) -> OuterSpec | None:
    """How replicas that train independently combine their weights; None if they add up gradients.

    Raises:
        CutError: there are no replicas; or an option of outer steps is given without outer steps.
    """
    asked = {name: getattr(options, f"outer_{name}") for name in OUTER_OPTIONS}
    given = {name: number for name, number in asked.items() if number is not None}
    encoding = options.encoding
    sent = encoding.of_outer
    if options.outer is None:
        if given:
            raise CutError(f"outer_{min(given)} is given without --outer", hint=f"--outer {OUTER}")
        if sent:
            what = f"--codec {options.codec} is for outer steps, and there is no --outer"
            raise CutError(what, hint=f"fxpipe compile with --outer {OUTER}; fxpipe plan has no outer steps")
        return None
    if options.dp == 1:
        what = "and there is one" if not options.replicas else "the same number for each worker"
        raise CutError(f"outer steps need replicas, {what}", hint="--dp R with R above 1")
    if options.shard is not None:
        raise CutError(
            f"--outer and --shard {options.shard}: independent replicas do not shard", hint="leave out one of them"
        )
    if options.kind.late:
        raise CutError(
            f"--outer and schedule '{options.schedule}': independent replicas have no sums that could be late",
            hint="--schedule async",
        )
    return replace(SPARSELOCO if encoding.carries_over(sent) else DILOCO, codec=sent, **given)


def _check_replicas(options: CompileOptions) -> None:
    """Refuse impossible numbers of replicas, or two ways of giving them.

    Raises:
        CutError: with what to give instead.
    """
    if not options.replicas:
        return
    numbers = ",".join(map(str, options.replicas))
    if options.dp > 1:
        raise CutError(
            f"all workers have {options.dp} replicas, or each has its own number ({numbers}), not both",
            hint="--dp or --replicas",
        )
    if len(options.replicas) != options.workers:
        raise CutError(
            f"{numbers} are the replicas of {len(options.replicas)} workers, there are {options.workers}",
            hint=f"-n {len(options.replicas)}",
        )
    if len(set(options.replicas)) == 1:
        raise CutError(
            f"all workers have {options.replicas[0]} replicas", hint=f"--dp {options.replicas[0]} instead of --replicas"
        )


def _check_shard(options: CompileOptions) -> None:
    if options.shard is None:
        return
    if options.replicas:
        numbers = ",".join(map(str, options.replicas))
        raise CutError(
            f"--shard {options.shard} is for workers with equal numbers of replicas, not {numbers}",
            hint="--dp R instead of --replicas, or leave --shard out",
        )
    if options.dp == 1:
        raise CutError(
            f"--shard {options.shard} divides the optimizer's state among a worker's replicas, but each has one",
            hint="add --dp R, or leave --shard out",
        )
    if options.autocast == FLOAT16:
        raise CutError(
            f"--shard {options.shard} and --autocast fp16: a replica sees only its own gradients, not whether "
            "those of others overflow",
            hint="compile with --autocast bf16, which needs no loss scale, or leave --shard out",
        )


def setting_of(options: CompileOptions, device: str = "cpu", optimizer: OptimizerCosts = UNKNOWN) -> Setting:
    """The planner's setting.

    Args:
        device: 'cpu' or 'cuda'; decides which links are usual.
        optimizer: its costs, and whether it has momentum (see `default_for`).

    Raises:
        ScheduleError, PolicyError: as `check`.
    """
    schedule = options.made_schedule
    policy = make(options.policy or default_for(schedule, optimizer.momentum))
    policy.check(schedule)
    if options.shard is not None:
        check_shares(policy)
    return Setting(
        *(schedule.name, str(policy), tuple(options.speeds), tuple(options.memory)),
        links=options.links or (NCCL_NODE if device == "cuda" else GLOO_LOOPBACK),
        microbatches=schedule.microbatches,
        optimizer_bytes=optimizer.state_bytes / (1 if options.shard is None else options.dp),
        outer_bytes=0.0 if (outer := outer_spec(options)) is None else outer.kept,
        policy_times=optimizer.policy,
        placement=schedule.placement if schedule.several else (),
        rows=() if (written := options.from_file) is None else written.lines,
        recompute=options.recompute,
        dp=options.joint,
        replicas=options.replicas,
    )

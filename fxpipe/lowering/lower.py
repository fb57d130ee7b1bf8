"""Lowering: a captured program becomes a build, through the passes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import nn

import fxpipe
from fxpipe.build.build import Build
from fxpipe.costs.measured import MeasuredCosts
from fxpipe.costs.optimizer import optimizer_costs
from fxpipe.errors import BackendError, CutError, near
from fxpipe.ir.program import Buffer, Parameter, Program
from fxpipe.ir.program_table import table_of
from fxpipe.ir.transform import Observer, run_passes
from fxpipe.lowering.evaluation import Evaluations, capture_evaluations, with_evaluations
from fxpipe.measure.engines import choose_engines
from fxpipe.passes.analysis.edge_timings import edge_timings
from fxpipe.passes.analysis.summary import summarize
from fxpipe.plan.build_folder import ENGINES, WEIGHTS
from fxpipe.plan.spec import BufferSpec, ParameterSpec, PartSpec, Phase, Plan, StageSpec
from fxpipe.planner.build_costs import BuildCosts
from fxpipe.planner.cuts import Cuts
from fxpipe.planner.device import CPU, Device
from fxpipe.planner.links import GLOO_LOOPBACK, NCCL_NODE, Links
from fxpipe.planner.setting import Setting
from fxpipe.policy.demand import Demand
from fxpipe.schedule.check import in_flight
from fxpipe.task.batch import split, tensor_spec
from fxpipe.task.meta import are_on_meta
from fxpipe.task.model_file import MakeOptimizer, default_optimizer
from fxpipe.threads import threads as worker_threads
from fxpipe.tracing.capture import Loss, Metrics, capture

CutsMode = Literal["auto", "same", "bidirectional", "three-way"]


def compile(
    model: nn.Module,
    loss: Loss,
    batch: Any,
    *,
    microbatches: int = 1,
    autocast: str | None = None,
    evaluation: tuple[Metrics, Iterable[Any]] | None = None,
    **options: Any,
) -> Build:
    """Capture the training step, cut it, and emit each worker's stage.

    Args:
        model, loss, batch: `loss(model, batch)` is the step; `batch` is one whole minibatch.
        microbatches: how many each minibatch is cut into.
        autocast: 'bf16' for torch.autocast.
        evaluation: `metrics(model, batch)`, a dictionary of numbers and tensors of one element, and the batches, whole
            ones, that runs will evaluate on: read once here, for their shapes.
        options: workers, schedule, policy, forward_at, backward_at, cost, backend, threads, …: those of `lower`.

    Raises:
        FxpipeError: as capture and `lower`; each names the place and what to do.
    """
    program = capture(model, loss, split(batch, microbatches)[0], autocast=autocast)
    evaluations = None if evaluation is None else capture_evaluations(model, *evaluation, program.device)
    return lower(program, microbatches=microbatches, evaluations=evaluations, **options)


def lower(
    program: Program,
    *,
    workers: int = 2,
    microbatches: int = 1,
    schedule: str = "async",
    policy: str | None = None,
    forward_at: Sequence[str] = (),
    backward_at: Sequence[str] = (),
    cuts: Cuts | CutsMode = "auto",
    split_backward: bool = False,
    cost: Literal["measured", "analytic"] | None = None,
    device: Device | None = None,
    links: Links | None = None,
    speeds: Sequence[float] = (),
    memory: Sequence[float] = (),
    optimizer: MakeOptimizer = default_optimizer,
    threads: int | None = None,
    known_costs: Path | None = None,
    backend: str = "eager",
    say: Callable[[str], None] = lambda text: None,
    command: str = "fxpipe.compile(...)",
    evaluations: Evaluations | None = None,
    observers: Sequence[Observer] = (),
) -> Build:
    """Cut a captured program for `workers` and emit each worker's stage.

    Args:
        microbatches: how many make a minibatch; the program was captured on one of them.
        schedule: 'async', '1f1b' or 'gpipe'.
        policy: the schedule's own default where None.
        forward_at, backward_at: module paths to cut before; the planner chooses where both are empty.
        cuts: what the planner may choose: 'same' cuts for forward and backward, 'bidirectional' ones, 'three-way' ones
            (weight gradients apart, too), or 'auto': bidirectional where they gain more than 2%. Or the cuts
            themselves, as unit numbers, instead of all choosing.
        split_backward: let operators that make input and weight gradients in one call make them in two, so that
            cuts of weight gradients can part them; three-way planning does so anyway.
        cost: 'measured' on this machine or 'analytic' from shapes; measured where None, if the parameters have values.
        device: what 'analytic' computes for; one core of a server where None.
        links: between the workers; what this kind of device usually has where None.
        speeds, memory: of each worker, relative to the device and in bytes; equal and without limit where empty.
        optimizer: as for a run: its update is timed, its state weighed.
        threads: CPU threads while measuring.
        known_costs: the `node_costs.json` of an earlier compile; used if program, device and torch are the same. What
            engines made for that compile is taken likewise.
        backend: the engine of all stages' parts, or 'auto' to take for each the fastest that agrees with eager.
        say: is told which part is being put onto engines.
        command: what is written into the stages' headers.
        evaluations: what `capture_evaluations` made of the validation hooks; they are cut where the weights will lie.

    Raises:
        CutError: the cuts asked for are impossible, or nothing fits into memory.
        ScheduleError, PolicyError: an unknown name, or a combination that makes no sense.
        BackendError: the engine asked for is not there, cannot run a part, or computes something else; or costs or
            engines are to be measured where parameters have no values (`fxpipe.task.meta`).
    """
    from fxpipe import policy as policies
    from fxpipe import schedule as schedules
    from fxpipe.passes import Options, default_passes

    chosen = schedules.make(schedule, workers, microbatches)
    chosen_policy = policies.make(policy or policies.default_for(chosen))
    chosen_policy.check(chosen)
    meta = are_on_meta([program.values[p.node] for p in program.parameters])
    cost = cost or ("analytic" if meta else "measured")
    _check_choices(cuts, bool(forward_at or backward_at), cost)
    if meta:
        _check_needs_no_values(cost, backend)
    links = links or (NCCL_NODE if program.device == "cuda" else GLOO_LOOPBACK)
    kept: list[MeasuredCosts] = []
    given = cuts if isinstance(cuts, Cuts) else None
    planned = given is None and not forward_at and not backward_at
    with worker_threads(threads, 1):
        of_optimizer = optimizer_costs(
            trained(program), optimizer, timed=cost == "measured", bandwidth=(device or CPU).bandwidth
        )
    options = Options(
        workers=workers,
        forward_at=tuple(forward_at),
        backward_at=tuple(backward_at),
        cuts=given,
        mode=cuts if isinstance(cuts, str) else "auto",
        setting=Setting(
            chosen.name, str(chosen_policy), microbatches, links, tuple(speeds), tuple(memory), of_optimizer.state_bytes
        ),
        update_seconds_per_byte=of_optimizer.seconds_per_byte,
        split_backward=split_backward or (planned and cuts == "three-way"),
        cost=cost,
        device=device or CPU,
        threads=threads,
        known=known_costs,
        keep=kept.append,
        command=command,
    )
    program = run_passes(program, default_passes(options), observers)
    plan = _plan(program, chosen.name, str(chosen_policy), microbatches)
    held, demand = in_flight(chosen), Demand(plan, chosen, chosen_policy)
    rows: tuple[Parameter | Buffer, ...] = (*program.parameters, *program.buffers)
    tensors = {row.names[0]: program.values[row.node] for row in rows if not program.values[row.node].is_meta}
    build = Build(
        plan=plan,
        files=program.files,
        tensors={name: t.detach().clone() for name, t in tensors.items()},
        costs=BuildCosts(
            workers=tuple(summarize(program, plan, held, demand, of_optimizer.seconds_per_byte)),
            timings=edge_timings(program),
            partitions=program.partitions,
            links=links,
            speeds=tuple(speeds),
            optimizer_bytes=of_optimizer.state_bytes,
        ),
        profile=program.profile,
        nodes=table_of(program, plan),
        node_costs=kept[-1].to_json() if kept else None,
        warnings=(
            *program.warnings,
            *([of_optimizer.doubt] if of_optimizer.doubt else []),
            *(_idle(plan) if planned else ()),
        ),
    )
    if evaluations is not None:
        build = with_evaluations(build, evaluations, command)
    if backend == "eager":
        return build
    leaves = {b.leaf.name: program.example[b.node] for b in program.batch if b.node}
    known = known_costs.parent / ENGINES if known_costs else None
    return choose_engines(build, leaves, backend=backend, threads=threads, known=known, say=say)


def _check_choices(cuts: Any, pinned: bool, cost: str) -> None:
    modes = get_args(CutsMode)
    if not isinstance(cuts, Cuts) and cuts not in modes:
        near_text = near(cuts, modes) if isinstance(cuts, str) else ""
        raise CutError(f"cuts={cuts!r} is neither Cuts nor one of {', '.join(modes)}{near_text}")
    if pinned and cuts != "auto":
        raise CutError("cuts are chosen or pinned, not both", hint="leave out cuts=, or forward_at= and backward_at=")
    if cost not in ("measured", "analytic"):
        raise CutError(f"cost={cost!r} is neither 'measured' nor 'analytic'")


def _check_needs_no_values(cost: str, backend: str) -> None:
    without = "parameters on the meta device have no values"
    if cost == "measured":
        raise BackendError(f"cost='measured' runs the step, but {without}", hint="use cost='analytic'")
    if backend != "eager":
        raise BackendError(
            f"backend={backend!r} is tried on the stages, but {without}",
            hint="compile with backend='eager'; a run of the build can take another engine",
        )


def trained(program: Program) -> list[tuple[str, torch.Tensor]]:
    """The trained parameters, under their first names."""
    return [(p.names[0], program.values[p.node]) for p in program.parameters if p.trained]


def _idle(plan: Plan) -> tuple[str, ...]:
    idle = [
        k
        for k, s in enumerate(plan.stages)
        if all(first == end for first, end in (s.forward_units, s.backward_units, s.weight_units))
    ]
    if not idle:
        return ()
    workers = f"workers {', '.join(map(str, idle))} have" if len(idle) > 1 else f"worker {idle[0]} has"
    return (f"{workers} nothing to do: on these links more workers make nothing faster",)


def _plan(program: Program, schedule: str, policy: str, microbatches: int) -> Plan:
    assert program.cuts is not None
    cuts = program.cuts
    stages = tuple(
        StageSpec(
            file=s.file,
            digest=hashlib.sha256(s.source.encode()).hexdigest(),
            forward_units=(cuts.forward[s.worker], cuts.forward[s.worker + 1]),
            backward_units=(cuts.backward[s.worker], cuts.backward[s.worker + 1]),
            weight_units=(cuts.weights[s.worker], cuts.weights[s.worker + 1]),
            forward=s.parts["F"].spec,
            backward=s.parts["B"].spec,
        )
        for s in program.stages
    )
    loss_worker = next(k for k, s in enumerate(stages) if s.forward.loss)
    return Plan(
        fxpipe=fxpipe.__version__,
        torch=torch.__version__.split("+")[0],
        model_file=None,
        sources={},
        workers=cuts.workers,
        microbatches=microbatches,
        schedule=schedule,
        policy=policy,
        autocast=program.autocast,
        device=program.device,
        batch=tuple(b.leaf for b in program.batch),
        batch_spec=program.batch_spec,
        units=program.units,
        loss_worker=loss_worker,
        parameters=_parameters(program, stages),
        buffers=_buffers(program, stages),
        edges=program.edges,
        stages=stages,
        weights_file=WEIGHTS,
        weights_digest="",
        meta=are_on_meta([program.values[p.node] for p in program.parameters]),
    )


def _parameters(program: Program, stages: Sequence[StageSpec]) -> tuple[ParameterSpec, ...]:
    readers: dict[str, list[tuple[int, Phase]]] = {}
    owners: dict[str, int] = {}
    for k, stage in enumerate(stages):
        for phase, part in _parts(stage):
            for name in part.weights:
                readers.setdefault(name, []).append((k, phase))
        owners.update(dict.fromkeys(stage.backward.gradients, k))
    rows = []
    for p in program.parameters:
        name = p.names[0]
        read = tuple(readers.get(name, ()))
        owner = owners.get(name, read[0][0] if read else 0)  # frozen: its first reader, or worker 0, keeps it
        rows.append(ParameterSpec(p.names, tensor_spec(program.values[p.node]), owner, p.trained, read))
    return tuple(rows)


def _buffers(program: Program, stages: Sequence[StageSpec]) -> tuple[BufferSpec, ...]:
    workers: dict[str, list[int]] = {}
    homes: dict[str, int] = {}
    for k, stage in enumerate(stages):
        for _, part in _parts(stage):
            for name in part.buffers:
                if k not in workers.setdefault(name, []):
                    workers[name].append(k)
        homes.update(dict.fromkeys(stage.forward.updates, k))
    rows = []
    for b in program.buffers:
        name = b.names[0]
        home = homes.get(name)
        held = tuple(workers.get(name, ())) or ((home if home is not None else 0),)
        spec = tensor_spec(program.values[b.node])
        rows.append(BufferSpec(b.names, spec, b.persistent and not b.constant, home, held))
    return tuple(rows)


def _parts(stage: StageSpec) -> tuple[tuple[Phase, PartSpec], ...]:
    return (("F", stage.forward), ("B", stage.backward))

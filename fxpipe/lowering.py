"""Lowering: a captured program becomes a build, through the passes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import nn

import fxpipe
from fxpipe.batch import split, tensor_spec
from fxpipe.build import Build
from fxpipe.folder import WEIGHTS
from fxpipe.plan import BufferSpec, EdgeSpec, ParameterSpec, PartSpec, Phase, Plan, StageSpec
from fxpipe.program import Buffer, Parameter, Program
from fxpipe.runtime.demand import Demand
from fxpipe.summary import summarize
from fxpipe.tracing import Loss, capture
from fxpipe.transform import Observer, run_passes


def compile(
    model: nn.Module, loss: Loss, batch: Any, *, microbatches: int = 1, autocast: str | None = None, **options: Any
) -> Build:
    """Capture the training step, cut it, and emit each worker's stage.

    Args:
        model, loss, batch: `loss(model, batch)` is the step; `batch` is one whole minibatch.
        microbatches: how many each minibatch is cut into.
        autocast: 'bf16' for torch.autocast.
        options: workers, schedule, policy, forward_at, backward_at, cost, threads, …: those of `lower`.

    Raises:
        FxpipeError: as capture and `lower`; each names the place and what to do.
    """
    program = capture(model, loss, split(batch, microbatches)[0], autocast=autocast)
    return lower(program, microbatches=microbatches, **options)


def lower(
    program: Program,
    *,
    workers: int = 2,
    microbatches: int = 1,
    schedule: str = "async",
    policy: str | None = None,
    forward_at: Sequence[str] = (),
    backward_at: Sequence[str] = (),
    cost: Literal["measured", "analytic"] = "measured",
    threads: int | None = None,
    command: str = "fxpipe.compile(...)",
    observers: Sequence[Observer] = (),
) -> Build:
    """Cut a captured program for `workers` and emit each worker's stage.

    Args:
        microbatches: how many make a minibatch; the program was captured on one of them.
        schedule: 'async', '1f1b' or 'gpipe'.
        policy: the schedule's own default where None.
        forward_at, backward_at: module paths to cut before; balanced where empty.
        cost: 'measured' on this machine or 'analytic' from shapes.
        threads: CPU threads while measuring.
        command: what is written into the stages' headers.

    Raises:
        CutError: the cuts asked for are impossible.
        ScheduleError, PolicyError: an unknown name, or a combination that makes no sense.
    """
    from fxpipe import policy as policies
    from fxpipe import schedule as schedules
    from fxpipe.passes import Options, default_passes

    chosen = schedules.make(schedule, workers, microbatches)
    chosen_policy = policies.make(policy or policies.default_for(chosen))
    chosen_policy.check(chosen)
    options = Options(workers, tuple(forward_at), tuple(backward_at), cost, threads, command)
    program = run_passes(program, default_passes(options), observers)
    plan = _plan(program, chosen.name, chosen_policy.name, microbatches)
    in_flight = schedules.check(chosen, minibatches=2 * workers + 2).in_flight
    rows: tuple[Parameter | Buffer, ...] = (*program.parameters, *program.buffers)
    tensors = {row.names[0]: program.values[row.node] for row in rows}
    return Build(
        plan=plan,
        files=program.files,
        tensors={name: t.detach().clone() for name, t in tensors.items()},
        workers=tuple(summarize(program, plan, in_flight, Demand(plan, chosen, chosen_policy))),
        warnings=program.warnings,
    )


def _plan(program: Program, schedule: str, policy: str, microbatches: int) -> Plan:
    assert program.cuts is not None
    cuts = program.cuts
    stages = tuple(
        StageSpec(
            file=f"stage_{s.worker}.py",
            digest=hashlib.sha256(program.files[f"stage_{s.worker}.py"].encode()).hexdigest(),
            forward_units=(cuts.forward[s.worker], cuts.forward[s.worker + 1]),
            backward_units=(cuts.backward[s.worker], cuts.backward[s.worker + 1]),
            forward=s.forward.spec,
            backward=s.backward.spec,
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
        edges=_edges(program),
        stages=stages,
        weights_file=WEIGHTS,
        weights_digest="",
    )


def _edges(program: Program) -> tuple[EdgeSpec, ...]:
    """Every edge once, in the order in which they are sent."""
    return tuple(dict.fromkeys(program.wires[n.name] for n in program if n.name in program.wires))


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

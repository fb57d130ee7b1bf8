"""The plan of a program whose stages are emitted: what a run must know about it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

import fxpipe
from fxpipe.ir.program import Program, value
from fxpipe.plan.build_folder import WEIGHTS
from fxpipe.plan.plan import BufferSpec, LossSpec, ParameterSpec, Plan, PrecisionSpec, WeightsSpec
from fxpipe.plan.spec import LOSS_WEIGHT, Phase, StageSpec, StepSpec
from fxpipe.planner.setting import Setting
from fxpipe.precision import precision_flags
from fxpipe.schedule import lines_of
from fxpipe.task.batch import tensor_spec
from fxpipe.task.meta import are_on_meta


def make_plan(program: Program, setting: Setting) -> Plan:
    """The plan of an emitted program; `Build.save` adds what concerns the folder.

    The setting has the default schedule, policy and number of microbatches of its runs.
    """
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
            weights=s.parts["W"].spec if "W" in s.parts else None,
            again=program.again[s.worker].values if program.again else (),
            buckets=program.buckets[s.worker] if program.buckets else (),
        )
        for s in program.stages
    )
    step = StepSpec(
        tuple(b.leaf for b in program.batch),
        program.batch_spec,
        program.edges,
        stages,
        units=program.units,
        differs_from_whole=program.differs_from_whole,
        whole_numbers=program.whole_numbers,
    )
    loss = LossSpec(
        next(k for k, s in enumerate(stages) if s.forward.loss),
        program.loss_of_microbatches,
        program.batch_norm,
        weighted=any(b.leaf.name == LOSS_WEIGHT for b in program.batch),
    )
    return Plan(
        fxpipe=fxpipe.__version__,
        torch=torch.__version__.split("+")[0],
        microbatches=setting.microbatches * setting.dp,
        schedule=setting.schedule,
        policy=str(setting.policy),
        precision=PrecisionSpec(program.autocast, program.params, precision_flags(program.device)),
        device=program.device,
        steps=(step,),
        loss=loss,
        parameters=_parameters(program, stages),
        buffers=_buffers(program, stages),
        weights=WeightsSpec(WEIGHTS, meta=are_on_meta([program.values[p.node] for p in program.parameters])),
        placement=setting.placement,
        rows=lines_of(setting.schedule_of(len(stages))),
        replicas=program.replicas,
    ).watching(program.watched)


def _parameters(program: Program, stages: Sequence[StageSpec]) -> tuple[ParameterSpec, ...]:
    readers: dict[str, list[tuple[int, Phase]]] = {}
    owners: dict[str, int] = {}
    for k, stage in enumerate(stages):
        for phase, part in stage.parts.items():
            for name in part.weights:
                readers.setdefault(name, []).append((k, phase))
        owners.update(dict.fromkeys(stage.gradients, k))
    placeholders = {node.name: node for node in program.graph.find_nodes(op="placeholder")}
    rows = []
    for p in program.parameters:
        name = p.names[0]
        read = tuple(readers.get(name, ()))
        owner = owners.get(name, read[0][0] if read else 0)  # frozen: its first reader, or worker 0, keeps it
        spec, read_as = tensor_spec(program.values[p.node]), tensor_spec(value(placeholders[p.node])).dtype
        cast = None if read_as == spec.dtype else read_as
        attributes = dict(program.attributes.get(name, {}))
        rows.append(
            ParameterSpec(p.names, spec, owner, p.trained, read, cast, attributes, p.saved or p.names, p.packed)
        )
    return tuple(rows)


def _buffers(program: Program, stages: Sequence[StageSpec]) -> tuple[BufferSpec, ...]:
    workers: dict[str, list[int]] = {}
    homes: dict[str, int] = {}
    for k, stage in enumerate(stages):
        for part in stage.parts.values():
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
        rows.append(BufferSpec(b.names, spec, () if b.constant else b.saved, home, held))
    return tuple(rows)

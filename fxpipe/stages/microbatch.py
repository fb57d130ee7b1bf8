"""What the parts of a build are called with: one microbatch through the emitted stages, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from fxpipe.ir.program import copy_graph
from fxpipe.plan.spec import BufferSpec, ParameterSpec, PartSpec, Phase, Plan
from fxpipe.stages.comm import Replay
from fxpipe.stages.loaded import LoadedStage
from fxpipe.stages.pure_part import PurePart


@dataclass(frozen=True)
class PartCall:
    """What a part is called with: arguments, and by edge what it receives."""

    weights: tuple[Tensor, ...]
    buffers: tuple[Tensor, ...]
    third: list[Any]
    received: Mapping[str, Tensor]


def run_part(part: PurePart, function: Callable[..., Any], call: PartCall, seed: int | None = None) -> list[Tensor]:
    """What a stage's function, or an engine in its place, returns and sends, in the order of the part's outputs.

    Args:
        seed: of torch's generators, for masks; they go on from where they are where None.
    """
    if seed is not None:
        torch.manual_seed(seed)
    comm = Replay(dict(call.received))
    return flat(part, function(call.weights, call.buffers, list(call.third), comm), comm.sent)


def run_exactly(part: PurePart, call: PartCall, seed: int | None = None) -> list[Tensor]:
    """The same by the part's graph in float64, where exact values are a billion times nearer."""
    if seed is not None:
        torch.manual_seed(seed)
    received = (call.received[row.name] for row in part.inputs if row.kind == "received")
    given = (*call.weights, *call.buffers, *call.third, *received)
    masks = [draw(part.device) for draw in part.draws]
    graph = copy_graph(part.graph.graph)
    for node in graph.nodes:
        node.args, node.kwargs = pytree.tree_map_only(torch.dtype, _wide_type, (node.args, node.kwargs))
    module = fx.GraphModule(part.graph, graph)
    for node in graph.nodes:
        if node.op == "get_attr":
            setattr(module, node.target, _wide(getattr(module, node.target)))
    return list(module(*map(_wide, given), *map(_wide, masks)))


def _wide_type(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype.is_floating_point else dtype


def _wide(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def flat(part: PurePart, result: Any, sent: Mapping[str, Tensor]) -> list[Tensor]:
    """What a stage's function returned and sent, in the order of the part's outputs."""
    if part.phase == "B":
        values = list(result)
    else:
        loss, updates, saved = result
        values = [*([] if loss is None else [loss]), *updates, *saved]
    return [*values, *(sent[o.name] for o in part.outputs if o.kind == "sent")]


def record_calls(
    plan: Plan, stages: Sequence[LoadedStage], tensors: Mapping[str, Tensor], leaves: Mapping[str, Any]
) -> dict[tuple[int, Phase], PartCall]:
    """What each part is called with in one microbatch of initial weights: the stages run one after the other."""
    given: dict[str, Tensor] = {}
    rows: tuple[ParameterSpec | BufferSpec, ...] = (*plan.parameters, *plan.buffers)
    for row in rows:
        value = tensors[row.name].to(plan.device)
        given.update(dict.fromkeys(row.names, value))
    box = Replay({})
    box.sent = box.received  # what is sent lies ready
    calls: dict[tuple[int, Phase], PartCall] = {}
    kept: list[list[Any]] = []

    def call(worker: int, phase: Phase, part: PartSpec, third: Sequence[Any]) -> PartCall:
        weights = tuple(given[n] for n in part.weights)
        buffers = tuple(given[n] for n in part.buffers)
        made = PartCall(weights, buffers, list(third), {n: box.received[n] for n in part.receives})
        calls[worker, phase] = made
        return made

    torch.manual_seed(0)
    for worker, (stage, spec) in enumerate(zip(stages, plan.stages, strict=True)):
        made = call(worker, "F", spec.forward, [leaves[n] for n in spec.forward.batch])
        kept.append(list(stage.forward(made.weights, made.buffers, list(made.third), box)[2]))
    for worker, (stage, spec) in reversed(list(enumerate(zip(stages, plan.stages, strict=True)))):
        made = call(worker, "B", spec.backward, kept[worker])
        stage.backward(made.weights, made.buffers, list(made.third), box)
    return calls

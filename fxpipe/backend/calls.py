"""What the parts of a build are called with: one microbatch through the emitted stages, one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxpipe.plan import BufferSpec, ParameterSpec, PartSpec, Phase, Plan
from fxpipe.runtime.loaded_stage import LoadedStage


@dataclass(frozen=True)
class PartCall:
    """What a part is called with: arguments, and by edge what it receives."""

    weights: tuple[Tensor, ...]
    buffers: tuple[Tensor, ...]
    third: list[Any]
    received: Mapping[str, Tensor]


class Replay:
    """A `comm` on which everything has arrived; keeps what is sent."""

    def __init__(self, received: dict[str, Tensor]) -> None:
        self.received = received
        self.sent: dict[str, Tensor] = {}

    def recv(self, name: str) -> Tensor:
        return self.received[name]

    def send(self, name: str, value: Tensor) -> None:
        self.sent[name] = value


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

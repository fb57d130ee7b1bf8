"""What a walk over a stage's code says it holds is what its code holds when it runs."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from cached import captured, cuts, lowered, passed
from small_models import CASES
from torch import Tensor
from torch.utils import _pytree as pytree

from fxpipe.costs.allocations import TrackedAllocations
from fxpipe.passes.analysis.liveness import part_memories
from fxpipe.stages.loaded import load_stages
from fxpipe.stages.part_call import ReadyComm

QUICK = ("gpt", "conv", "checkpoint")
SCHEDULES = {"B and W together": "1f1b", "weight gradients apart": "zb-h1"}


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
@pytest.mark.parametrize("shift", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_the_walk_is_what_the_code_holds(name: str, schedule: str, shift: int) -> None:
    case, _, program = captured(name)
    options: dict[str, Any] = {"workers": 3, "schedule": schedule, **cuts(case, 3, shift)}
    build = lowered(name, **options)
    done = passed(program, **options)
    functions = load_stages(build.plan, build.files)
    state = {n: tensor.clone() for n, tensor in build.tensors.items()}
    leaves = {b.leaf.name: done.example[b.node] for b in done.batch if b.node}
    messages: dict[str, Tensor] = {}
    left: list[list[Any]] = [[], [], []]
    held = [{part.phase: part for part in part_memories(stage)} for stage in done.stages]
    order = [(w, "F") for w in range(3)] + [(w, phase) for phase in ("B", "W") for w in (2, 1, 0)]
    for worker, phase in order:
        if phase not in held[worker]:
            continue
        spec = build.plan.stages[worker].part(phase)  # type: ignore[arg-type]
        outside = [*(state[n] for n in spec.weights), *(state[n] for n in spec.buffers)]
        comm = ReadyComm({n: messages.pop(n).clone() for n in spec.receives})
        third = left[worker] if phase != "F" else tuple(leaves[n].clone() for n in spec.batch)
        with TrackedAllocations() as memory, torch.no_grad():
            for tensor in outside:
                tensor.view(-1)
            for tensor in [*comm.received.values(), *third]:
                tensor.detach()
            known, begin = _bytes(outside), memory.live
            arrived = [weakref.ref(tensor) for tensor in [*comm.received.values(), *third]]
            received, comm.received = comm.received, _Once(comm.received)
            del received, tensor
            weights, buffers = (tuple(state[n] for n in names) for names in (spec.weights, spec.buffers))
            result = functions[worker].functions[phase](weights, buffers, third, comm)  # type: ignore[index]
            found = memory.peak - known
        expected = held[worker][phase]  # type: ignore[index]
        assert begin - known == expected.taken + expected.received + expected.batch
        assert found == expected.peak, (worker, phase)
        there = [t for t in [*outside, *(ref() for ref in arrived)] if t is not None]
        made = [t for t in pytree.tree_leaves((result, comm.sent)) if isinstance(t, Tensor)]
        assert _bytes([*there, *made]) - _bytes(there) == expected.results
        assert max(expected.results, found - expected.arguments) <= expected.inside <= found
        left[worker] = list(result[2]) if phase == "F" else list(result) if spec.deferred else []
        for n, value in zip(spec.updates, result[1] if phase == "F" else (), strict=False):
            state[n] = value
        messages |= comm.sent
        del result, comm, there, made


class _Once(dict[str, Tensor]):
    """What was received, handed out once, as a transport does."""

    def __getitem__(self, name: str) -> Tensor:
        return self.pop(name)


def _bytes(tensors: list[Tensor]) -> int:
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def test_what_is_taken_is_what_was_left() -> None:
    for name in CASES:
        for stage in passed(captured(name)[2], workers=2, schedule="zb-h1").stages:
            forward, backward, weights = part_memories(stage)
            assert (backward.taken, weights.taken) == (forward.left, backward.left)
            assert forward.taken == weights.left == 0

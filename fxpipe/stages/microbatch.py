"""Runs one microbatch through all stages of a build in this process, as a reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fxpipe.codecs import is_without_codecs
from fxpipe.plan.packing import Layout
from fxpipe.plan.plan import Plan
from fxpipe.plan.spec import Phase
from fxpipe.stages.loaded import LoadedStage
from fxpipe.stages.part_call import Function, PartCall, PartResult


def run_microbatch(
    plan: Plan,
    functions: Callable[[int, Phase], Function],
    state: dict[str, Tensor],
    leaves: Mapping[str, Any],
    *,
    seed: int | None = None,
    packed: bool = True,
) -> Iterator[tuple[PartCall, PartResult]]:
    """Run every part once: the forwards from the first worker to the last, the backwards from the last to the first.

    Separate weight gradients (W) come after these, also from the last worker to the first.

    Args:
        functions: returns the function of a worker's phase; called right before that function.
        state: weights and buffers by their first names, on the plan's device; buffers are replaced in it.
        leaves: the leaves of the batch by name.
        seed: of torch's generators at each call; None leaves them as they are.
        packed: whether messages have the memory layout of received ones; False for dtypes that differ from the plan's.

    Raises:
        RunError: a part sends a value of another shape or type than the plan's.
    """
    layouts = {e.name: Layout(e.tensor if is_without_codecs() else e.sent, e.name) for e in plan.edges}
    types = {p.name: getattr(torch, p.cast) for p in plan.parameters if p.cast}
    messages: dict[str, Tensor] = {}
    left: list[list[Any]] = [[] for _ in range(plan.workers)]
    forwards: list[tuple[int, Phase]] = [(worker, "F") for worker in range(plan.workers)]
    backwards: list[tuple[int, Phase]] = [(worker, "B") for worker in reversed(range(plan.workers))]
    apart: list[tuple[int, Phase]] = [(worker, "W") for worker, _ in backwards] if plan.weights_apart else []
    for worker, phase in (*forwards, *backwards, *apart):
        spec = plan.stages[worker].part(phase)
        call = PartCall(
            worker=worker,
            phase=phase,
            spec=spec,
            weights=tuple(state[name].to(types[name]) if name in types else state[name] for name in spec.weights),
            buffers=tuple(state[name] for name in spec.buffers),
            third=tuple(leaves[name] for name in spec.batch) if phase == "F" else tuple(left[worker]),
            received={name: messages.pop(name) for name in spec.receives},
        )
        result = call.run(functions(worker, phase), seed)
        left[worker] = result.saved if phase == "F" else result.deferred
        for name, value in result.sent.items():
            messages[name] = layouts[name](value) if packed else value
        state.update(zip(spec.updates, result.updates, strict=True))
        yield call, result


def record_calls(
    plan: Plan, stages: Sequence[LoadedStage], tensors: Mapping[str, Tensor], leaves: Mapping[str, Any]
) -> dict[tuple[int, Phase], PartCall]:
    """The arguments of each part in a first microbatch with the initial weights; torch's generators are seeded."""
    state = {name: tensor.to(plan.device) for name, tensor in tensors.items()}
    torch.manual_seed(0)
    ran = run_microbatch(plan, lambda worker, phase: stages[worker].functions[phase], state, leaves)
    return {(call.worker, call.phase): call for call, _ in ran}

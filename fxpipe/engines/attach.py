"""Puts a worker's stage onto engines, and compares the first action of each with the emitted code."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fxpipe import engines as backends
from fxpipe.codecs import without_codecs
from fxpipe.engines.engine import EnginePart
from fxpipe.errors import BackendError, FxpipeError, first_line
from fxpipe.messages import say
from fxpipe.plan.plan import Plan
from fxpipe.plan.spec import PartSpec, Phase
from fxpipe.precision import cudnn_takes_tf32
from fxpipe.random_state import random_state, set_random_state
from fxpipe.stages.compare import TOLERANCE, Expected, compare, rounding_alone, tolerance
from fxpipe.stages.loaded import LoadedStage
from fxpipe.stages.part_call import Function, PartCall, ReadyComm
from fxpipe.stages.pure_function import in_float64, receive, send
from fxpipe.stages.pure_part import trace_stage

ON_ENGINES: tuple[Phase, Phase] = ("F", "B")
"""The phases that engines run; the emitted code makes separate weight gradients (W)."""

USE_EAGER = "run with --backend eager, or compile with --backend auto, which uses an engine only where it works"


def equip(
    plan: Plan, worker: int, stage: LoadedStage, engines: tuple[str, str], cache: Path, device: str
) -> LoadedStage:
    """The stage with its forward and backward on the named engines; 'eager' is the emitted code itself.

    The emitted code makes separate weight gradients (W). Engines keep what they build in `cache`.
    """
    if engines == ("eager", "eager"):
        return stage
    functions = dict(stage.functions)
    for part, name in zip(trace_stage(plan, worker, stage, ON_ENGINES), engines, strict=True):
        if name == "eager":
            continue
        chosen = backends.make(name)
        reason = chosen.missing(torch.device(device).type)
        if reason:
            raise BackendError(f"{name} cannot run {part.name}: {reason}", hint=USE_EAGER)
        spec = plan.stages[worker].part(part.phase)
        engine_part = EnginePart(part, chosen, cache, say)
        functions[part.phase] = CheckedPart(engine_part, spec, stage.functions[part.phase])
    return replace(stage, functions=functions, engines=engines)


def engines_of(plan: Plan, worker: int, backend: str | None) -> tuple[str, str]:
    """The engines of a stage's forward and backward: the plan's, or `backend` for both."""
    if backend is None or backend == "auto":
        return plan.stages[worker].engines
    if backend != "eager":
        backends.make(backend)
    return (backend, backend)


class CheckedPart:
    """A part on an engine. Its first call is compared with a call of the emitted code on the same values.

    Both run without codecs, on unpacked values: a codec can turn a rounding difference into a whole quantization step,
    and must change its state only once, by the message that is then sent.
    """

    def __init__(self, part: EnginePart, spec: PartSpec, emitted: Function) -> None:
        self.part = part
        self._spec = spec
        self._emitted: Function | None = emitted

    def __call__(self, weights: Sequence[Any], buffers: Sequence[Any], third: Any, comm: Any) -> Any:
        if self._emitted is None:
            return self.part(weights, buffers, third, comm)
        emitted, self._emitted = self._emitted, None
        part = self.part.part
        received = {name: receive(part, name, comm) for name in self._spec.receives}
        held_back = ReadyComm(received, comm.one_draw)
        with without_codecs():
            returned = self._compared(emitted, weights, buffers, third, held_back)
        for name, value in held_back.sent.items():
            send(part, name, value, comm)
        for name, bucket in held_back.handed.items():
            getattr(comm, bucket.call)(name, list(bucket.gradients))
        return returned

    def _compared(
        self, emitted: Function, weights: Sequence[Any], buffers: Sequence[Any], third: Any, held_back: ReadyComm
    ) -> Any:
        """What the engine returns, after the comparison; `held_back` takes what it sends and adds up."""
        part, held = self.part.part, (tuple(weights), tuple(buffers), tuple(third))
        call = PartCall(part.worker, part.phase, self._spec, *held, held_back.received)
        state = random_state()
        try:
            returned = self.part(weights, buffers, third, held_back)
        except FxpipeError:
            raise
        except Exception as error:
            raise BackendError(
                f"{self.part.engine} fails on {part.name}: {type(error).__name__}: {first_line(error)}", hint=USE_EAGER
            ) from error
        after = random_state()
        set_random_state(state)
        expected = call.run(self.part.judge(emitted), one_draw=held_back.one_draw).flat()

        def exact() -> list[Tensor]:
            set_random_state(state)
            return call.run(self.part.judge(in_float64(part)), one_draw=held_back.one_draw).flat()

        check_outputs(self.part, expected, call.result(returned, held_back.sent).flat(), exact)
        set_random_state(after)
        return returned


def check_outputs(
    part: EnginePart, expected: Sequence[Tensor], outputs: Sequence[Tensor], exact: Callable[[], Sequence[Tensor]]
) -> float:
    """The largest relative error of an engine's outputs; above the limit, `exact` ones show whether it is rounding."""
    rows = part.part.outputs
    names = [f"{row.kind} {row.name}" for row in rows]
    right: dict[str, Expected] = {}
    left = part.part.left
    for name, row, value in zip(names, rows, expected, strict=True):
        if row.name in left:
            continue
        # What a backward sends, or leaves for weight gradients, counts as gradients, too.
        summed = row.kind == "gradient" or (part.part.phase == "B" and row.kind in ("sent", "deferred"))
        right[name] = Expected(value, peers=row.kind, summed=summed)
    by_name = {name: value for name, value in zip(names, outputs, strict=True) if name in right}
    differences = compare(by_name, right, nan_equals_nan=True)
    limit = tolerance(part.part.dtypes())
    if part.part.device == "cuda" and cudnn_takes_tf32():  # each engine decides where to use it
        limit = max(limit, TOLERANCE["float16"])  # TF32 has the same mantissa
    wrong = [d for d in differences if not d.error <= limit]
    if wrong:
        once = functools.cache(exact)
        wrong = [d for d in wrong if not rounding_alone(d, by_name, right, names, once)]
    if wrong:
        worst = max(wrong, key=lambda d: d.error)
        raise BackendError(
            f"{part.engine} does not compute what eager PyTorch computes: {worst}", where=part.part.name, hint=USE_EAGER
        )
    return max((d.error for d in differences if d.error <= limit), default=0.0)

"""Puts a worker's stage onto engines, and checks each at its first action against the emitted code."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fxpipe import backend as backends
from fxpipe.backend.calls import Replay
from fxpipe.backend.compare import Difference, Expected, compare, tolerance
from fxpipe.backend.engine import Engine, EnginePart
from fxpipe.backend.pure import PurePart, trace_stage
from fxpipe.errors import BackendError
from fxpipe.plan import PartSpec, Plan
from fxpipe.runtime.loaded_stage import LoadedStage

USE_EAGER = "use --backend eager, or --backend auto to take what works"


def equip(
    plan: Plan, worker: int, stage: LoadedStage, engines: tuple[str, str], cache: Path, device: str
) -> LoadedStage:
    """The stage with its forward and its backward on the engines named; 'eager' is the emitted code itself.

    Args:
        cache: a folder for what the engines build.

    Raises:
        BackendError: an engine is not there for this device, or cannot run the part.
    """
    if engines == ("eager", "eager"):
        return stage
    parts = trace_stage(plan, worker, stage)
    spec = plan.stages[worker]
    functions = []
    for part, row, emitted, name in zip(
        parts, (spec.forward, spec.backward), (stage.forward, stage.backward), engines, strict=True
    ):
        if name == "eager":
            functions.append(emitted)
            continue
        chosen = backends.make(name)
        reason = chosen.missing(torch.device(device).type)
        if reason:
            raise BackendError(f"{name} cannot run {part.name}: {reason}", hint=USE_EAGER)
        if not kept_at(part, chosen, cache).exists():
            print(f"building {part.name} for {name}, kept in {cache}", file=sys.stderr)
        functions.append(CheckedPart(build_part(part, row, chosen, cache), emitted))
    return replace(stage, forward=functions[0], backward=functions[1], engines=engines)


def engines_of(plan: Plan, worker: int, backend: str | None) -> tuple[str, str]:
    """The engines of a stage's forward and backward: those of the plan, unless one is asked for.

    Raises:
        BackendError: an unknown name.
    """
    if backend is None or backend == "auto":
        return plan.stages[worker].engines
    if backend != "eager":
        backends.make(backend)
    return (backend, backend)


def build_part(part: PurePart, spec: PartSpec, chosen: Engine, cache: Path) -> EnginePart:
    """The part on an engine; what the engine builds is taken from the cache, or kept there in place of an older one."""
    path = kept_at(part, chosen, cache)
    if not path.exists():
        for old in cache.glob(f"{part.name}.{chosen.name}-*"):
            _remove(old)
    return EnginePart(part, spec, chosen, path)


def kept_at(part: PurePart, chosen: Engine, cache: Path) -> Path:
    """Where the cache keeps what an engine built: the name holds a digest of all that decides it."""
    text = "\n".join([part.graph.code, repr(part.inputs), repr(part.outputs), part.device, chosen.version()])
    return cache / f"{part.name}.{chosen.name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def _remove(path: Path) -> None:
    """Remove what an earlier version built; other processes may do the same, and what cannot be removed stays."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
        return
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


class CheckedPart:
    """A part on an engine whose first call is also run by the emitted code, on the same values, and compared."""

    def __init__(self, part: EnginePart, emitted: Callable[..., Any]) -> None:
        self.part = part
        self._emitted: Callable[..., Any] | None = emitted

    def __call__(self, weights: Sequence[Any], buffers: Sequence[Any], third: Any, comm: Any) -> Any:
        if self._emitted is None:
            return self.part(weights, buffers, third, comm)
        emitted, self._emitted = self._emitted, None
        heard = Heard(comm)
        device = torch.device(self.part.part.device)
        state = _random_state(device)
        first = list(third)
        result = self.part(weights, buffers, third, heard)
        after = _random_state(device)
        _set_random_state(device, state)
        again = Replay(heard.received)
        expected = emitted(weights, buffers, first, again)
        _set_random_state(device, after)
        check_outputs(self.part, flat(self.part.part, expected, again.sent), flat(self.part.part, result, heard.sent))
        for name, value in heard.sent.items():
            comm.send(name, value)
        return result


class Heard:
    """A `comm` that remembers what was received, and holds back what is sent."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self.received: dict[str, Tensor] = {}
        self.sent: dict[str, Tensor] = {}

    def recv(self, name: str) -> Tensor:
        value: Tensor = self._comm.recv(name)
        self.received[name] = value
        return value

    def send(self, name: str, value: Tensor) -> None:
        self.sent[name] = value


def flat(part: PurePart, result: Any, sent: dict[str, Tensor]) -> list[Tensor | None]:
    """What a stage's function returned and sent, in the order of the pure part's outputs."""
    if part.phase == "B":
        values = list(result)
    else:
        loss, updates, saved = result
        values = [*([loss] if part.count("loss") else []), *updates, *saved]
    return [*values, *(sent.get(o.name) for o in part.outputs if o.kind == "sent")]


def check_outputs(part: EnginePart, expected: Sequence[Tensor | None], found: Sequence[Tensor | None]) -> float:
    """The largest relative error.

    Raises:
        BackendError: it is more than rounding (`fxpipe.backend.compare`).
    """
    rows = part.part.outputs
    right: dict[str, Expected] = {}
    made: dict[str, Tensor] = {}
    for row, value, other in zip(rows, expected, found, strict=True):
        assert value is not None
        # What a backward sends are gradients as well.
        summed = row.kind == "gradient" or (part.part.phase == "B" and row.kind == "sent")
        right[f"{row.kind} {row.name}"] = Expected(value, peers=row.kind, summed=summed)
        if other is not None:
            made[f"{row.kind} {row.name}"] = other
    worst = max(compare(made, right, nan_equals_nan=True), key=lambda d: d.error, default=Difference("", 0.0))
    dtypes = [i.tensor.dtype for i in part.part.inputs] + [o.tensor.dtype for o in rows]
    if not worst.error <= tolerance(dtypes):
        raise BackendError(
            f"{part.engine} does not compute what eager PyTorch computes: {worst}",
            where=part.part.name,
            hint=USE_EAGER,
        )
    return worst.error


def _random_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    return torch.get_rng_state(), torch.cuda.get_rng_state() if device.type == "cuda" else None


def _set_random_state(device: torch.device, state: tuple[Tensor, Tensor | None]) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1])

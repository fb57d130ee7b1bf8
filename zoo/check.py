"""Checks a model of the zoo: captured, cut for four workers in both directions, trained, compared with eager."""

from __future__ import annotations

import dataclasses
import math
import re
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from families import ZooModel
from torch import nn

import fxpipe
from fxpipe.builds.build import Build
from fxpipe.errors import CaptureError
from fxpipe.ir.program import Program
from fxpipe.ir.transform import run_passes
from fxpipe.lowering.agreement import Agreement, Step, agreement_of
from fxpipe.lowering.compare_with_eager import compare_with_eager
from fxpipe.lowering.eager_step import eager_step
from fxpipe.lowering.options import CompileOptions
from fxpipe.passes import front_passes
from fxpipe.passes.analysis.profile import glued_positions
from fxpipe.plan.plan import Plan
from fxpipe.planner.cuts import Cuts
from fxpipe.runtime.process.pipeline import Pipeline
from fxpipe.stages.compare import FLOOR, FLOOR_OF_SUMS
from fxpipe.task.batch import Batch
from fxpipe.task.hooks import Loss

WORKERS, MICROBATCHES, ASYNC_STEPS = 4, 2, 5
TOLERANCE = 1e-4
RATE = 1e-4  # of Adam, whose first steps are no longer than that whatever the gradients are


@dataclass(frozen=True)
class Row:
    """What the table says of a model.

    Attributes:
        status: 'passed', 'refused' as its entry expects, or 'failed'.
        reason: why it was refused, or how it failed, with the part of the check that it failed in.
        capture: seconds.
        nodes: calls in the captured program.
        compile: seconds that lowering took, the mean of both cuts.
        crossing: bytes that cross workers in a minibatch, the mean of both cuts.
        error: the largest, relative, of losses, gradients and buffers.
        replayed: whether the step draws random numbers though dropout is off, so that the emitted code was compared
            with eager's numbers replayed, and the local run's loss only seen to be finite.
        dropout: whether it was compared with its library's default dropout, too.
        microbatches: of a recipe, how many it was trained in.
        loss_error: of a recipe, the largest error of a step's loss, relative; `error` is that of the final weights.
        unproved: of a recipe, whether compile compared it with the first batch, and proved it for no other.
    """

    name: str
    status: str
    reason: str = ""
    capture: float | None = None
    nodes: int | None = None
    compile: float | None = None
    crossing: int | None = None
    error: float | None = None
    replayed: bool = False
    dropout: bool = False
    microbatches: int | None = None
    loss_error: float | None = None
    unproved: bool = False


class Failure(Exception):
    """The model does not do what it must; the message says what."""


def quiet(model: nn.Module) -> None:
    """Set what a model drops out at random to 0, wherever its modules and their configurations keep the probability.

    `p` of torch's dropouts and torchvision's StochasticDepth, and every number between 0 and 1 whose name has `drop` in
    it: nn.LSTM.dropout, timm's drop_prob, attention_dropout and layerdrop of transformers.
    """
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) or type(module).__name__ == "StochasticDepth":
            module.p = 0.0
        for holder in (module, *_configurations(module)):
            for name, value in list(vars(holder).items()):
                if isinstance(value, float) and 0 < value < 1 and "drop" in name:
                    setattr(holder, name, 0.0)


def _configurations(module: nn.Module) -> Iterator[Any]:
    """A module's configuration, where it is an object with attributes, and those inside it."""
    found = [module.__dict__.get("config")]
    for holder in found:
        if hasattr(holder, "to_dict"):
            yield holder
            found += [value for value in vars(holder).values() if hasattr(value, "to_dict")]


def check(entry: ZooModel) -> Row:
    """The whole check of a model."""
    row = Row(entry.name, "failed")
    doing = "capture"
    try:
        model, loss, batch = entry.make()
        quiet(model)
        start = time.perf_counter()
        program = captured(entry, model, loss, batch)
        row = dataclasses.replace(row, capture=time.perf_counter() - start, nodes=sum(1 for _ in program))
        if entry.refused:
            raise Failure("captured, though its entry says that it is refused")
        doing, start = "lower", time.perf_counter()
        builds = [lowered(program, cuts) for cuts in both_cuts(program)]
        seconds = (time.perf_counter() - start) / len(builds)
        crossing = sum(map(_crossing, builds)) // len(builds)
        replayed = any(_draws(build) for build in builds)
        row = dataclasses.replace(row, compile=seconds, crossing=crossing, replayed=replayed)
        errors, doing = [], "eager"
        eager = None if replayed else _eager(builds[0].plan, model, entry.loss, batch)
        for build, direction in zip(builds, ("earlier", "later"), strict=True):
            with tempfile.TemporaryDirectory(prefix="fxpipe_build_") as folder:
                doing = f"synchronous step, backward cut {direction}"
                saved = build.save(Path(folder) / "build")
                errors.append(_synchronous(saved, model, entry, batch, eager))
                row = dataclasses.replace(row, error=max(errors))
                if direction == "later":
                    doing = "async"
                    _asynchronous(saved, entry)
        if entry.random:
            doing = "dropout"
            errors.append(_with_dropout(entry))
            row = dataclasses.replace(row, error=max(errors), dropout=True)
    except CaptureError as error:
        if entry.refused and doing == "capture" and re.search(entry.refused[0], str(error)):
            return dataclasses.replace(row, status="refused", reason=entry.refused[1])
        return dataclasses.replace(row, reason=f"{doing}: {type(error).__name__}: {error}")
    except Exception as error:  # whatever it is, it is this model's row
        return dataclasses.replace(row, reason=f"{doing}: {type(error).__name__}: {error}")
    return dataclasses.replace(row, status="passed")


def captured(entry: ZooModel, model: nn.Module, loss: Loss, batch: Any) -> Program:
    """The step on the first microbatch, every tensor cut along its first dimension."""
    part = Batch.of(batch).split(MICROBATCHES)[0].given
    return fxpipe.capture(model, loss, part, constant_batch=entry.constant_batch)


def both_cuts(program: Program) -> tuple[Cuts, Cuts]:
    """Forward in even parts; backward cut an eighth of the units earlier than that, and later."""
    options = CompileOptions(microbatches=MICROBATCHES, accept_microbatch_loss=True)
    numbered = run_passes(program, front_passes(whole_loss=options.whole_loss()))
    count, glued = len(numbered.units), glued_positions(numbered)
    shift = max(1, count // (2 * WORKERS))
    free = [p for p in range(count + 1) if p not in glued]
    forward = [min(free, key=lambda p: abs(p - count * k / WORKERS)) for k in range(1, WORKERS)]
    earlier = [max(0, p - shift) for p in forward]
    later = [min(count, p + shift) for p in forward]
    if forward[0] == 0 or forward[-1] == count or len(set(forward)) < len(forward):
        raise Failure(f"{count} units give no work to {WORKERS} workers: forward cut at {forward}")
    return tuple(Cuts((0, *forward, count), (0, *backward, count)) for backward in (earlier, later))


def _eager(plan: Plan, model: nn.Module, loss: Loss, batch: Any) -> Step:
    """Eager's step: on the whole batch if totals over it are in the loss; buffers are those of microbatches alone."""
    whole = bool(plan.step.made)
    step = eager_step(plan, model, loss, batch, whole=whole)
    return dataclasses.replace(step, buffers={}) if whole else step


def lowered(program: Program, cuts: Cuts) -> Build:
    return fxpipe.lower(
        program,
        workers=WORKERS,
        microbatches=MICROBATCHES,
        schedule="1f1b",
        accept_microbatch_loss=True,  # of those models that mix samples
        cost="analytic",
        cuts=cuts,
    )


def _crossing(build: Build) -> int:
    return build.plan.microbatches * sum(edge.tensor.bytes for edge in build.plan.edges)


def _draws(build: Build) -> bool:
    return any(part.random for stage in build.plan.stages for part in (stage.forward, stage.backward))


def _synchronous(build: Build, model: nn.Module, entry: ZooModel, batch: Any, eager: Step | None) -> float:
    """One step against eager's, or with its random numbers replayed where None; the largest error."""
    pipeline = build.local(optimizer=_adam)
    loss = pipeline.step(batch)
    pipeline.flush()
    if eager is None:
        if not loss.isfinite():
            raise Failure(f"the loss is {float(loss)}")
        return _agreeing(compare_with_eager(build, model, entry.loss, batch))
    found = Step(loss, pipeline.gradients(), _buffers(pipeline))
    return _agreeing(agreement_of(found, eager, FLOOR_OF_SUMS if build.plan.step.made else FLOOR))


def _buffers(pipeline: Pipeline) -> dict[str, torch.Tensor]:
    """Every buffer's value: those in the state dict from there, the others from a worker that holds them."""
    state = pipeline.state_dict()
    return {
        b.name: state[b.saved[0]]
        if b.saved
        else pipeline.executors[b.workers[0] if b.home is None else b.home].buffers[b.name]
        for b in pipeline.plan.buffers
    }


def _agreeing(agreement: Agreement) -> float:
    if not agreement.largest <= TOLERANCE:
        name, error = max({**agreement.gradients, **agreement.buffers}.items(), key=lambda item: item[1])
        raise Failure(f"the loss is off by {agreement.loss:.1e}, {name} by {error:.1e}")
    return agreement.largest


def _asynchronous(build: Build, entry: ZooModel) -> None:
    """Steps without a flush: every loss and every weight stays finite; a mask of infinities may stay what it is."""
    pipeline = build.local(optimizer=_adam, schedule="async")
    finite = {n: v.isfinite() for n, v in pipeline.state_dict().items() if v.is_floating_point()}
    losses = pipeline.run(entry.batches(ASYNC_STEPS))
    if not all(map(math.isfinite, losses)):
        raise Failure(f"losses {losses}")
    state = pipeline.state_dict()
    wrong = [name for name, before in finite.items() if not (state[name].isfinite() == before).all()]
    if wrong:
        raise Failure(f"not finite after {ASYNC_STEPS} steps: {', '.join(wrong[:5])}")


def _with_dropout(entry: ZooModel) -> float:
    """The emitted code against eager with the same masks, as the library's defaults drop out."""
    model, loss, batch = entry.make()
    program = captured(entry, model, loss, batch)
    build = lowered(program, both_cuts(program)[0])
    if not _draws(build):
        raise Failure("the step draws no random numbers")
    return _agreeing(compare_with_eager(build, model, loss, batch))


def _adam(named: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam([parameter for _, parameter in named], lr=RATE)

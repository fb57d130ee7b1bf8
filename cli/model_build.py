"""A build of a model file, in memory: what `compile` writes and what `inspect MODEL.py` shows."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from fxpipe.cli.cost_options import CostChoice, CostOptions
from fxpipe.cli.output import warn, working
from fxpipe.cli.policy_option import check_policy

if TYPE_CHECKING:
    from torch import nn

    from fxpipe.build.build import Build
    from fxpipe.plan.costs import StageTime
    from fxpipe.task.model_file import Task

OFF = 1.3
"""How far a stage's own time may be from the sum of its operators' before a warning says so."""

NOTICEABLE = 5e-3
"""Seconds of a stage's forward and backward below which that is nothing to warn of."""


@dataclass(frozen=True)
class ModelOptions:
    """What a user asked for, as it was typed."""

    model: str
    workers: int
    cuts: Any
    fp_cut: tuple[str, ...]
    bp_cut: tuple[str, ...]
    schedule: str
    policy: str | None
    microbatches: int | None
    autocast: str | None
    device: str | None
    threads: int | None
    seed: int
    backend: str
    costs: CostOptions
    meta: bool = False

    def command(self, microbatches: int) -> str:
        """The command that makes this build again, without the paths that differ from machine to machine."""
        parts = ["fxpipe compile", Path(self.model).name, f"-n {self.workers}"]
        parts += [] if self.cuts == "auto" else [f"--cuts {self.cuts}"]
        parts += [f"--fp-cut {p}" for p in self.fp_cut] + [f"--bp-cut {p}" for p in self.bp_cut]
        parts += [f"--schedule {self.schedule}", f"--microbatches {microbatches}"]
        parts += [f"--autocast {self.autocast}"] if self.autocast else []
        parts += ["--meta"] if self.meta else []
        return " ".join(parts)


@dataclass(frozen=True)
class ModelBuild:
    """A build, and what it was made from."""

    build: Build
    task: Task
    model: nn.Module
    example: Any
    choice: CostChoice


def check_cuts(cuts: str, fp_cut: Sequence[str], bp_cut: Sequence[str]) -> None:
    """Raise click.UsageError where cuts are both chosen and pinned."""
    if cuts != "auto" and (fp_cut or bp_cut):
        raise click.UsageError(f"--cuts {cuts} lets the planner choose, --fp-cut and --bp-cut pin: give one of them")


def build_model(wanted: ModelOptions, known_costs: Path | None = None) -> ModelBuild:
    """Load a model file and compile it, in memory; time its stages where times are measured.

    Args:
        known_costs: the `node_costs.json` of an earlier compile.

    Raises:
        click.UsageError, FxpipeError: whatever the user can mend.
    """
    import torch

    from fxpipe.lowering.lower import compile
    from fxpipe.planner.links import NCCL_NODE
    from fxpipe.policy import make as make_policy
    from fxpipe.runtime.process.allocator import reuse_freed_memory
    from fxpipe.task.batch import default_microbatches
    from fxpipe.task.meta import on_meta, to_device
    from fxpipe.task.model_file import load_task, source_digests
    from fxpipe.threads import threads_for

    if wanted.meta and wanted.backend != "eager":
        raise click.UsageError(
            f"--backend {wanted.backend} is tried on the stages, but --meta leaves parameters "
            "without values: leave it out, and give it to `fxpipe run`"
        )
    choice = wanted.costs.choice(wanted.workers, meta=wanted.meta)
    reuse_freed_memory()
    with working("reading the model"):
        task = load_task(wanted.model)
        torch.manual_seed(wanted.seed)
        made = on_meta(task.model).model if wanted.meta else task.model()
        example = task.example()
        if wanted.device is not None:
            made, example = to_device(wanted.device, made, example)
    if wanted.device == "cuda" or any(p.device.type == "cuda" for p in made.parameters()):
        choice = wanted.costs.choice(wanted.workers, NCCL_NODE, meta=wanted.meta)
    for warning in task.warnings:
        warn(warning)
    microbatches = wanted.microbatches
    if microbatches is None:
        microbatches = 1 if wanted.schedule == "async" else default_microbatches(example, wanted.workers)
    if wanted.policy is not None:
        make_policy(wanted.policy)  # by now the model file has registered its own
    check_policy(wanted.policy, wanted.schedule, wanted.workers, microbatches)
    threads = threads_for(wanted.threads, wanted.workers)
    with working("compiling") as say:
        say("capturing, costing and cutting")
        build = compile(
            made,
            task.loss,
            example,
            workers=wanted.workers,
            microbatches=microbatches,
            schedule=wanted.schedule,
            policy=wanted.policy,
            forward_at=wanted.fp_cut,
            backward_at=wanted.bp_cut,
            cuts=wanted.cuts,
            autocast=wanted.autocast,
            evaluation=(task.metrics, _eval_batches(task, wanted.seed)) if task.validates else None,
            cost=choice.cost,
            device=choice.device,
            links=choice.links,
            speeds=choice.speeds,
            memory=choice.memory,
            optimizer=task.optimizer,
            threads=threads,
            known_costs=known_costs,
            backend=wanted.backend,
            say=say,
            command=wanted.command(microbatches),
        )
        if choice.cost == "measured":
            build = _timed(build, example, task, threads, say)
    plan = dataclasses.replace(build.plan, sources=source_digests(Path(wanted.model)))
    return ModelBuild(dataclasses.replace(build, plan=plan), task, made, example, choice)


def _eval_batches(task: Task, seed: int) -> Iterator[Any]:
    """The batches of `eval_data()`, made when the first is asked for.

    Raises:
        TaskError: the hook failed.
    """
    from fxpipe.errors import FxpipeError
    from fxpipe.random_state import seed_everything
    from fxpipe.task.model_file import hook_raised

    seed_everything(seed)
    try:
        yield from task.eval_data()
    except FxpipeError:
        raise
    except Exception as error:
        raise hook_raised("eval_data", error, task.path) from error


def _timed(build: Build, example: Any, task: Task, threads: int, say: Callable[[str], None]) -> Build:
    from fxpipe.measure.stages import measure_stages

    say("timing the stages")
    times = measure_stages(build, example, optimizer=task.optimizer, threads=threads, say=say)
    doubts = doubts_of(times, threads, build.plan.device)
    return dataclasses.replace(
        build, costs=dataclasses.replace(build.costs, times=times), warnings=(*build.warnings, *doubts)
    )


def doubts_of(times: Sequence[StageTime], threads: int, device: str) -> Iterator[str]:
    """Why a run may not do what the stages' times promise."""
    for k, time in enumerate(times):
        off = time.correction
        if off is not None and time.forward + time.backward > NOTICEABLE and not 1 / OFF < off < OFF:
            yield (
                f"stage {k} took {off:.2f} times what its operators add up to: the machine may have been busy; the "
                "forecast goes by the stage's time, the cuts by the operators'; compile again when it is not"
            )
    cores = os.cpu_count() or 1
    if device == "cpu" and len(times) * threads > cores:
        yield (
            f"{len(times)} workers of {threads} thread{'s' if threads > 1 else ''} share {cores} cores here: the "
            "forecast is for workers that have cores of their own"
        )

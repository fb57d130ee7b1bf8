"""A build: the emitted stages, the plan and the initial weights, in memory or in a directory.

build/
    plan.json             what run needs to know: interfaces, edges, owners, digests
    stage_0.py …          the product
    evaluate_0.py …       evaluation on each worker; evaluate_0_1.py for batches of a second shape, and so on
    weights.safetensors   initial parameters, buffers and constants, under the model's own names
    costs.json            what the workers take, and how the cuts were chosen: not part of the plan, which stays the
                          same from compile to compile
    program.json          the program after its last pass, one row per node, for `fxpipe inspect`
    passes.txt            what every pass made of the program: one line per pass
    profile.json          what every unit costs, for `fxpipe inspect` and `fxpipe plan`
    node_costs.json       the measured time of every node; the next compile into this folder uses it
    engines/              what engines other than eager make of the stages' parts; made again if it is missing
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from fxpipe.build.weights_file import weights_bytes
from fxpipe.costs.node_costs_file import NODE_COSTS
from fxpipe.errors import BuildError, first_line
from fxpipe.ir.program_table import ProgramTable, read_table
from fxpipe.optimizer.per_worker import check_per_worker
from fxpipe.options import changed
from fxpipe.plan.build_folder import COSTS, ENGINES, PASSES, PLAN, PROFILE, PROGRAM, WEIGHTS, check_target, load_plan
from fxpipe.plan.cost_records import WorkerSummary
from fxpipe.plan.lock import replacing_alone
from fxpipe.plan.spec import Plan
from fxpipe.planner.costs_file import BuildCosts, read_costs
from fxpipe.planner.partition import Partition
from fxpipe.planner.profile import Profile, read_profile_json
from fxpipe.task.hooks import given_task
from fxpipe.task.model_file import MakeScheduler, OptimizerHook, Task
from fxpipe.task.step_hooks import Loss, StepHooks

if TYPE_CHECKING:  # half a second, which only what trains a build needs
    from fxpipe.runtime.options import PipelineOptions
    from fxpipe.runtime.process.pipeline import Pipeline


@dataclass(frozen=True)
class Build:
    """Stages, plan and initial weights.

    Attributes:
        files: emitted source by file name.
        tensors: initial parameters, buffers and constants by their first name.
        costs: what the workers cost, and how the cuts were chosen; empty for a loaded build without `costs.json`.
        profile: what every unit costs; None for a loaded build without `profile.json`.
        nodes: the program after its last pass; None for a loaded build without `program.json`.
        passes: what every pass did, `fold  812 → 640 nodes`; empty for a loaded build without `passes.txt`.
        engine_files: what engines made of the parts, by path within `engines/`; a loaded build leaves it there.
        node_costs: what was measured, kept so that the next compile need not measure it.
        folder: where it is on disk, if it is.
        warnings: what capture wants the user to know.
        model: gives the model that was compiled, without values; None for a loaded build.
        hooks: what it was compiled of, to make stages for more shapes during a run; None for a loaded build.
    """

    plan: Plan = field(repr=False)
    files: Mapping[str, str] = field(repr=False)
    tensors: Mapping[str, torch.Tensor] = field(repr=False)
    costs: BuildCosts = field(default_factory=BuildCosts, repr=False)
    profile: Profile | None = field(default=None, repr=False)
    nodes: ProgramTable | None = field(default=None, repr=False)
    passes: tuple[str, ...] = ()
    engine_files: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    node_costs: str | None = field(default=None, repr=False)
    folder: Path | None = None
    warnings: tuple[str, ...] = ()
    model: Callable[[], nn.Module] | None = field(default=None, repr=False, compare=False)
    hooks: StepHooks | None = field(default=None, repr=False, compare=False)

    @property
    def workers(self) -> tuple[WorkerSummary, ...]:
        """What each worker costs; empty for a loaded build without `costs.json`."""
        return self.costs.workers

    @property
    def partitions(self) -> tuple[Partition, ...]:
        """What the planner compared, the chosen one last; empty if the cuts were given."""
        return self.costs.partitions

    @property
    def of_shapes(self) -> tuple[Build, ...]:
        """For each shape of batch, the build as it would be if there were no other; its costs are the first's."""
        return tuple(dataclasses.replace(self, plan=plan, folder=None) for plan in self.plan.of_shapes)

    def save(self, folder: str | Path, *, model_file: str | Path | None = None) -> Build:
        """Write the build; an earlier build in its place is replaced, anything else is left alone.

        Args:
            model_file: the user's file, remembered relative to the build.

        Raises:
            BuildError: the folder holds something else, or cannot be written, or the file of the weights cannot hold
                their dtypes. Nothing is left half-written.
        """
        folder = Path(folder)
        check_target(folder)
        weights = weights_bytes(self.tensors)
        plan = self.plan
        if model_file is not None:
            relative = os.path.relpath(Path(model_file).resolve(), folder.resolve())
            plan = dataclasses.replace(plan, model_file=relative)
        plan = dataclasses.replace(plan, weights_digest=hashlib.sha256(weights).hexdigest())
        with replacing_alone(folder) as fresh:
            for name, source in self.files.items():
                (fresh / name).write_text(source)
            (fresh / WEIGHTS).write_bytes(weights)
            (fresh / COSTS).write_text(self.costs.to_json())
            if self.profile is not None:
                (fresh / PROFILE).write_text(self.profile.to_json(), encoding="utf-8")
            if self.nodes is not None:
                (fresh / PROGRAM).write_text(self.nodes.to_json(), encoding="utf-8")
            if self.passes:
                (fresh / PASSES).write_text("\n".join(self.passes) + "\n", encoding="utf-8")
            for name, content in self.engine_files.items():
                (fresh / ENGINES / name).parent.mkdir(parents=True, exist_ok=True)
                (fresh / ENGINES / name).write_bytes(content)
            if self.node_costs is not None:
                (fresh / NODE_COSTS).write_text(self.node_costs)
            (fresh / PLAN).write_text(plan.to_json())
        return dataclasses.replace(self, plan=plan, folder=folder)

    def local(
        self,
        *,
        optimizer: OptimizerHook | None = None,
        lr_scheduler: MakeScheduler | None = None,
        model: Callable[[], nn.Module] | None = None,
        loss: Loss | None = None,
        loss_weight: Callable[[Any], Any] | None = None,
        averaged: Callable[[torch.optim.Optimizer, Any], Any] | None = None,
        reset: Callable[[nn.Module], Any] | None = None,
        out: str | Path | None = None,
        **options: Any,
    ) -> Pipeline:
        """All workers in this process: for debugging, and for accuracy studies of N workers on one machine.

        The stages of a build in memory are written to a temporary folder, where a debugger finds them; it is deleted
        with the pipeline.

        Args:
            optimizer: made once for each worker, from its own named parameters; default SGD(lr=0.01, momentum=0.9).
                Where it asks for the model as well (`fxpipe.task.model_view`), with its view of that.
            lr_scheduler: made for each optimizer; none by default. It makes a step after every update; one that is
                returned as `(scheduler, "epoch")` after every `steps_per_epoch`, a ReduceLROnPlateau as `(scheduler,
                METRIC)` after every evaluation.
            model: makes the model again, for a build whose parameters have no values (`fxpipe.task.meta`): its modules
                initialise them, by `seed`. Not needed with `weights`. And for an optimizer that asks for it, where
                the build was loaded. With `loss`, worker 0 makes stages for batches of new shapes (`new_shapes`).
            loss: `loss(model, batch)`, as it was compiled; neither it nor `model` is needed for a build in memory.
            loss_weight: the hook, if the build was compiled with it; batches that are evaluated count by it, too.
            averaged: from such an optimizer and its named parameters, the averaged weights that it keeps, by name.
            reset: sets buffers where an evaluation begins, and in `train` an epoch (`fxpipe.task.reset_buffers`).
            out: the folder for the checkpoints that `checkpoint_every` asks for; with `resume`, feed the batches from
                the step `Pipeline.fed` on.
            options: schedule, policy, clip_norm, ema, checkpoint_every, trace, weights, seed and more: see
                `fxpipe.runtime.options.PipelineOptions`.

        Raises:
            FxpipeError: there is no option of such a name.
            TaskError: the optimizer cannot be used, or not with one for each worker.
        """
        from fxpipe.runtime.options import PipelineOptions
        from fxpipe.runtime.process.start import open_local

        chosen = changed(PipelineOptions(), _as_text(options))
        task = self._task(
            chosen, optimizer=optimizer, lr_scheduler=lr_scheduler, model=model, loss=loss, loss_weight=loss_weight,
            averaged=averaged, reset=reset,
        )  # fmt: skip
        temporary = None
        folder = self.folder
        if folder is None:
            temporary = tempfile.TemporaryDirectory(prefix="fxpipe_build_")
            folder = Path(temporary.name) / "build"
            self.save(folder)
        pipeline = open_local(folder, task, chosen, None if out is None else str(out))
        pipeline.temporary = temporary
        return pipeline

    def join(
        self,
        train_data: Callable[[], Iterable[Any]],
        *,
        optimizer: OptimizerHook | None = None,
        lr_scheduler: MakeScheduler | None = None,
        model: Callable[[], nn.Module] | None = None,
        loss: Loss | None = None,
        eval_data: Callable[[], Iterable[Any]] | None = None,
        loss_weight: Callable[[Any], Any] | None = None,
        averaged: Callable[[torch.optim.Optimizer, Any], Any] | None = None,
        on_step: Callable[[int, float, Any], object] | None = None,
        on_eval: Callable[[int, dict[str, float], Any], object] | None = None,
        on_epoch: Callable[[int, Any], object] | None = None,
        reset: Callable[[nn.Module], Any] | None = None,
        **options: Any,
    ) -> dict[str, Any] | None:
        """Train as one worker of the processes that torchrun started; every process calls it with the same arguments.

        Args:
            train_data: gives an epoch's batches; called on worker 0 alone.
            optimizer, lr_scheduler, model, loss, loss_weight, averaged, reset: as those of `local`.
            eval_data: gives the batches that the metrics of the build's evaluation are computed on, the same at every
                call; called on worker 0 alone. The trained weights are evaluated in the end.
            on_step, on_eval, on_epoch: called in every process while it trains, with the same numbers, and the run (see
                `fxpipe.task.callbacks`, `OngoingRun`); something true that one returns ends the run.
            options: those of `local`, and steps, epochs, eval_every, save_best, patience, out, trace, tensorboard,
                threads: see `fxpipe.runtime.options.RunOptions`.

        Returns:
            The summary of the run on rank 0, None elsewhere.

        Raises:
            FxpipeError: there is no option of such a name.
            TaskError: the optimizer cannot be used, or not with one for each worker.
            BuildError: the build was never saved: all processes must load the same directory.
            RunError: torchrun started another number of processes than the build has workers; or there is something to
                evaluate, and the build has no evaluation (see `fxpipe.compile`).
        """
        from fxpipe.runtime.options import RunOptions
        from fxpipe.runtime.process.check_run import check_evaluation
        from fxpipe.runtime.process.start import join

        if self.folder is None:
            raise BuildError(
                "only a saved build can be joined", hint="build.save(FOLDER) once, then fxpipe.load(FOLDER)"
            )
        chosen = changed(RunOptions(str(self.folder), progress=True), _as_text(options))
        if eval_data is not None:
            check_evaluation(self.plan, "eval_data")
        task = self._task(
            chosen, optimizer=optimizer, lr_scheduler=lr_scheduler, model=model, loss=loss, loss_weight=loss_weight,
            averaged=averaged, reset=reset, train_data=train_data, eval_data=eval_data,
            on_step=on_step, on_eval=on_eval, on_epoch=on_epoch,
        )  # fmt: skip
        return join(chosen, task)

    def _task(self, options: PipelineOptions, **hooks: Callable[..., Any] | None) -> Task:
        """The hooks of a run. Its optimizer may be another than at compile time; Python's warning says what cannot be
        found out."""
        task = given_task(self.model, self.hooks, **hooks)
        make = hooks["optimizer"] and task.optimizer
        accepted = options.accept_optimizer_per_worker
        if found := check_per_worker(self.plan, make, hooks["lr_scheduler"], accepted=accepted):
            warnings.warn(found, stacklevel=3)
        return task


def load(folder: str | Path) -> Build:
    """Read a build back.

    Raises:
        BuildError: a file is missing, was changed (except stages, which may be edited), or is of another version.
    """
    plan = load_plan(folder := Path(folder))
    try:
        tensors = load_file(folder / plan.weights_file)
    except (SafetensorError, OSError) as error:
        hint = f"compile the model again: fxpipe compile MODEL -o {folder}"
        raise BuildError(f"{plan.weights_file} cannot be read: {error}", where=str(folder), hint=hint) from error
    files = {part.file: _source(folder / part.file) for part in plan.code}
    return Build(
        plan,
        files,
        tensors,
        **beside_plan(folder, plan),
        node_costs=(folder / NODE_COSTS).read_text() if (folder / NODE_COSTS).is_file() else None,
        folder=folder,
    )


def join(
    folder: str | Path,
    *,
    optimizer: OptimizerHook | None = None,
    lr_scheduler: MakeScheduler | None = None,
    model: Callable[[], nn.Module] | None = None,
    loss: Loss | None = None,
    loss_weight: Callable[[Any], Any] | None = None,
    averaged: Callable[[torch.optim.Optimizer, Any], Any] | None = None,
    reset: Callable[[nn.Module], Any] | None = None,
    out: str | Path | None = None,
    **options: Any,
) -> Pipeline:
    """Be one worker of the processes that torchrun started, each of which runs the user's own loop with the same calls.

        with fxpipe.join("build/", optimizer=make_optimizer) as pipeline:
            for batch in data:
                loss = pipeline.step(batch)

    Args:
        folder: of the build; each process has one with the same content.
        optimizer, lr_scheduler, model, loss, loss_weight, averaged, reset, options: as those of `Build.local`, and
            threads and stall_timeout: see `fxpipe.runtime.options.RunOptions`.
        out: as of `Build.local`.

    Raises:
        FxpipeError: there is no option of such a name, or it belongs to a loop of fxpipe's own; or a mistake that
            `Build.local` finds.
        RunError: torchrun started another number of processes than the build has workers, or none; or they were given
            different things.
    """
    from fxpipe.runtime.options import RunOptions
    from fxpipe.runtime.process.check_run import check_own_loop
    from fxpipe.runtime.process.start import open_joined

    check_own_loop(options)
    build = load(folder)
    given = _as_text(options if out is None else {**options, "out": out})
    chosen = changed(RunOptions(str(build.folder)), given)
    task = build._task(
        chosen, optimizer=optimizer, lr_scheduler=lr_scheduler, model=model, loss=loss, loss_weight=loss_weight,
        averaged=averaged, reset=reset,
    )  # fmt: skip
    return open_joined(chosen, task)


def beside_plan(folder: Path, plan: Plan) -> dict[str, Any]:
    """What a build's folder holds that a run does not need: its costs, profile, nodes and passes, as fields of `Build`.

    A file that is gone has no entry.

    Raises:
        BuildError: one of them cannot be read.
    """
    readers: dict[str, tuple[str, Callable[[Path], Any]]] = {
        "profile": (PROFILE, partial(read_profile_json, error=BuildError, hint="compile again, or delete it")),
        "nodes": (PROGRAM, read_table),
        "passes": (PASSES, lambda path: tuple(path.read_text(encoding="utf-8", errors="replace").splitlines())),
    }
    found = {name: read(folder / file) for name, (file, read) in readers.items() if (folder / file).is_file()}
    costs = read_costs(folder, plan)
    return found if costs is None else found | {"costs": costs}


def _source(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        hint = f"compile the model again: fxpipe compile MODEL -o {path.parent}"
        raise BuildError(f"{path.name} cannot be read: {first_line(error)}", where=str(path), hint=hint) from error


def _as_text(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options given in Python, with every `Path` as text, as a run has them."""
    return {name: os.fspath(value) if isinstance(value, os.PathLike) else value for name, value in options.items()}

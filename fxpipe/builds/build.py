"""A build: the emitted stages, the plan and the initial weights, in memory or in a directory.

build/
    plan.json             what run needs to know: interfaces, edges, owners, digests
    stage_0.py …          the product
    evaluate_0.py …       evaluation on each worker; evaluate_0_1.py for batches of a second shape, and so on
    weights.safetensors   initial parameters, buffers and constants, each once, under its first name
    costs.json            what the workers cost, and how the cuts were chosen: not part of the plan, which stays the
                          same from compile to compile
    nodes.json            the program after its last pass, one row per node, for `fxpipe inspect`
    program.json          the captured programs, and the passes that they went through, for `fxpipe passes`
    passes.txt            what every pass did: one line per pass
    profile.json          what every unit costs, for `fxpipe inspect` and `fxpipe plan`
    node_costs.json       the measured time of every node; the next compile into this folder uses it
    engines/              files of engines other than eager for the stages' parts; made again if missing
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
from safetensors.torch import load_file, save
from torch import nn

from fxpipe.costs.node_costs_file import NODE_COSTS
from fxpipe.errors import BuildError, FxpipeError, first_line, listed
from fxpipe.ir.program_table import ProgramTable, read_table
from fxpipe.ir.saved_program import file_of, texts_of
from fxpipe.optimizer.per_worker import check_per_worker
from fxpipe.options import changed, taken
from fxpipe.plan.build_folder import (
    COSTS,
    ENGINES,
    NODES,
    PASSES,
    PLAN,
    PROFILE,
    PROGRAM,
    WEIGHTS,
    check_target,
    load_plan,
)
from fxpipe.plan.cost_records import WorkerSummary
from fxpipe.plan.lock import replacing_alone
from fxpipe.plan.plan import Plan
from fxpipe.planner.costs_file import BuildCosts, read_costs
from fxpipe.planner.partition import Partition
from fxpipe.planner.profile import Profile, read_profile_json
from fxpipe.task.hooks import NO_HOOKS, OF_LOOPS, OF_RUNS, Hooks, split_hooks
from fxpipe.task.model_file import Task
from fxpipe.task.step_hooks import StepHooks

if TYPE_CHECKING:  # half a second, which only training needs
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
        nodes: the program after its last pass; None for a loaded build without `nodes.json`.
        programs: the captured programs with their passes, as text; empty for a loaded build without `program.json`.
        passes: what every pass did, `fold  812 → 640 nodes`; empty for a loaded build without `passes.txt`.
        engine_files: what engines made from the parts, by path within `engines/`; a loaded build leaves it there.
        node_costs: what was measured, saved so that the next compile need not measure it.
        folder: its folder on disk, if it has one.
        warnings: capture's warnings to the user.
        model: gives the compiled model, without values; None for a loaded build.
        hooks: what it was compiled from, to make stages for more shapes during a run; None for a loaded build.
    """

    plan: Plan = field(repr=False)
    files: Mapping[str, str] = field(repr=False)
    tensors: Mapping[str, torch.Tensor] = field(repr=False)
    costs: BuildCosts = field(default_factory=BuildCosts, repr=False)
    profile: Profile | None = field(default=None, repr=False)
    nodes: ProgramTable | None = field(default=None, repr=False)
    programs: tuple[str, ...] = field(default=(), repr=False)
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
        """The partitions that the planner compared, the chosen one last; empty if the cuts were given."""
        return self.costs.partitions

    @property
    def of_shapes(self) -> tuple[Build, ...]:
        """For each shape of batch, the build as if there were no other; its costs are the first's."""
        return tuple(dataclasses.replace(self, plan=plan, folder=None) for plan in self.plan.of_shapes)

    def save(self, folder: str | Path, *, model_file: str | Path | None = None) -> Build:
        """Write the build; an earlier build there is replaced, anything else is not touched.

        Args:
            model_file: the user's file, stored as a path relative to the build.

        Raises:
            BuildError: the folder holds something else, or cannot be written, or the file of the weights cannot hold
                their dtypes. Nothing is left half-written.
        """
        folder = Path(taken("folder", folder, str))
        check_target(folder)
        weights = weights_bytes(self.tensors)
        file, digest = self.plan.model_file, hashlib.sha256(weights).hexdigest()
        if model_file is not None:
            file = dataclasses.replace(file, path=os.path.relpath(Path(model_file).resolve(), folder.resolve()))
        weights_file = dataclasses.replace(self.plan.weights, digest=digest)
        plan = dataclasses.replace(self.plan, model_file=file, weights=weights_file)
        with replacing_alone(folder) as fresh:
            for name, source in self.files.items():
                (fresh / name).write_text(source)
            (fresh / WEIGHTS).write_bytes(weights)
            (fresh / COSTS).write_text(self.costs.to_json())
            if self.profile is not None:
                (fresh / PROFILE).write_text(self.profile.to_json(), encoding="utf-8")
            if self.nodes is not None:
                (fresh / NODES).write_text(self.nodes.to_json(), encoding="utf-8")
            if self.programs:
                (fresh / PROGRAM).write_text(file_of(self.programs), encoding="utf-8")
            if self.passes:
                (fresh / PASSES).write_text("\n".join(self.passes) + "\n", encoding="utf-8")
            for name, content in self.engine_files.items():
                (fresh / ENGINES / name).parent.mkdir(parents=True, exist_ok=True)
                (fresh / ENGINES / name).write_bytes(content)
            if self.node_costs is not None:
                (fresh / NODE_COSTS).write_text(self.node_costs)
            (fresh / PLAN).write_text(plan.to_json())
        return dataclasses.replace(self, plan=plan, folder=folder)

    def local(self, hooks: Hooks = NO_HOOKS, *, out: str | Path | None = None, **changes: Any) -> Pipeline:
        """All workers in this process: for debugging, and for accuracy studies of N workers on one machine.

        The stages of a build in memory are written to a temporary folder, where a debugger finds them; it is deleted
        with the pipeline.

        Args:
            hooks, changes: model, loss, optimizer, lr_scheduler, loss_weight, averaged, reset: see
                `fxpipe.task.hooks.Hooks`. And options: schedule, policy, clip_norm, ema, checkpoint_every, trace,
                weights, seed and more: see `fxpipe.runtime.options.PipelineOptions`.
            out: the folder for the checkpoints that `checkpoint_every` asks for; with `resume`, feed the batches from
                the step `Pipeline.fed` on.

        Raises:
            FxpipeError: an option does not exist.
            TaskError: the optimizer cannot be used, or needs to be one for all workers.
        """
        from fxpipe.runtime.options import PipelineOptions
        from fxpipe.runtime.process.start import open_local

        hooks, option_values = split_hooks(hooks, OF_LOOPS, changes)
        chosen, place = changed(PipelineOptions(), option_values), taken("out", out, str | None)
        task = self._task(chosen, hooks)
        temporary = None
        folder = self.folder
        if folder is None:
            temporary = tempfile.TemporaryDirectory(prefix="fxpipe_build_")
            folder = Path(temporary.name) / "build"
            self.save(folder)
        pipeline = open_local(folder, task, chosen, place)
        pipeline.temporary = temporary
        return pipeline

    def join(
        self, train_data: Callable[[], Iterable[Any]], hooks: Hooks = NO_HOOKS, **changes: Any
    ) -> dict[str, Any] | None:
        """Train as one worker of the processes that torchrun started; every process calls it with the same arguments.

        Args:
            train_data: gives an epoch's batches; called only on worker 0.
            hooks, changes: the hooks and options of `local`. And eval_data, whose metrics are computed at the end,
                too; on_step, on_eval, on_epoch; steps, epochs, eval_every, save_best, patience, out, trace,
                log, peak, threads: see `fxpipe.runtime.options.RunOptions`.

        Returns:
            The summary of the run on rank 0, None elsewhere.

        Raises:
            FxpipeError: an option does not exist.
            TaskError: the optimizer cannot be used, or needs to be one for all workers.
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
        hooks, option_values = split_hooks(hooks, (*OF_RUNS, "train_data"), {**changes, "train_data": train_data})
        chosen = changed(RunOptions(str(self.folder), progress=True), option_values)
        if hooks.eval_data is not None:
            check_evaluation(self.plan, "eval_data")
        return join(chosen, self._task(chosen, hooks))

    def _task(self, options: PipelineOptions, hooks: Hooks) -> Task:
        """The hooks of a run. Its optimizer may differ from the compile's; a Python warning says what cannot be found
        out."""
        for name in ("settings", "arguments", "model_file"):
            if getattr(options, name, None) not in (None, ()):
                raise FxpipeError(f"{name} is for model files", hint="give hooks that have these values")
        task = Task(hooks, seen=self.model, compiled=self.hooks)
        make = hooks.optimizer and task.optimizer
        accepted = options.accept_optimizer_per_worker
        if doubt := check_per_worker(self.plan, make, hooks.lr_scheduler, accepted=accepted):
            warnings.warn(doubt, stacklevel=3)
        return task


def load(folder: str | Path) -> Build:
    """Read a build back.

    Raises:
        BuildError: a file is missing, was changed (except stages, which may be edited), or is of another version.
    """
    plan = load_plan(folder := Path(taken("folder", folder, str)))
    try:
        tensors = load_file(folder / plan.weights.file)
    except (SafetensorError, OSError) as error:
        hint = f"compile the model again: fxpipe compile MODEL -o {folder}"
        raise BuildError(f"{plan.weights.file} cannot be read: {error}", where=str(folder), hint=hint) from error
    files = {part.file: _source(folder / part.file) for part in plan.code}
    return Build(
        plan,
        files,
        tensors,
        **optional_files(folder, plan),
        programs=texts_of(_source(folder / PROGRAM)) if (folder / PROGRAM).is_file() else (),
        node_costs=(folder / NODE_COSTS).read_text() if (folder / NODE_COSTS).is_file() else None,
        folder=folder,
    )


def join(folder: str | Path, hooks: Hooks = NO_HOOKS, *, out: str | Path | None = None, **changes: Any) -> Pipeline:
    """Be one worker of the processes that torchrun started, each of which runs the user's own loop with the same calls.

        with fxpipe.join("build/", optimizer=make_optimizer) as pipeline:
            for batch in data:
                loss = pipeline.step(batch)

    Args:
        folder: of the build; each process has one with the same content.
        hooks, changes: as those of `Build.local`, and threads and stall_timeout: see
            `fxpipe.runtime.options.RunOptions`.
        out: as in `Build.local`.

    Raises:
        FxpipeError: an option does not exist, or belongs to fxpipe's own loop; or a mistake that `Build.local`
            finds.
        RunError: torchrun started another number of processes than the build has workers, or none; or they were given
            different things.
    """
    from fxpipe.runtime.options import RunOptions
    from fxpipe.runtime.process.check_run import check_own_loop
    from fxpipe.runtime.process.start import open_joined

    hooks, option_values = split_hooks(hooks, OF_LOOPS, changes)
    check_own_loop(option_values)
    build = load(folder)
    chosen = changed(RunOptions(str(build.folder)), option_values if out is None else {**option_values, "out": out})
    return open_joined(chosen, build._task(chosen, hooks))


def optional_files(folder: Path, plan: Plan) -> dict[str, Any]:
    """The files of a build's folder that a run does not need: its costs, profile, nodes and passes, as fields of
    `Build`.

    A missing file has no entry.
    """
    readers: dict[str, tuple[str, Callable[[Path], Any]]] = {
        "profile": (PROFILE, partial(read_profile_json, error=BuildError, hint="compile again, or delete it")),
        "nodes": (NODES, read_table),
        "passes": (PASSES, lambda path: tuple(path.read_text(encoding="utf-8", errors="replace").splitlines())),
    }
    contents = {name: read(folder / file) for name, (file, read) in readers.items() if (folder / file).is_file()}
    costs = read_costs(folder, plan)
    return contents if costs is None else contents | {"costs": costs}


def _source(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        hint = f"compile the model again: fxpipe compile MODEL -o {path.parent}"
        raise BuildError(f"{path.name} cannot be read: {first_line(error)}", where=str(path), hint=hint) from error


def weights_bytes(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """The content of the file."""
    _check_dtypes(tensors)
    return save({name: t.contiguous() for name, t in _unshared(tensors).items()})


def _check_dtypes(tensors: Mapping[str, torch.Tensor]) -> None:
    names: dict[torch.dtype, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(tensor.dtype, []).append(name)
    unfit = []
    for dtype, of_dtype in names.items():
        try:
            save({"empty": torch.empty(0, dtype=dtype)})
        except (KeyError, SafetensorError):
            unfit.append(f"{listed(of_dtype)} ({str(dtype).removeprefix('torch.')})")
    if unfit:
        raise BuildError(
            f"a safetensors file cannot hold {' and '.join(unfit)}",
            hint="use complex64 for complex128, or keep real and imaginary parts and join them with torch.complex",
        )


def _unshared(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors, with copies of those that share another's memory: the file format does not allow sharing."""
    seen: set[int] = set()
    separate = {}
    for name, tensor in tensors.items():
        pointer = tensor.untyped_storage().data_ptr()
        separate[name] = tensor.clone() if pointer in seen and tensor.numel() else tensor
        seen.add(pointer)
    return separate

"""Where a run goes on: the checkpoint, and whether minibatches in flight are continued.

Imports torch only where tensors are read, because the launcher needs the options and no torch.
"""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import fxpipe
from fxpipe.checkpoint.manifest import OTHER, Manifest, check_files, read_manifest
from fxpipe.checkpoint.shelf import CHECKPOINTS, Shelf
from fxpipe.errors import CheckpointError, FxpipeError, ScheduleError, listed
from fxpipe.messages import say, warn
from fxpipe.options import unfit
from fxpipe.plan.plan import Plan
from fxpipe.policy.recipe import Recipe, choose
from fxpipe.runtime.options import KEPT, PipelineOptions, RunOptions
from fxpipe.settings import pairs, read, texts

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from fxpipe.checkpoint.shard import Shard
    from fxpipe.checkpoint.starting_weights import Checkpoint
    from fxpipe.runtime.worker.executor import Executor

Options = TypeVar("Options", bound=PipelineOptions)

GONE = {"sync_steps": "--sync-steps", "rate_discount": "--rate-discount"}
"""Options of earlier versions of fxpipe: their names in a checkpoint and on the command line."""

NEWEST = "newest"


@dataclass(frozen=True)
class Resumed:
    """The checkpoint that a run goes on from.

    Attributes:
        exact: the same cuts, schedule and policy, so minibatches in flight go on. Otherwise the pipeline begins empty,
            with the weights of this step on every worker.
    """

    path: Path
    manifest: Manifest
    exact: bool

    @property
    def step(self) -> int:
        """How many steps have been made."""
        return self.manifest.step

    @property
    def separate(self) -> bool:
        """Whether its replicas trained separately."""
        return "outer" in self.manifest.run

    def shards(self, worker: int, replica: int = 0) -> list[Shard]:
        """The shards that a replica of a worker needs: its own if the run is the same, else those of all workers.

        Its own shard is the first replica's, overridden by what the replica has written itself. If replicas train
        separately, that is all but the position in the data and the decisions. New replicas take the first one's.

        `Checkpoint` reads and compares the model's files.
        """
        from fxpipe.checkpoint.shard import Shard, replicas_in

        wanted = [worker] if self.exact else range(self.manifest.workers)
        shards = [self._read(each) for each in wanted]
        others = [(each, r) for each in wanted for r in replicas_in(self.manifest.files, each)]
        if not self.exact:
            more = [] if self.separate else [self._read(*place) for place in others]
            return shards + [shard for shard in more if shard.state]
        if replica:
            (shard,) = shards
            own = self._read(worker, replica) if (worker, replica) in others else Shard(self.step)
            state = {**shard.state, **own.state}
            if self.separate:
                return [dataclasses.replace(own, data=shard.data, state=state)]
            return [dataclasses.replace(shard, codecs=own.codecs, state=state)]
        return shards

    def _read(self, worker: int, replica: int = 0) -> Shard:
        from fxpipe.checkpoint.shard import read_shard, state_files
        from fxpipe.runtime.worker.weights import forms

        workers = self.manifest.workers
        check_files(self.path, self.manifest, state_files(worker, workers, replica))
        return read_shard(self.path, self.step, worker, workers, forms(), replica)

    @property
    def start(self) -> int:
        """The first minibatch of the rows that go on: they began there with an empty pipeline."""
        return self.manifest.start if self.exact else self.step


def resumed_options(options: Options, out: str | Path | None) -> Options:
    """The options of a run; if it goes on from a checkpoint, options that are not given are the checkpoint's.

    Called again on its result, it changes nothing.

    Raises:
        CheckpointError: there is no whole checkpoint; or the folder has checkpoints of another run.
    """
    shelf = None if out is None else Shelf.of(out)
    if options.resume is None:
        if shelf is not None and shelf.steps():
            raise CheckpointError(
                f"{out} has the checkpoints of an earlier run, at step {shelf.steps()[-1]} the newest",
                hint="--resume goes on from there; for a new run choose another --out, or delete them",
            )
        return options
    if options.resume == NEWEST:
        if shelf is None:
            raise CheckpointError("without an output folder there is no newest checkpoint", hint="--resume PATH")
        path, manifest, damaged = shelf.newest()
        for error in damaged:
            warn(f"{error.where}: {error.what}; going on from {path.name} instead")
    else:
        path = Path(options.resume)
        manifest = read_manifest(path)
        later = [step for step in shelf.steps() if step > manifest.step] if shelf is not None else []
        if later and options.weights != options.resume:
            raise CheckpointError(
                f"{out} has checkpoints of later steps than {manifest.step}: {listed([f'step-{s}' for s in later])}",
                hint="choose another --out, or delete them",
            )
    if options.weights not in (None, str(path)):
        raise CheckpointError("a run goes on with the weights of its checkpoint: leave out --weights")
    if gone := [flag for name, flag in GONE.items() if manifest.run.get(name)]:
        raise CheckpointError(
            f"the run was made with {' and '.join(gone)}, which this fxpipe no longer has",
            where=str(path),
            hint="end it with the fxpipe that began it, or begin a new run with its weights: --weights CHECKPOINT",
        )
    names = [name for name in KEPT if getattr(options, name) == getattr(PipelineOptions, name)]  # not given
    if "schedule" not in names and options.schedule != manifest.run["schedule"]:
        names = [name for name in names if name != "policy"]  # a policy belongs to its schedule
    kept = {name: manifest.run[name] for name in names if name in manifest.run}  # earlier versions had fewer
    if wrong := unfit(PipelineOptions, kept):
        raise CheckpointError(f"no run can go on from this checkpoint: its {wrong}", where=str(path), hint=OTHER)
    if isinstance(options, RunOptions):
        kept["settings"] = texts(pairs(manifest.run.get("settings", ())) | pairs(options.settings))
        if options.arguments is None and manifest.run.get("arguments") is not None:
            kept["arguments"] = tuple(manifest.run["arguments"])
    return dataclasses.replace(options, resume=str(path), weights=str(path), **kept)


def recipe_of(plan: Plan, options: PipelineOptions) -> Recipe:
    """The schedule and the policy of a run with these options (those of `resumed_options`).

    Raises:
        ScheduleError, PolicyError: as `choose`; for the checkpoint's schedule the hint says how to choose another.
    """
    try:
        return choose(plan, options.schedule, options.policy)
    except ScheduleError as error:
        if options.resume is None or options.schedule != read_manifest(Path(options.resume)).run["schedule"]:
            raise
        own = f"to go on with the build's own schedule, add --schedule {plan.schedule} to the command"
        raise ScheduleError(
            f"{error.what}; a run keeps the schedule of its checkpoint unless --schedule names another",
            where=options.resume,
            hint=f"{own}; or {error.hint}" if error.hint else own,
        ) from error


def newest_options(options: Options, out: str | None) -> Options:
    """The options of an interrupted run that begins again: it goes on from its newest whole checkpoint, if any."""
    if options.checkpoint_every is None or out is None or not Shelf.of(out).steps():
        return options
    return resumed_options(dataclasses.replace(options, resume=NEWEST, weights=None), out)


def step_before(options: PipelineOptions) -> int:
    """How many steps were made before a run with these options begins (those of `resumed_options`)."""
    return 0 if options.resume is None else read_manifest(Path(options.resume)).step


def check_length(resumed: Resumed | None, total: int) -> None:
    """Refuse to go on with a run that has already made more steps than it should have in all."""
    if resumed is not None and resumed.step > total:
        raise CheckpointError(
            f"the checkpoint is of step {resumed.step}, but the run should have {total} steps in all",
            where=str(resumed.path),
            hint=f"--steps counts from the beginning: give one above {resumed.step}",
        )


def run_before(options: PipelineOptions) -> Path | None:
    """The output folder of the run that wrote the checkpoint; None if the checkpoint was moved elsewhere."""
    shelf = None if options.resume is None else Path(options.resume).absolute().parent
    return shelf.parent if shelf is not None and shelf.name == CHECKPOINTS else None


def say_resumed(resumed: Resumed) -> None:
    """Print where a run goes on, and what differs from the interrupted run."""
    text = f"going on after step {resumed.step}, from {resumed.path}"
    before, now = resumed.manifest.run.get("values", {}), read()
    if other := [f"{name} {now[name]}, not {old}" for name, old in before.items() if now.get(name, old) != old]:
        text += f", with {'; '.join(other)}; the saved state of optimizer and scheduler, such as rates, stays"
    if not resumed.exact:
        text += ": the build, the schedule or the policy differs, so the pipeline begins empty"
        if resumed.separate:
            text += ", with the common weights of replicas that trained separately, and the first one's optimizer"
    say(text)


def opened(options: PipelineOptions, recipe: Recipe, plan: Plan, checkpoint: Checkpoint | None) -> Resumed | None:
    """The checkpoint that `resumed_options` found; None if the run begins anew."""
    if options.resume is None:
        return None
    assert checkpoint is not None, "a run goes on with the weights of its checkpoint"
    assert checkpoint.manifest is not None
    manifest = checkpoint.manifest
    about = run_of(options, recipe)
    same = all(manifest.run[name] == about[name] for name in ("schedule", "policy"))
    return Resumed(Path(options.resume), manifest, same and manifest.plan == plan.digest)


def open_checkpoint(
    folder: str | Path, options: PipelineOptions, recipe: Recipe, plan: Plan
) -> tuple[Checkpoint, Resumed]:
    """Open a checkpoint that a user's own loop goes on from; the loop keeps its options.

    Raises:
        BuildError: it does not fit the plan.
        CheckpointError: it is no checkpoint of fxpipe, or was changed.
    """
    from fxpipe.checkpoint.starting_weights import Checkpoint

    checkpoint = Checkpoint.open(folder, plan)
    if checkpoint.manifest is None:
        raise CheckpointError(
            f"{folder} has weights, but no training state",
            hint="to start from weights, make the pipeline with weights=...",
        )
    options = dataclasses.replace(options, resume=str(folder), weights=str(folder))
    resumed = opened(options, recipe, plan, checkpoint)
    assert resumed is not None
    return checkpoint, resumed


def about_run(options: PipelineOptions, recipe: Recipe, plan: Plan) -> dict[str, Any]:
    """What a manifest says of the run."""
    import torch

    versions = {"fxpipe": fxpipe.__version__, "torch": torch.__version__, "python": platform.python_version()}
    outer = {} if plan.outer is None else {"outer": dataclasses.asdict(plan.outer)}
    run = {**run_of(options, recipe), **outer}
    if isinstance(options, RunOptions):
        run |= {"settings": options.settings, "arguments": options.arguments, "values": read()}
    return {"plan": plan.digest, "run": run, "versions": versions}


def run_of(options: PipelineOptions, recipe: Recipe) -> dict[str, Any]:
    """The options that the numbers depend on; where they are not given, the build's."""
    found = {name: getattr(options, name) for name in KEPT}
    return {**found, "schedule": recipe.schedule.name, "policy": str(recipe.policy)}


def begin_or_go_on(executor: Executor, resumed: Resumed | None, shards: list[Shard], stop: int | None = None) -> None:
    """Begin a worker's row, or go on in the middle of the checkpoint's."""
    if resumed is None or not resumed.exact:
        executor.store.begin(executor.store.version, stop)
        return
    past = {version: _placed(held, executor.device) for version, held in shards[0].past.items()}
    sent = {reader: _placed(held, executor.device) for reader, held in shards[0].sent.items()}
    with _fitting(resumed):
        executor.store.begin(resumed.manifest.start, stop, past, sent)


def _placed(held: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Weights that were read into the CPU's memory, on the worker's device."""
    return {name: value.to(device) for name, value in held.items()}


def restore(
    plan: Plan, executors: Sequence[Executor], resumed: Resumed, read: list[list[Shard]] | None = None
) -> list[list[Shard]]:
    """Restore each worker's state from the checkpoint, except what is in flight; return its shards."""
    if read is None:
        read = [resumed.shards(executor.worker, executor.replica) for executor in executors]
    for executor, shards in zip(executors, read, strict=True):
        with _fitting(resumed):
            executor.load(shards, resumed.exact)
    _say_what_trains(plan, executors, read)
    return read


def _say_what_trains(plan: Plan, executors: Sequence[Executor], read: Sequence[list[Shard]]) -> None:
    """Print which parameters are trained and were not before, and which are no longer trained."""
    from fxpipe.checkpoint.optimizer_state import updated_in
    from fxpipe.runtime.wires.exchange import gathered

    process = plan.mesh.process_of(executors[0].worker, executors[0].replica)
    states = [shard.state["updater"] for shards in read for shard in shards if "updater" in shard.state]
    before = {name for state in states for name in updated_in(state["optimizer"])}
    now = {name for executor in executors for name in executor.store.updater.updated}
    every = gathered((before, now))
    before, now = (set().union(*sets) for sets in zip(*every, strict=True))
    names = [p.name for p in plan.parameters]
    lines = []
    if new := [name for name in names if name in now - before]:
        lines.append(f"trained from here on, with a fresh state of the optimizer: {listed(new, 6)}")
    if old := [name for name in names if name in before - now]:
        lines.append(f"no longer trained, and their state is dropped: {listed(old, 6)}")
    if lines and process == 0:
        say("; ".join(lines))


@contextmanager
def _fitting(resumed: Resumed) -> Iterator[None]:
    """Any error inside becomes one that says that the checkpoint does not fit: the user's objects are loaded, too."""
    try:
        yield
    except FxpipeError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"the checkpoint does not fit here: {type(error).__name__}: {error}",
            where=str(resumed.path),
            hint="go on with the build and the model file that it was made with; or take another: --resume PATH",
        ) from error

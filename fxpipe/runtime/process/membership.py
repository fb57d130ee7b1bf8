"""A process of a run among the others: they meet, agree on what they run, and leave, in order or after errors.

The processes of one run may read builds on several machines. If these differ in a bit of a weight, the run would
silently train wrong weights; with other cuts it would crash. So every worker sends what it has, and every worker
compares all of it with what worker 0 has.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

import fxpipe
from fxpipe.checkpoint.manifest import MANIFEST, check_files, read_manifest
from fxpipe.checkpoint.shard import worker_of
from fxpipe.checkpoint.shelf import Shelf
from fxpipe.checkpoint.starting_weights import Checkpoint
from fxpipe.errors import CheckpointError, FxpipeError, PeerLost, PeerRefused, RunError, WorkerLost, listed
from fxpipe.files import Snapshot, digest
from fxpipe.messages import warn
from fxpipe.observe.pulse import PULSES, STEP, PostedPulses, Pulse, PulseFile, Pulses, Signs
from fxpipe.plan.build_folder import model_path
from fxpipe.plan.mesh import MESH, Mesh
from fxpipe.plan.plan import Plan
from fxpipe.precision import precision_flags, precision_text
from fxpipe.runtime.options import RunOptions
from fxpipe.runtime.process.check_run import check_run, files_read, task_of_run, writing
from fxpipe.runtime.process.device import own_device
from fxpipe.runtime.process.ends import end_process, process_name, without_error
from fxpipe.runtime.process.last_saved import name_checkpoint
from fxpipe.runtime.process.resume import NEWEST, resumed_options
from fxpipe.runtime.process.stall import LIMIT, LOADING, WatchingWorker
from fxpipe.runtime.wires.board import Board, FolderBoard, StoreBoard
from fxpipe.runtime.wires.exchange import gathered
from fxpipe.runtime.wires.group import (
    close_group,
    forget_group,
    leave_after,
    name_process,
    open_group,
    peers,
    place_of_process,
)
from fxpipe.task.model_file import Task
from fxpipe.threads import threads_for
from fxpipe.torch_private import default_store

TIMEOUT = timedelta(minutes=30)
"""Of the process group, at least; the process that watches the workers ends a run that stands still."""

FOREVER = timedelta(days=365)
LINGER = 3.0
"""Seconds that a worker waits after it lost its peer, so that the peer's own error is seen first."""


@dataclass(frozen=True)
class Member:
    """One process of a run: its own pulse, those of all, and the board that all see."""

    agreed: Agreed
    rank: int
    pulse: Pulse
    pulses: Pulses
    board: Board


@contextmanager
def membership(
    options: RunOptions, task: Task | None = None, pulse: Pulse | None = None, problem: FxpipeError | None = None
) -> Iterator[Member]:
    """Be one of the processes that the environment describes (RANK, WORLD_SIZE, MASTER_ADDR, …), or of the group that
    the caller has made.

    Without a task, the hooks are those of the model file. If this process was started by `launch`, it has a pulse,
    which its launcher reads. All others learn of its problem, if it refuses.

    Raises:
        PeerLost: another worker stopped first; the caller exits quietly.
        WorkerLost: the same, and that worker gave no error: on the process that sees it first.
        FxpipeError: a user's mistake, on the worker that found it; before the first step, on all workers.
    """
    if (place := place_of_process()) is None:
        raise RunError(
            "this process was not started by torchrun: it has no RANK and WORLD_SIZE",
            hint="torchrun --nproc-per-node N SCRIPT, or build.local() for all workers in one process",
        )
    pulse = pulse or Pulse()
    pulse.phase = "loading"
    rank, world = place
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    torch.set_num_threads(threads_for(options.threads, local_ranks))
    longest = 2 * LOADING * LIMIT * timedelta(seconds=options.stall_timeout) or FOREVER
    folder = None if options.board is None else FolderBoard(options.board)
    open_group(rank, world, max(TIMEOUT, longest), folder, options.stall_timeout)
    board: Board | None = folder
    with ExitStack() as held:
        try:
            agreed = agree(options, task, rank, world, held, problem)
            torch.set_num_threads(threads_for(options.threads, agreed.neighbours))  # several torchruns may share a host
        except BaseException as error:
            leave_after(error)  # all workers are here, and all of them stop
            raise
        try:
            name_process(process_name(rank, agreed.plan.mesh))
            with peers():
                board = board or StoreBoard(default_store())
            yield Member(agreed, rank, pulse, _pulses(pulse, agreed, rank, world, board), board)
        except BaseException as error:
            shown = error
            if isinstance(board, StoreBoard):  # else the launcher does it
                if board.first("ended") and isinstance(error, PeerLost):
                    shown = _lost(pulse, rank, agreed.plan.mesh)
                if isinstance(shown, FxpipeError) and pulse.numbers[STEP]:
                    name_checkpoint(shown, agreed.options, agreed.options.out)
            if shown is not error:
                raise shown from error
            if isinstance(error, PeerLost):
                time.sleep(LINGER)
            raise
        finally:
            pulse.end()
            if sys.exc_info()[0] is None:
                close_group()
            else:
                forget_group()


def _lost(pulse: Pulse, rank: int, mesh: Mesh) -> WorkerLost:
    """The error for a process that is gone and has not said why: the one that this process, `rank`, waits for."""
    pulse.beat()
    signs = Signs.of(pulse.numbers)
    others = [] if signs.what is None else [other for other in mesh.of_rank(mesh.rank_of(signs.other)) if other != rank]
    return without_error(process_name(others[0], mesh) if len(others) == 1 else "another worker", None, signs.place)


def _pulses(pulse: Pulse, agreed: Agreed, rank: int, ranks: int, board: Board) -> Pulses:
    """Where the pulses of all processes can be read, this one's among them."""
    if isinstance(board, FolderBoard):  # the launcher watches
        return PulseFile(board.path / PULSES, ranks)
    pulses = PostedPulses(board, ranks)
    with peers():
        pulses.put(rank, pulse.numbers)
    pulse.after_beat.append(WatchingWorker(pulses, pulse, rank, agreed.options, end_process, agreed.plan.mesh))
    pulse.begin()
    return pulses


PLACES = ("build", "model_file", "weights", "resume", "out", "trace", "log")
"""Options that may name different places on each machine: only whether they are given must be the same."""
OWN = ("progress", "board", "plan_digest")
"""Options that may differ between processes."""
MOST_LINES = 12

Gather = Callable[[Any], list[Any]]
"""What each worker gives, by worker; all of them call it."""


@dataclass(frozen=True)
class Agreed:
    """What a worker runs, the same on all of them. The files are those that it reads, in their state when it checked
    them; `neighbours` counts the processes of the run on this host, itself included."""

    options: RunOptions
    plan: Plan
    task: Task
    files: Snapshot
    checkpoint: Checkpoint | None
    neighbours: int = 1


@dataclass(frozen=True)
class _Said:
    """What one worker sends to the others. `facts` must be the same everywhere; `checkpoint` has the files of
    `--weights` with their sizes and times: equal ones need not be read."""

    host: str
    facts: dict[str, str] = dataclasses.field(default_factory=dict)
    checkpoint: tuple[Any, ...] = ()
    problem: FxpipeError | None = None


def agree(
    options: RunOptions, task: Task | None, rank: int, world: int, held: ExitStack, problem: FxpipeError | None = None
) -> Agreed:
    """Check what this worker was given, and compare it with the others; called by all, in an open group. `held` gets
    the lock of the output folder, if this worker writes there and no launcher has the lock.

    Raises:
        FxpipeError: this worker refuses, as `check_run`.
        PeerRefused: another worker refuses; the message names it.
        RunError: the workers were given different things; names the worker and all differences.
    """
    files, plan, facts, checkpoint = Snapshot({}), None, dict[str, str](), None
    try:
        if rank == 0 and options.board is None and problem is None:
            held.enter_context(writing(options.out))
    except FxpipeError as error:
        problem = error
    host = socket.gethostname()
    _refuse_with(gathered(_Said(host, problem=problem)), MESH, problem)  # before the others read anything
    newest = options.resume == NEWEST and options.weights is None and options.out is not None
    shelf = Shelf.of(str(options.out)) if newest else None
    path = newest_of_all(shelf, rank, world, gathered)
    try:
        if path is not None:
            options = dataclasses.replace(options, resume=str(path), weights=str(path))
        options = resumed_options(options, options.out)
        files = files_read(options)
        plan, checkpoint = check_run(options, from_file=task is None, writes=rank == 0)
        if world != plan.processes:
            raise _other_number(plan, world, options.build)
        own_device(plan.device)  # before the model file is imported, which may use it
        task = task or task_of_run(plan, options, says=rank == 0)
        facts = facts_of(plan, options) | {"callbacks": ", ".join(task.callbacks.names) or "none"}
        # Each worker compares what it reads with the manifest.
        if checkpoint is not None and checkpoint.manifest is not None:
            facts[f"--weights: {MANIFEST}"] = _digest(checkpoint.path / MANIFEST)
    except FxpipeError as error:
        problem = error
    unsigned = checkpoint.files if checkpoint is not None and checkpoint.manifest is None else []
    identities = tuple((host, *(files.identities.get(file) or ())) for file in unsigned)
    answers = gathered(_Said(host, facts, identities, problem))
    _refuse_with(answers, MESH if plan is None else plan.mesh, problem)
    assert plan is not None
    if any(other.checkpoint != answers[0].checkpoint for other in answers):
        digests = {f"--weights: {file.name}": _digest(file) for file in unsigned}
        answers = gathered(_Said(host, facts | digests))
    _refuse_differences(answers, options, plan.mesh)
    assert task is not None
    return Agreed(options, plan, task, files, checkpoint, sum(other.host == host for other in answers))


def _other_number(plan: Plan, world: int, build: str) -> RunError:
    on = f" on {plan.ranks} rank{'s' if plan.ranks > 1 else ''}" if plan.virtual else ""
    replicas = f", with {plan.dp} replicas of each" if plan.dp > 1 else ""
    instead = f"-n {world}" if plan.dp == 1 else f"another -n and --dp, whose product is {world}"
    if plan.crossing:
        replicas = f", with {listed([str(count) for count in plan.replicas])} replicas"
        instead = f"other --replicas, whose sum is {world}"
    return RunError(
        f"the build has {plan.workers} worker{'s' if plan.workers > 1 else ''}{on}{replicas}, but {world} process"
        f"{'es were' if world > 1 else ' was'} started",
        where=build,
        hint=f"start {plan.processes} processes in all, or compile with {instead}",
    )


def facts_of(plan: Plan, options: RunOptions) -> dict[str, str]:
    """What decides the numbers of a run, by name: versions, the plan, the code as it is now, the options."""
    facts = {"fxpipe": fxpipe.__version__, "torch": torch.__version__}
    facts["precision"] = precision_text(precision_flags(plan.device))
    for name, value in dataclasses.asdict(plan).items():
        fields = value if dataclasses.is_dataclass(getattr(plan, name)) else {"": value}
        facts |= {f"plan.json: {name}.{field}".rstrip("."): _shown(inner) for field, inner in fields.items()}
    for code in plan.code:
        facts[code.file] = _digest(Path(options.build) / code.file)
    if (model := model_path(plan, options.build, options.model_file)) is not None:
        for name in plan.model_file.sources:  # they may have changed, but on all machines alike
            own = name == plan.model_file.name
            facts[f"source {name}"] = _digest(model if own else model.resolve().parent / name)
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if field.name in PLACES:
            facts[f"option {field.name}"] = "given" if value is not None else "not given"
        elif field.name not in OWN:
            facts[f"option {field.name}"] = str(value)
    return facts


def _shown(value: Any) -> str:
    """A short value itself, or the digest of a long one."""
    if value is None or isinstance(value, (bool, int)) or (isinstance(value, str) and len(value) <= 64):
        return str(value)
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def _digest(file: Path) -> str:
    try:
        return digest(file)[:16]
    except OSError as error:
        return error.strerror or "not to be read"


def _refuse_with(answers: Sequence[_Said], mesh: Mesh, own: FxpipeError | None) -> None:
    """Refuse for this process's own problem, or if another process refuses."""
    if own is not None:
        raise own
    for rank, other in enumerate(answers):
        if (problem := other.problem) is not None:
            what = f"{process_name(rank, mesh)} on {other.host} refused to begin: {problem.what}"
            raise PeerRefused(what, where=problem.where, hint=problem.hint, page=problem.page)


def _refuse_differences(answers: Sequence[_Said], options: RunOptions, mesh: Mesh) -> None:
    first = answers[0]
    lines = [
        f"{process_name(rank, mesh)} on {other.host}: {line}"
        for rank, other in enumerate(answers)
        for line in differences(other.facts, first.facts)
    ]
    if not lines:
        return
    shown = lines[:MOST_LINES] + ([f"and {len(lines) - MOST_LINES} more"] if len(lines) > MOST_LINES else [])
    raise RunError(
        "the workers were given different things:\n  " + "\n  ".join(shown),
        where=options.build,
        hint=f"copy the build (and the model file) of worker 0, on {first.host}, to every machine, and start all with "
        "the same options and versions",
    )


def differences(facts: Mapping[str, str], first: Mapping[str, str]) -> list[str]:
    """Each way in which a worker's facts differ from those of worker 0, in words."""
    names = [*first, *(name for name in facts if name not in first)]
    return [
        f"{name} is {facts.get(name, 'missing')}, on worker 0 it is {first.get(name, 'missing')}"
        for name in names
        if facts.get(name) != first.get(name)
    ]


@dataclass(frozen=True)
class _Found:
    """What a worker found of a checkpoint: what is wrong with its part, or the digest of the manifest."""

    problem: str | None
    manifest: str = ""


def newest_of_all(shelf: Shelf | None, worker: int, workers: int, gather: Gather) -> Path | None:
    """The folder of the newest checkpoint of which every worker finds its part whole; called by all of them.

        worker 0:  step-900: files 1 of 4 are whole   │           │ step-600: whole │
        worker 3:  step-900: optimizer-00004 is short │ all learn │ step-600: whole │ all go on from step-600

    The files of worker k are worker k's part of the checkpoint; where fewer workers go on, they share the files.
    Without a shelf, this worker was not asked to look for it. None if some worker was not asked, or no checkpoint is
    whole: each worker that looks then says what is wrong.
    """
    seen = gather(None if shelf is None else shelf.steps())
    if any(steps is None for steps in seen):
        return None
    assert shelf is not None
    for step in sorted({step for steps in seen for step in steps}, reverse=True):
        path = shelf.path(step)
        looks: list[_Found] = gather(_looked_at(path, worker, workers))
        others = [k for k, other in enumerate(looks) if other.manifest != looks[0].manifest]
        problems = [f"worker {k}: {other.problem}" for k, other in enumerate(looks) if other.problem is not None]
        if not problems and others:
            problems = [f"worker {others[0]} has a different one from worker 0"]
        if not problems:
            return path
        if worker == 0:
            warn(f"{path}: {'; '.join(problems)}; it is left out")
    return None


def _looked_at(path: Path, worker: int, workers: int) -> _Found:
    try:
        manifest = read_manifest(path)
        check_files(path, manifest, [name for name in sorted(manifest.files) if worker_of(name) % workers == worker])
    except CheckpointError as error:
        return _Found(error.what)
    return _Found(None, manifest.digest)

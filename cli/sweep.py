"""`fxpipe sweep`: runs of a build with several settings, one by one or at the same time, and one table of them."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Lock
from typing import Any

import click
from fxpipe.cli.compare import print_runs
from fxpipe.cli.model_arguments import WithArguments
from fxpipe.cli.option_fields import AbsolutePath
from fxpipe.cli.output import note, show_error, warn
from fxpipe.cli.run import checked_plan, given_to_run, run_command

from fxpipe.errors import RunError
from fxpipe.plan.build_folder import model_path
from fxpipe.runtime.options import RunOptions
from fxpipe.settings import pair
from fxpipe.threads import threads_for

NOTE = "sweep.json"
"""File in the folder of each run: the digest of what its numbers depend on, and whether it has ended."""

_OF_ONE_RUN = ("local", "as_json", "out", "config", "print_config")

GRACE = 20.0
"""Seconds that a run has to end after it was asked to."""


@dataclass(frozen=True)
class _Swept:
    """A run of a sweep.

    Attributes:
        name: its settings, and so its folder's name.
        options: its options of `fxpipe run`.
        of: the digest of everything that its numbers depend on.
    """

    name: str
    folder: Path
    options: tuple[str, ...]
    of: str

    @property
    def note(self) -> dict[str, Any]:
        """What the note in its folder says; empty if that is of another run."""
        with suppress(OSError, ValueError):
            found = json.loads((self.folder / NOTE).read_text())
            if isinstance(found, dict) and found.get("of") == self.of:
                return found
        return {}

    @property
    def ended(self) -> bool:
        """Whether its folder has its complete result."""
        return bool(self.note.get("ended")) and (self.folder / "run.json").is_file()


@click.command("sweep", cls=WithArguments, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
@click.argument("build", type=AbsolutePath())
@click.option("--policy", metavar="NAME,…", help="Policies to try.")
@click.option("--schedule", metavar="NAME,…", help="Schedules to try.")
@click.option("--set", "settings", type=pair, multiple=True, metavar="NAME=VALUE,…", help="Values of a setting to try.")
@click.option(
    "--seeds",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Runs of each combination, with seeds 0, 1, … for data and dropout; all begin with the build's weights.",
)
@click.option("--jobs", type=click.IntRange(1), default=1, show_default=True, help="Runs at a time.")
@click.option(
    "--processes", is_flag=True, help="Train each run in several processes, one for each stage, instead of one."
)
@click.option(
    "-o", "--out", type=AbsolutePath(file_okay=False), default="sweep", show_default=True, help="Where runs go."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def sweep_command(
    context: click.Context,
    build: str,
    policy: str | None,
    schedule: str | None,
    settings: tuple[str, ...],
    seeds: int,
    jobs: int,
    processes: bool,
    out: str,
    as_json: bool,
    arguments: tuple[str, ...] | None,
) -> int:
    """Run a BUILD once for each combination of values, and compare the runs.

    All other options are those of `fxpipe run`, from the command line or fxpipe.toml, and apply to all runs. A run that
    has ended is not repeated unless the build, the model file or an option has changed. So an interrupted sweep
    continues, and a sweep with more values adds only the new runs. If a run fails, the others go on. A setting that
    capture has read needs one compile for each value. In the table, a loss is the mean of the last 20 steps, or of all
    if there are fewer.

    \b
    fxpipe sweep build/ --steps 20 --policy spectrain,latest,stash
    fxpipe sweep build/ --steps 20 --clip-norm 1.0 --schedule async,gpipe --seeds 2 --jobs 2 --out sweep/
    """
    axes = [[("--policy", value) for value in policy.split(",")]] if policy else []
    axes += [[("--schedule", value) for value in schedule.split(",")]] if schedule else []
    for text in settings:
        name, _, values = text.partition("=")
        axes.append([("--set", f"{name}={value}") for value in values.split(",")])
    axes.append([("--seed", str(seed)) for seed in range(seeds)])
    fixed = (*context.args, *(() if processes else ("--local",)))
    own = () if arguments is None else ("--", *arguments)
    runs = [_run(Path(out), build, [*choice], fixed, own) for choice in itertools.product(*axes)]
    Path(out).mkdir(parents=True, exist_ok=True)
    left = [run for run in runs if not run.ended]
    if done := len(runs) - len(left):
        note(f"{done} of {len(runs)} runs have ended already")
    failed = _play(build, left, jobs, own)
    ended = [str(run.folder) for run in runs if run.ended]
    if ended:
        print_runs(ended, seeds > 1, as_json)
    return 1 if failed else 0


def _run(out: Path, build: str, choice: Sequence[tuple[str, str]], fixed: Sequence[str], own: Sequence[str]) -> _Swept:
    """One run, after `fxpipe run` has read its options and checked that the build can do what they ask.

    Raises:
        click.UsageError: an option that `fxpipe run` does not have, or that the sweep sets itself.
        FxpipeError: whatever refuses the run before it begins.
    """
    given = [text for pair in choice for text in pair]
    parent = click.get_current_context()
    with run_command.make_context("run", [build, *given, *fixed, *own], parent) as read:
        taken = given_to_run(build, read.params, read.params["config"], say=False)
        asked = {name: one for name, one in read.params.items() if name not in _OF_ONE_RUN}
        if read.params["print_config"]:
            raise click.UsageError("a sweep has no --print-config: use fxpipe run BUILD --print-config")
        if read.params["resume"] is not None:
            raise click.UsageError("a sweep resumes interrupted runs by itself: leave out --resume")
        if str(read.params["seed"]) != dict(choice)["--seed"]:
            raise click.UsageError("--seeds chooses the seeds: leave out --seed")
    options = RunOptions(**asked)
    plan = checked_plan(options)
    path = model_path(plan, build, options.model_file)
    files = {} if path is None else {name: path.resolve().parent / name for name in plan.sources}
    sources = {name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in files.items() if file.is_file()}
    parts = [plan.digest, sources, given, [*fixed], [*own], *([taken] if taken else ())]
    name = " ".join(value.replace("/", "_") if flag != "--seed" else f"seed={value}" for flag, value in choice)
    of = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    return _Swept(name, out / name.replace(" ", ","), (*given, *fixed), of)


def _play(build: str, runs: Sequence[_Swept], jobs: int, own: Sequence[str]) -> int:
    """Run all, `jobs` at a time; returns how many failed. However this process ends, its runs end, too."""
    from fxpipe.runtime.process.guardian import Guardian

    failed = 0
    with tempfile.TemporaryDirectory(prefix="fxpipe_sweep_") as folder, Guardian(Path(folder)) as guardian:
        started: list[subprocess.Popen[str]] = []
        pool, lock, over = ThreadPoolExecutor(jobs), Lock(), Event()

        def play(run: _Swept) -> tuple[int, str]:
            resume = ["--resume"] if run.note and any((run.folder / "checkpoints").glob("step-*")) else []
            if not resume:
                _begin(run)
            command = [sys.executable, "-m", "fxpipe", "run", build, *run.options, *resume]
            threads = [] if "--threads" in run.options or jobs == 1 else ["--threads", str(threads_for(None, jobs))]
            with lock:
                if over.is_set():
                    return 1, ""
                process = subprocess.Popen(
                    [*command, *threads, "--out", str(run.folder), "--json", *own],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    text=True,
                    start_new_session=True,
                )
                started.append(process)
                guardian.guard(process.pid)
            text = process.communicate()[1]
            return process.returncode, text

        try:
            futures = [pool.submit(play, run) for run in runs]
            for number, (run, future) in enumerate(zip(runs, futures, strict=True), start=1):
                code, text = future.result()
                if code == 0:
                    _write(run, ended=True)
                    note(f"{number} of {len(runs)}: {run.name}")
                else:
                    failed += 1
                    warn(f"{run.name} failed")
                    show_error(text.strip().removeprefix("error: "))
        except BaseException:
            with lock:
                over.set()
            for process in started:
                _end(process)
            pool.shutdown(cancel_futures=True)
            for run in runs:
                if not run.ended and not (run.folder / "checkpoints").exists() and run.note:
                    shutil.rmtree(run.folder, ignore_errors=True)
            raise
        pool.shutdown()
    return failed


def _begin(run: _Swept) -> None:
    """Make the folder of a run, and delete what an earlier sweep left there.

    Raises:
        RunError: the folder is not of a sweep.
    """
    if run.folder.exists() and not (run.folder / NOTE).is_file():
        raise RunError(
            f"{run.folder} exists and was not made by a sweep", hint="choose another --out, or remove it yourself"
        )
    shutil.rmtree(run.folder, ignore_errors=True)
    run.folder.mkdir(parents=True)
    _write(run)


def _write(run: _Swept, ended: bool = False) -> None:
    (run.folder / NOTE).write_text(json.dumps({"of": run.of, "ended": ended}) + "\n")


def _end(process: subprocess.Popen[str]) -> None:
    """Ask a run to end, as Ctrl-C does; then end it."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()

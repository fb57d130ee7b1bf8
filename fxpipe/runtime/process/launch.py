"""Runs a build with processes on this machine: starts them, watches them, and says what came first when it fails."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fxpipe.errors import FxpipeError, PeerLost, WorkerLost, first_line
from fxpipe.messages import say, warn
from fxpipe.observe.trace.writer import partial
from fxpipe.plan.spec import MESH, Mesh
from fxpipe.runtime.options import RunOptions
from fxpipe.runtime.process.first_cause import first_cause, is_explained
from fxpipe.runtime.process.guardian import Guardian
from fxpipe.runtime.process.last_saved import RUNNING_ON, finish_writing, name_checkpoint
from fxpipe.runtime.process.requests import StopRequests
from fxpipe.runtime.process.resume import newest_options, step_before
from fxpipe.runtime.process.stall import StallWatch, waited_for_disk
from fxpipe.runtime.process.worker_processes import WorkerProcesses
from fxpipe.runtime.wires.doors import make_secret

GLANCE = 0.05
"""Seconds between two looks at the workers."""

ECHO = 1.0
"""Seconds that the first cause has to appear when all that is known are lost connections."""

GRACE = 5.0
"""Seconds that workers have to stop when they are asked to; then they are ended."""

SAVING = 600.0
"""The same for workers that save a checkpoint first."""

RESTARTED = (WorkerLost, PeerLost)
"""Errors after which another start may go well: a worker died, by a signal, by an exit of its process or by an error
that nobody foresaw, or it stood still. An error that explains itself would come again."""


def running_under_torchrun() -> bool:
    """Whether this process is a worker that torchrun (or anything like it) started."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def launch(options: RunOptions, ranks: int, mesh: Mesh = MESH) -> dict[str, Any]:
    """Run a build with `ranks` local processes; return the summary (see `summarize_run`).

    When a worker was lost, all of them are started again, at most `options.max_restarts` times. The summary's
    `restarts` says why, where that worker was, how many steps had begun, and after which step the run went on: that of
    the newest checkpoint, or 0.

    Args:
        mesh: the plan's, by which errors name a process.

    Raises:
        FxpipeError: the first error of any worker.
        KeyboardInterrupt: Ctrl-C; no process and no file is left.
        Stopped: another signal asked for it; likewise.
    """
    restarts: list[dict[str, Any]] = []
    with StopRequests() as requests:
        while True:
            furthest = FurthestStep()
            try:
                summary = _attempt(options, ranks, mesh, requests, furthest)
                break
            except FxpipeError as error:
                if not isinstance(error, RESTARTED) or len(restarts) == options.max_restarts or requests.asked:
                    if furthest.step:
                        name_checkpoint(error, options, options.out)
                    raise
                options = newest_options(options, options.out)
                begin = step_before(options)
                restarts.append(
                    {"cause": first_line(error), "where": error.where, "step": furthest.step, "from": begin}
                )
                count = f"restart {len(restarts)} of {options.max_restarts}"
                warn(f"{error}\n  all workers start again ({count}), after step {begin} of {furthest.step} begun")
    if restarts:
        from fxpipe.runtime.process.run_summary import write_run  # it imports torch, and most launchers do without

        summary["restarts"] = restarts
        write_run(summary)
    return summary


@dataclass
class FurthestStep:
    """How far the workers of a run have come: the last step that any has begun."""

    step: int = 0


def _attempt(
    options: RunOptions, ranks: int, mesh: Mesh, requests: StopRequests, furthest: FurthestStep
) -> dict[str, Any]:
    """Start the workers once and see them through; return the summary."""
    with (
        tempfile.TemporaryDirectory(prefix="fxpipe_run_", ignore_cleanup_errors=True) as folder,
        Guardian(Path(folder)) as guardian,
    ):
        exchange = Path(folder)
        make_secret(exchange)
        started = WorkerProcesses(dataclasses.replace(options, exchange=folder), ranks, exchange, guardian)
        grace = GRACE if options.checkpoint_every is None else SAVING
        stall = StallWatch(options.stall_timeout, started.stopped, mesh=mesh)
        try:
            _watch(started, requests, exchange, stall, grace, options.out, mesh)
        except FxpipeError:
            finish_writing(options.out, RUNNING_ON)
            raise
        finally:
            started.end()
            furthest.step = max(signs.step for signs in started.pulses.read())
            with suppress(OSError):  # left by a worker that was ended while it wrote
                if options.trace is not None:
                    partial(options.trace).unlink()
        summary: dict[str, Any] = json.loads((exchange / "summary.json").read_text())
        return summary


def _watch(
    workers: WorkerProcesses,
    requests: StopRequests,
    exchange: Path,
    stall: StallWatch,
    grace: float,
    out: str | None,
    mesh: Mesh,
) -> None:
    """Return when all workers have done their work.

    Raises:
        FxpipeError: one has not.
        KeyboardInterrupt, Stopped: they were asked to stop, and have.
    """
    while True:
        if requests.asked:
            _stop(workers, requests, grace)
        ends = workers.ended()
        signs = workers.pulses.read()  # after: a worker is done before it ends
        early = {rank: code for rank, code in ends.items() if code or signs[rank].phase != "done"}
        if early:
            deadline = time.monotonic() + ECHO
            while not is_explained(exchange, early) and workers.running() and time.monotonic() < deadline:
                time.sleep(GLANCE)
                early |= {rank: code for rank, code in workers.ended().items() if code}
            raise first_cause(exchange, early, signs, mesh)
        if len(ends) == len(signs):
            return
        if (standstill := stall.look(signs)) is not None:
            warn(standstill.text)
            if standstill.ends is not None and not waited_for_disk(signs, workers.pulses.read, out):
                raise standstill.ends
        time.sleep(GLANCE)


def _stop(workers: WorkerProcesses, requests: StopRequests, grace: float) -> None:
    """Ask the workers to stop; a second signal, or the end of the grace, ends them."""
    workers.ask_to_stop()
    if grace == SAVING:
        say("saving the run before it stops; a second signal stops it at once")
    deadline = time.monotonic() + grace
    while workers.running() and len(requests.asked) == 1 and time.monotonic() < deadline:
        time.sleep(GLANCE)
    workers.end()
    requests.give_up()

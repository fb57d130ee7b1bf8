"""Which of several ends of workers came first, and what it was: the others only follow from it."""

from __future__ import annotations

import json
import os
import signal
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fxpipe import errors
from fxpipe.errors import FxpipeError, PeerLost, PeerRefused, RunError, WorkerLost
from fxpipe.observe.pulse import Signs
from fxpipe.plan.spec import MESH, Mesh
from fxpipe.runtime.process.process_name import process_name

ECHOES = (PeerLost.__name__, PeerRefused.__name__)
"""Kinds of errors that only follow from another worker's."""


def leave_error(exchange: Path, rank: int, error: BaseException, who: str = "") -> None:
    """In a worker process: write down why it ends.

    Args:
        who: what to call it (see `process_name`).
    """
    if isinstance(error, SystemExit):
        error = ended_by_exit(error, who or process_name(rank))
    if isinstance(error, FxpipeError):
        said = {"what": error.what, "where": error.where, "hint": error.hint, "page": error.page}
        entry = {"kind": type(error).__name__, **said}
    else:
        trace = "".join(traceback.format_exception(error))
        entry = {"kind": None, "what": f"{type(error).__name__}: {error}", "trace": trace}
    path = exchange / f"{rank}.json"
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps({**entry, "rank": rank, "time": time.time()}))
    os.replace(temporary, path)


def ended_by_exit(error: SystemExit, who: str) -> WorkerLost:
    """What it means that the user's code has called `sys.exit`."""
    from fxpipe.tracing.user_lines import user_traceback

    shown = "" if error.code is None else repr(error.code)
    return WorkerLost(
        f"{who} was ended by sys.exit({shown})",
        where=user_traceback(error),
        hint="the model file, or code that it calls, ends the process: raise an error that says why",
    )


def known_errors(exchange: Path) -> list[dict[str, Any]]:
    """What workers have written down, the earliest first."""
    left = sorted((json.loads(path.read_text()) for path in exchange.glob("*.json")), key=lambda e: e.get("time", 0))
    return [entry for entry in left if "kind" in entry]


def is_explained(exchange: Path, ends: dict[int, int]) -> bool:
    """Whether the first cause is known: an end of its own, not only lost connections, which follow from others."""
    echoes = {entry["rank"] for entry in known_errors(exchange) if entry["kind"] in ECHOES}
    return any(rank not in echoes for rank in ends)


def first_cause(exchange: Path, ends: dict[int, int], signs: Sequence[Signs], mesh: Mesh = MESH) -> FxpipeError:
    """The error that ended a run.

    A worker's own error comes before a death without words, and both before lost connections, which only follow.

    Args:
        exchange: where workers have left their errors.
        ends: exit codes by rank, in the order in which they came; negative: ended by that signal. Only those that
            came before the launcher ended the rest.
        signs: of all processes: where they were.
        mesh: the plan's.
    """
    left = known_errors(exchange)
    for entry in left:
        if entry["kind"] not in ECHOES:
            return _rebuilt(entry, signs, mesh)
    told = {entry["rank"] for entry in left}
    for rank, code in ends.items():
        if rank not in told:
            return _without_words(process_name(rank, mesh), code, signs[rank])
    return _rebuilt(left[0], signs, mesh) if left else WorkerLost("the workers stopped without an error")


def _without_words(who: str, code: int, signs: Signs) -> WorkerLost:
    if code < 0:
        name = signal.Signals(-code).name
        memory = "the system's out-of-memory killer does that: try smaller batches"
        what, hint = f"was killed by signal {-code} ({name})", memory if code == -signal.SIGKILL else None
    else:
        what = f"exited with code {code} before its work was done"
        hint = "what it wrote to stderr is above; code that calls os._exit ends it without a word"
    return WorkerLost(f"{who} {what}", where=signs.place, hint=hint)


def _rebuilt(entry: dict[str, Any], signs: Sequence[Signs], mesh: Mesh) -> FxpipeError:
    if entry["kind"] is None:
        return WorkerLost(
            f"{process_name(entry['rank'], mesh)} stopped on an unexpected error\n{entry['trace'].rstrip()}",
            where=signs[entry["rank"]].place,
            hint="this is a defect of fxpipe: please report it with the lines above",
        )
    kind = getattr(errors, entry["kind"], RunError)
    error: FxpipeError = kind(entry["what"], where=entry["where"], hint=entry["hint"], page=entry["page"])
    return error

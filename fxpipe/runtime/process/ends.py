"""How a process of a run ends: its work is done, a signal asks it to end, or an error; and which end came first."""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from fxpipe import errors
from fxpipe.errors import FxpipeError, PeerLost, PeerRefused, RunError, WorkerLost, first_line, listed
from fxpipe.limits import limit_hint
from fxpipe.messages import say, warn
from fxpipe.observe.pulse import Signs
from fxpipe.plan.mesh import MESH, Mesh
from fxpipe.runtime.wires.board import Board

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
ECHOES = (PeerLost.__name__, PeerRefused.__name__)
"""Kinds of errors that only follow from an error of another worker."""


def end_process(code: int) -> NoReturn:
    """End this process without tearing the interpreter down.

    Threads of gloo may still hold Python objects: a thread that releases one while the interpreter shuts down aborts
    the process (SIGABRT). And the interpreter would wait for the threads of a broken process group.
    """
    if code == 0:
        atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    forget_memory(os.getpid())
    os._exit(code)


def forget_memory(process: int) -> None:
    """Remove the files of a process that ends in which torch counts who has its CUDA memory open; only torch's
    destructors do, and fxpipe's processes end without them."""
    with suppress(OSError):
        for path in Path("/dev/shm").glob(f"torch_{process}_*"):
            path.unlink()


class Stopped(SystemExit):
    """A signal ended the run; the exit code is 128 + its number."""


@contextmanager
def heeding(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Inside, the handler receives signals, except those that the process ignores (`nohup`). In a thread other than the
    main one, which receives none, nothing changes."""
    main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in SIGNALS} if main else {}
    before = {number: old for number, old in handlers.items() if old is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


class StopRequests:
    """Signals that ask a process to stop: the first of them, and whether there was a second one, which also calls
    `insist`."""

    def __init__(self, insist: Callable[[], object] = lambda: None) -> None:
        self.asked: int | None = None
        self.insisted = False
        self._insist = insist

    def listening(self) -> AbstractContextManager[None]:
        """Inside, signals count as requests (see `heeding`)."""
        return heeding(self._ask)

    @contextmanager
    def put_off(self) -> Iterator[None]:
        """Inside, the first signal only counts as a request; afterwards it does what it would have done."""
        with self.listening():
            yield
        if self.asked is not None:
            signal.raise_signal(self.asked)

    def give_up_if_asked(self) -> None:
        """Do what the first signal asked for, after cleaning up. Ctrl-C is a KeyboardInterrupt, another signal
        `Stopped`."""
        if self.asked == signal.SIGINT:
            raise KeyboardInterrupt
        if self.asked is not None:
            raise Stopped(128 + self.asked)

    def _ask(self, number: int, _: FrameType | None) -> None:
        self.insisted = self.asked is not None
        self.asked = self.asked or number
        if self.insisted:
            self._insist()


def say_stopped(step: int, saved: Path | None) -> None:
    """Print where a run that was asked to stop goes on."""
    if saved is None:
        warn(f"the run stops, and its last checkpoint, at step {step}, could not be written")
    else:
        say(f"stopped; saved after step {step} in {saved}: go on with --resume")


def process_name(process: int, mesh: Mesh = MESH) -> str:
    """`worker 2`, or `rank 1 (workers 1 and 3)`; of replicas, `worker 2, replica 1`. While the plan is not known, each
    process has one worker."""
    rank, replica = mesh.seat(process)
    hosted = [worker for worker, own in enumerate(mesh.placement) if own == rank] or [rank]
    which = f", replica {replica}" if len(mesh.of_rank(rank)) > 1 else ""
    if len(hosted) == 1:
        return f"worker {hosted[0]}{which}"
    return f"rank {rank}{which} (workers {listed([str(worker) for worker in hosted])})"


def leave_error(board: Board, rank: int, error: BaseException, who: str = "") -> None:
    """Write down why this worker process ends."""
    if not isinstance(error, Exception):
        error = ended_by_user_code(error, who or process_name(rank))
    elif (hint := limit_hint(error)) is not None:
        if not isinstance(error, FxpipeError):
            error = WorkerLost(f"{who or process_name(rank)} stopped: {first_line(error)}")
        error.hint = hint
    if isinstance(error, FxpipeError):
        parts = {"what": error.what, "where": error.where, "hint": error.hint, "page": error.page}
        entry = {"kind": type(error).__name__, **parts}
    else:
        trace = "".join(traceback.format_exception(error))
        entry = {"kind": None, "what": f"{type(error).__name__}: {error}", "trace": trace}
    try:
        board.set(_key(rank), json.dumps({**entry, "rank": rank, "time": time.time()}), patient=False)
    except OSError:
        warn("".join(traceback.format_exception(error)) if entry["kind"] is None else str(error))


def ended_by_user_code(error: BaseException, who: str) -> WorkerLost:
    """The error for a process whose user's code has called `sys.exit`, or raised something that is no `Exception`."""
    from fxpipe.user_lines import user_traceback

    cause = f"{type(error).__name__}: {error}".removesuffix(": ")
    if isinstance(error, SystemExit):
        cause = "sys.exit()" if error.code is None else f"sys.exit({error.code!r})"
    return WorkerLost(
        f"{who} was ended by {cause}",
        where=user_traceback(error),
        hint="the model file, or code that it calls, ends the process: raise an error that says why",
    )


def known_errors(board: Board, ranks: Iterable[int]) -> list[dict[str, Any]]:
    """What these workers have written down, the earliest first."""
    entries = [json.loads(text) for rank in ranks if (text := board.get(_key(rank))) is not None]
    return sorted(entries, key=lambda entry: entry["time"])


def _key(rank: int) -> str:
    return f"error/{rank}"


def is_explained(board: Board, ends: dict[int, int]) -> bool:
    """Whether the first cause is known: an error or exit, not only lost connections, which follow from others."""
    echoes = {entry["rank"] for entry in known_errors(board, ends) if entry["kind"] in ECHOES}
    return any(rank not in echoes for rank in ends)


def first_cause(board: Board, ends: dict[int, int], signs: Sequence[Signs], mesh: Mesh = MESH) -> FxpipeError:
    """The error that ended a run.

    A worker's own error counts before a process that ended without one, and both before lost connections. The exit
    codes are in the order in which they came, only those before the launcher ended the others; negative: ended by that
    signal. `signs` says where all processes were.
    """
    left = known_errors(board, range(len(signs)))
    for entry in left:
        if entry["kind"] not in ECHOES:
            return _rebuilt(entry, signs, mesh)
    explained = {entry["rank"] for entry in left}
    for rank, code in ends.items():
        if rank not in explained:
            return without_error(process_name(rank, mesh), code, signs[rank].place)
    return _rebuilt(left[0], signs, mesh) if left else WorkerLost("the workers stopped without an error")


def without_error(who: str, code: int | None, place: str | None) -> WorkerLost:
    """The error for a process that ended before its work was done, and gave no error. Its exit code is negative if a
    signal ended it, and None if only its launcher knows."""
    memory = (
        "usually the system's out-of-memory killer does that: try smaller batches; else another program or person did"
    )
    if code is None:
        what, hint = "ended without an error", f"its launcher (torchrun) says how; if killed by SIGKILL, {memory}"
    elif code < 0:
        what = f"was killed by signal {-code} ({signal.Signals(-code).name})"
        hint = memory if code == -signal.SIGKILL else ""
        if -code in (signal.SIGABRT, signal.SIGINT):  # libraries end a process so
            hint = "what it wrote to stderr is above; ulimit -n, -u or -v may be too low"
    else:
        what = f"exited with code {code} before its work was done"
        hint = "what it wrote to stderr is above; code that calls os._exit ends a process without an error"
    return WorkerLost(f"{who} {what}", where=place, hint=hint or None)


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

"""Runs a build with processes on this machine: starts them, watches them, and says what came first when it fails."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from fxpipe.errors import FxpipeError, PeerLost, WorkerLost, first_line
from fxpipe.limits import check_folder, open_more_files
from fxpipe.messages import say, warn
from fxpipe.observe.progress import PAUSE, leave_bar, starting_text
from fxpipe.observe.pulse import PULSES, PulseFile
from fxpipe.observe.run_json import RunJson
from fxpipe.observe.trace.writer import partial
from fxpipe.plan.mesh import MESH, Mesh
from fxpipe.runtime.options import REPLAN, RunOptions
from fxpipe.runtime.process.ends import (
    SIGNALS,
    Stopped,
    StopRequests,
    first_cause,
    forget_memory,
    is_explained,
    known_errors,
)
from fxpipe.runtime.process.guardian import Guardian
from fxpipe.runtime.process.last_saved import RUNNING_ON, finish_writing, name_checkpoint
from fxpipe.runtime.process.moves import Moves
from fxpipe.runtime.process.resume import newest_options, step_before
from fxpipe.runtime.process.stall import StallWatch, waited_for_disk
from fxpipe.runtime.wires.board import SUMMARY, Board, FolderBoard, make_folder
from fxpipe.runtime.wires.meeting import prepare_meeting

_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37

BETWEEN_LOOKS = 0.05
"""Seconds between two looks at the workers."""

ECHO = 1.0
"""Seconds to wait for the first cause when only lost connections are known."""

GRACE = 5.0
"""Seconds that workers have to stop when asked; then they are killed."""

SAVING = 600.0
"""The same for workers that save a checkpoint first."""

MEETING_ROOM, ROOM_OF_PAIR = 1 << 16, 1 << 10
"""Bytes that the meeting of the workers takes on the disk at most, and as many more for each pair of them."""

RESTARTED = (WorkerLost, PeerLost)
"""Errors after which another start may succeed: a worker ended by a signal, an exit or an unexpected error, or it stood
still. An error that fxpipe explains would come again."""


_adoption = threading.Lock()
_adopters = _before = 0
"""How many runs of this process, in threads, adopt orphans now; and whether it did before the first of them."""


@contextmanager
def _adopting() -> Iterator[bool]:
    """Inside, this process adopts orphans, if the system can make it; yields whether it can. Then all is as before."""
    global _adopters, _before
    if sys.platform != "linux":
        yield False
        return
    prctl, now = ctypes.CDLL(None).prctl, ctypes.c_int()
    with _adoption:
        if not _adopters:
            prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(now))
            _before = now.value
        adopts = prctl(_PR_SET_CHILD_SUBREAPER, 1) == 0
        _adopters += 1
    try:
        yield adopts
    finally:
        with _adoption:
            _adopters -= 1
            if not _adopters:
                prctl(_PR_SET_CHILD_SUBREAPER, _before)


class WorkerProcesses:
    """Processes that run `fxpipe.runtime.process.child`, each the leader of its own session: Ctrl-C reaches only the
    launcher, and what a worker starts ends with the worker.

    On Linux one starter imports torch, forks all of them and ends; then they are the children of this process, which
    adopts orphans until the last of them have ended. On other systems each worker is started by itself.
    """

    def __init__(self, options: RunOptions, ranks: int, board: FolderBoard, guardian: Guardian) -> None:
        self.pulses = PulseFile(board.path / PULSES, ranks)
        self._ranks, self._guardian = ranks, guardian
        self._starters: list[subprocess.Popen[bytes]] = []
        self._processes: dict[int, int] = {}  # by rank, those that have begun
        self._ended: dict[int, int] = {}
        self._gone: set[int] = set()  # ids that other processes may have by now
        heard, said = os.pipe()
        os.set_blocking(heard, False)
        self._begun = FileIO(heard)
        self._adoption = ExitStack()
        adopts = self._adoption.enter_context(_adopting())
        module = "fxpipe.runtime.process.child"
        text = dataclasses.replace(options, board=str(board.path)).to_json()
        command = [sys.executable, "-P", "-m", module, text, str(os.getpid()), str(said)]
        environment = {**os.environ, "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        names = [str(rank) for rank in range(ranks)]
        try:
            for own in [names] if adopts else [[name] for name in names]:
                starter = subprocess.Popen(
                    [*command, *own], env=environment, stdin=subprocess.DEVNULL, start_new_session=True, pass_fds=[said]
                )
                self._starters.append(starter)
                guardian.guard(starter.pid)
        except BaseException:
            os.close(said)
            self.end()
            raise
        os.close(said)

    def ended(self) -> dict[int, int]:
        """The exit codes of those that have ended, by rank; negative: by that signal."""
        no_more = self._begun.closed or self._note_begun()
        for rank in range(self._ranks):
            if rank in self._ended:
                continue
            if rank in self._processes:
                code = self._exit_code(self._processes[rank])
            else:  # if no more will begin: its starter was ended, or it was, right after the fork
                code = (self._starter(rank).wait() or -signal.SIGKILL) if no_more else None
            if code is not None:
                self._ended[rank] = code
        return dict(self._ended)

    def running(self) -> bool:
        """Whether any has not ended."""
        return len(self.ended()) < self._ranks

    def stopped(self, rank: int) -> bool:
        """Whether a worker is stopped, as by SIGSTOP; False where the system does not say."""
        try:
            text = Path(f"/proc/{self._processes.get(rank, self._starter(rank).pid)}/stat").read_text()
        except OSError:
            return False
        return text.rpartition(")")[2].split()[0] in ("T", "t")

    def ask_to_stop(self) -> None:
        """Ask each of them to stop; without a handler SIGTERM ends a worker. If one has yet to begin, end all."""
        ended = self.ended()
        if len(self._processes) < self._ranks:
            self.end()
        for rank in set(self._processes) - set(ended):
            with suppress(ProcessLookupError):
                os.kill(self._processes[rank], signal.SIGTERM)

    def end(self) -> None:
        """End them at once, with all that they have started."""
        # A process keeps its id until it is waited for, so the group cannot be another's.
        for starter in self._starters:
            if starter.returncode is None:
                self._kill_group(starter.pid)
        if not self._begun.closed:
            os.set_blocking(self._begun.fileno(), True)
            self._note_begun()  # until no other can begin
            self._begun.close()
        for process in self._processes.values():
            self._kill_group(process)
            forget_memory(process)
        for starter in self._starters:
            starter.wait()
        for rank in range(self._ranks):
            self._ended.setdefault(rank, -signal.SIGKILL)
        for process in self._processes.values():
            with suppress(ChildProcessError):
                while process not in self._gone:
                    os.waitpid(-process, 0)  # and what it has started
            self._gone.add(process)
        self._adoption.close()

    def _starter(self, rank: int) -> subprocess.Popen[bytes]:
        return self._starters[rank if len(self._starters) > 1 else 0]

    def _note_begun(self) -> bool:
        """Note which have begun; return whether no more will."""
        while text := self._begun.read(1 << 16):
            for rank, process in (map(int, line.split()) for line in text.splitlines()):
                self._processes[rank] = process
                self._guardian.guard(process)
        return text is not None

    def _kill_group(self, process: int) -> None:
        if process not in self._gone:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process, signal.SIGKILL)

    def _exit_code(self, process: int) -> int | None:
        """The exit code of a process that has ended; where the system can, without freeing its id."""
        try:
            if hasattr(os, "waitid"):
                end = os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if end is None:
                    return None
                return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
            ended, status = os.waitpid(process, os.WNOHANG)
        except ChildProcessError:  # this process ignores SIGCHLD
            ended, status = process, 0
        if not ended:
            return None
        self._gone.add(process)
        return os.waitstatus_to_exitcode(status)


def launch(options: RunOptions, ranks: int, mesh: Mesh = MESH) -> dict[str, Any]:
    """Run a build with `ranks` local processes; return the summary (see `RunJson.to_json`).

    When a worker was lost, all are started again, at most `options.max_restarts` times. The summary's `restarts` says
    why, where that worker was, how many steps had begun, and after which step the run went on: the step of the newest
    checkpoint, or 0. Its `moves` are `Moves.rows`.

    Raises:
        FxpipeError: the first error of any worker.
        KeyboardInterrupt: Ctrl-C; no process and no file is left.
        Stopped: the same by another signal.
    """
    check_folder()
    open_more_files()
    restarts: list[dict[str, Any]] = []
    requests = StopRequests()
    moves = Moves(options) if options.rebalance or options.on_loss == REPLAN else None
    with requests.listening(), ExitStack() as held:
        if moves is not None:
            held.callback(moves.end)
            options = moves.options
        while True:
            attempt = _Attempt(options, ranks, mesh, requests, moves)
            try:
                summary = attempt.run()
                break
            except Stopped:
                if moves is None or not moves.asked or requests.asked:
                    raise
                options, mesh = moves.move_or_stay(), moves.plan.mesh
            except FxpipeError as error:
                again = isinstance(error, RESTARTED) and not requests.asked
                used_up = len(restarts) == options.max_restarts
                if again and used_up and moves is not None and options.on_loss == REPLAN:
                    options = moves.without_one(error, attempt.step, requests)
                    ranks, mesh = moves.plan.processes, moves.plan.mesh
                    continue
                if moves is not None and not requests.asked and (before := moves.back(error)) is not None:
                    options, mesh = before, moves.plan.mesh
                    continue
                if not again or used_up:
                    if attempt.step:
                        name_checkpoint(error, options, options.out)
                    raise
                options = newest_options(options, options.out)
                begin = step_before(options)
                restarts.append({"cause": first_line(error), "where": error.where, "step": attempt.step, "from": begin})
                number = f"restart {len(restarts)} of {options.max_restarts}"
                warn(f"{error}\n  all workers start again ({number}), after step {begin} of {attempt.step} begun")
    requests.give_up_if_asked()  # it came too late to stop anything, but the user meant it
    if moves is not None:
        moves.settle()
    if restarts or (moves is not None and moves.rows):
        summary.restarts = restarts
        summary.moves = [] if moves is None else moves.rows
        summary.write()
    return summary.to_json()


@dataclass
class _Attempt:
    """One start of the workers. `step` is the last that any worker has begun, once all have ended."""

    options: RunOptions
    ranks: int
    mesh: Mesh
    requests: StopRequests
    moves: Moves | None
    step: int = 0

    @property
    def grace(self) -> float:
        """Seconds that workers have to stop."""
        return GRACE if self.options.checkpoint_every is None else SAVING

    def run(self) -> RunJson:
        """Start the workers, and wait for their end; return the summary."""
        options, ranks = self.options, self.ranks
        temporary = make_folder(MEETING_ROOM + ROOM_OF_PAIR * ranks**2)
        board = FolderBoard(temporary.name)
        with Guardian(board.path) as guardian, temporary:  # guarded until it is gone
            prepare_meeting(board, self.mesh.groups)
            if self.moves is not None:
                self.moves.begin(board, guardian)
            if options.progress:
                say(f"starting {ranks} process{'es' if ranks > 1 else ''}")
            workers = WorkerProcesses(options, ranks, board, guardian)
            try:
                self._watch(workers, board)
            except FxpipeError:
                finish_writing(options.out, RUNNING_ON)
                raise
            finally:
                closed = workers.ended().get(0) in (0, 1)
                workers.end()
                if options.progress and not closed:
                    leave_bar()
                self.step = max(signs.step for signs in workers.pulses.read())
                with suppress(OSError):  # a file left by a worker that was ended while it wrote
                    if options.trace is not None:
                        partial(options.trace).unlink()
            text = board.get(SUMMARY)
            assert text is not None, "worker 0 has ended, and waited until it was written"
            return RunJson.of(json.loads(text))

    def _watch(self, workers: WorkerProcesses, board: Board) -> None:
        """Return when all workers have done their work.

        Until worker 0 has its own display, print every few seconds what they do. If a worker failed, raise that; if
        they were asked to stop and have stopped, KeyboardInterrupt or `Stopped`.
        """
        options, requests, mesh = self.options, self.requests, self.mesh
        stall = StallWatch(options.stall_timeout, workers.stopped, mesh=mesh)
        begin = said = time.monotonic()
        while True:
            if requests.asked:
                self._stop(workers)
            ends = workers.ended()
            signs = workers.pulses.read()  # after `ended`: a worker is done before it ends
            early = {rank: code for rank, code in ends.items() if code or signs[rank].phase != "done"}
            if early:
                deadline = time.monotonic() + ECHO
                while not is_explained(board, early) and workers.running() and time.monotonic() < deadline:
                    time.sleep(BETWEEN_LOOKS)
                    early |= {rank: code for rank, code in workers.ended().items() if code}
                stopped = next((code for code in early.values() if code - 128 in SIGNALS), None)
                if stopped is not None and self.grace == SAVING and not known_errors(board, range(self.ranks)):
                    deadline = time.monotonic() + SAVING  # one of them was asked to stop, and the run saves itself
                    while workers.running() and not requests.asked and time.monotonic() < deadline:
                        time.sleep(BETWEEN_LOOKS)
                    raise Stopped(stopped)
                raise first_cause(board, early, signs, mesh)
            if len(ends) == len(signs):
                return
            if self.moves is not None:
                self.moves.look(signs)
            if options.progress and time.monotonic() - said >= PAUSE and signs[0].phase in ("starting", "importing"):
                said = time.monotonic()
                say(f"{starting_text(signs, mesh.noun)} ({said - begin:.0f} s)")
            if (standstill := stall.look(signs)) is not None:
                warn(standstill.text)
                if standstill.ends is not None and not waited_for_disk(signs, workers.pulses.read, options.out):
                    raise standstill.ends
            time.sleep(BETWEEN_LOOKS)

    def _stop(self, workers: WorkerProcesses) -> None:
        """Ask the workers to stop; a second signal, or the end of the grace, ends them."""
        grace, signs = self.grace, workers.pulses.read()
        begun = any(each.phase in ("training", "writing results") for each in signs)
        workers.ask_to_stop()
        if any(each.phase == "writing results" for each in signs):
            grace = SAVING
            say("writing the trained weights before it stops; a second signal stops it at once")
        elif begun and grace == SAVING:
            say("saving the run before it stops; a second signal stops it at once")
        elif begun:
            step = max(each.step for each in signs)
            say(
                f"stopped in step {step}, and nothing is saved; with --checkpoint-every, --resume could go on from here"
            )
        deadline = time.monotonic() + grace
        while workers.running() and not self.requests.insisted and time.monotonic() < deadline:
            time.sleep(BETWEEN_LOOKS)
        workers.end()
        self.requests.give_up_if_asked()

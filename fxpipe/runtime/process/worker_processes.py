"""The worker processes of a run on this machine: started, looked at, asked to stop, ended."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from contextlib import suppress
from io import FileIO
from pathlib import Path

from fxpipe.observe.pulse import PULSES, PulseFile
from fxpipe.runtime.options import RunOptions
from fxpipe.runtime.process.guardian import Guardian

_PR_SET_CHILD_SUBREAPER = 36


class WorkerProcesses:
    """Processes that run `fxpipe.runtime.process.child`, each the leader of a session of its own: Ctrl-C reaches the
    launcher alone, and what a worker starts itself ends with it.

    On Linux one starter imports torch, forks all of them and ends; then they are this process's children, which from
    now on takes in the orphans below it. Elsewhere each has a starter, and is that.

    Attributes:
        pulses: what they do.
    """

    def __init__(self, options: RunOptions, ranks: int, exchange: Path, guardian: Guardian) -> None:
        self.pulses = PulseFile(exchange / PULSES, ranks)
        self._ranks, self._guardian = ranks, guardian
        self._starters: list[subprocess.Popen[bytes]] = []
        self._processes: dict[int, int] = {}  # by rank, those that have begun
        self._ended: dict[int, int] = {}
        self._gone: set[int] = set()  # ids that may be others' by now
        heard, said = os.pipe()
        os.set_blocking(heard, False)
        self._heard = FileIO(heard)
        adopts = sys.platform == "linux" and ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1) == 0
        module = "fxpipe.runtime.process.child"
        command = [sys.executable, "-P", "-m", module, options.to_json(), str(os.getpid()), str(said)]
        environment = {**os.environ, "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        names = [str(rank) for rank in range(ranks)]
        try:
            for own in [names] if adopts else [[name] for name in names]:
                starter = subprocess.Popen(
                    [*command, *own],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                    pass_fds=[said],
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
        no_more = self._heard.closed or self._hear()
        for rank in range(self._ranks):
            if rank in self._ended:
                continue
            if rank in self._processes:
                code = self._exit_code(self._processes[rank])
            else:  # if no more will begin, something has ended its starter, or it just when it was forked
                code = (self._starter(rank).wait() or -signal.SIGKILL) if no_more else None
            if code is not None:
                self._ended[rank] = code
        return dict(self._ended)

    def running(self) -> bool:
        """Whether any has not ended."""
        return len(self.ended()) < self._ranks

    def stopped(self, rank: int) -> bool:
        """Whether it is stopped, as by SIGSTOP; False where the system does not say."""
        try:
            text = Path(f"/proc/{self._processes.get(rank, self._starter(rank).pid)}/stat").read_text()
        except OSError:
            return False
        return text.rpartition(")")[2].split()[0] in ("T", "t")

    def ask_to_stop(self) -> None:
        """Ask each of them to stop; by itself, SIGTERM ends a worker at once. If one has yet to begin, end them."""
        ended = self.ended()
        if len(self._processes) < self._ranks:
            self.end()
        for rank in set(self._processes) - set(ended):
            with suppress(ProcessLookupError):
                os.kill(self._processes[rank], signal.SIGTERM)

    def end(self) -> None:
        """End them at once, with all that they have started."""
        # The id of a process stays its own until it is waited for, so the group can be no other's.
        for starter in self._starters:
            if starter.returncode is None:
                self._kill_group(starter.pid)
        if not self._heard.closed:
            os.set_blocking(self._heard.fileno(), True)
            self._hear()  # until none is left that could yet begin
            self._heard.close()
        for process in self._processes.values():
            self._kill_group(process)
        for starter in self._starters:
            starter.wait()
        for rank in range(self._ranks):
            self._ended.setdefault(rank, -signal.SIGKILL)
        for process in self._processes.values():
            with suppress(ChildProcessError):
                os.waitpid(process, 0)
            self._gone.add(process)

    def _starter(self, rank: int) -> subprocess.Popen[bytes]:
        return self._starters[rank if len(self._starters) > 1 else 0]

    def _hear(self) -> bool:
        """Note which have begun; whether no other one will."""
        while text := self._heard.read(1 << 16):
            for rank, process in (map(int, line.split()) for line in text.splitlines()):
                self._processes[rank] = process
                self._guardian.guard(process)
        return text is not None

    def _kill_group(self, process: int) -> None:
        if process not in self._gone:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process, signal.SIGKILL)

    def _exit_code(self, process: int) -> int | None:
        """Whether and how a process has ended; where the system can, without giving its id back."""
        try:
            if hasattr(os, "waitid"):
                found = os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if found is None:
                    return None
                return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
            ended, status = os.waitpid(process, os.WNOHANG)
        except ChildProcessError:  # this process ignores SIGCHLD
            ended, status = process, 0
        if not ended:
            return None
        self._gone.add(process)
        return os.waitstatus_to_exitcode(status)

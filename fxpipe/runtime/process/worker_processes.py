"""The worker processes of a run on this machine: started, looked at, asked to stop, ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

from fxpipe.observe.pulse import PULSES, PulseFile
from fxpipe.runtime.options import RunOptions
from fxpipe.runtime.process.guardian import Guardian


class WorkerProcesses:
    """Processes that run `fxpipe.runtime.process.child`, each the leader of a session of its own: Ctrl-C reaches the
    launcher alone, and what a worker starts itself ends with it.

    Attributes:
        pulses: what they do.
    """

    def __init__(self, options: RunOptions, ranks: int, exchange: Path, guardian: Guardian) -> None:
        self.pulses = PulseFile(exchange / PULSES, ranks)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ended: dict[int, int] = {}
        module = "fxpipe.runtime.process.child"
        command = [sys.executable, "-P", "-m", module, options.to_json(), str(os.getpid())]
        try:
            for rank in range(ranks):
                place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
                environment = {**os.environ, **{name: str(value) for name, value in place.items()}}
                process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)
                self._processes.append(process)
                guardian.guard(process.pid)
        except BaseException:
            self.end()
            raise

    def ended(self) -> dict[int, int]:
        """The exit codes of those that have ended, by rank; negative: by that signal."""
        for rank, process in enumerate(self._processes):
            if rank not in self._ended and (code := _exit_code(process)) is not None:
                self._ended[rank] = code
        return dict(self._ended)

    def running(self) -> bool:
        """Whether any has not ended."""
        return len(self.ended()) < len(self._processes)

    def stopped(self, rank: int) -> bool:
        """Whether it is stopped, as by SIGSTOP; False where the system does not say."""
        try:
            text = Path(f"/proc/{self._processes[rank].pid}/stat").read_text()
        except OSError:
            return False
        return text.rpartition(")")[2].split()[0] in ("T", "t")

    def ask_to_stop(self) -> None:
        """Ask each of them to stop; by itself, SIGTERM ends a worker at once."""
        for rank, process in enumerate(self._processes):
            if rank not in self.ended():
                os.kill(process.pid, signal.SIGTERM)

    def end(self) -> None:
        """End them at once, with all that they have started."""
        for process in self._processes:
            # Its process id stays its own until it is waited for, so the group can be no other's.
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
        for process in self._processes:
            process.wait()


def _exit_code(process: subprocess.Popen[bytes]) -> int | None:
    """Whether and how a process has ended; where the system can, without giving its id back."""
    if not hasattr(os, "waitid"):
        return process.poll()
    try:
        found = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # this process ignores SIGCHLD
        return process.poll()
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

"""The worker processes that `launch` starts: `python -m fxpipe.runtime.process.child OPTIONS LAUNCHER FD RANK…`.

One process imports torch, forks a worker for each of the ranks, and ends: the launcher adopts its orphans (see
`fxpipe.runtime.process.launch`). Before the forks nothing is computed, so there is no thread and no CUDA
context that they could lose. A process with one rank is that worker itself. Each worker writes its rank and its process
id to FD, and has its rank in its name, for `ps` and `top`.

Before it imports torch, a process makes sure that it ends with the launcher. Ctrl-C ends it silently: the launcher
decides what to print.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from typing import NoReturn

from fxpipe.observe.pulse import PULSES, Pulse, PulseFile
from fxpipe.runtime.wires.board import SUMMARY, FolderBoard
from fxpipe.runtime.wires.meeting import widen_queues

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


def main(text: str, launcher: int, ready: int, ranks: Sequence[int]) -> NoReturn:
    """Run the workers of these ranks for `launch`; each leaves its error or its summary on the board."""
    end_with(launcher)
    widen_queues()
    board = FolderBoard(json.loads(text)["board"])
    pulses = PulseFile(board.path / PULSES, int(os.environ["WORLD_SIZE"]))
    for rank in ranks:
        Pulse(pulses.numbers(rank)).phase = "importing"
    gc.disable()  # imported modules stay: no garbage collection need look at them, now or later
    from fxpipe.runtime.process.ends import end_process, leave_error

    rank, spare = ranks[0], os.open(os.devnull, os.O_RDONLY)  # for an error: there may be no other descriptor left
    try:
        from fxpipe.runtime.options import RunOptions
        from fxpipe.runtime.process.start import join
        from fxpipe.torch_private import DYNAMO

        importlib.import_module(DYNAMO)  # torch's first optimizer does: else it costs each worker a second

        gc.freeze()
        gc.enable()
        rank = _forked(ranks, launcher) if len(ranks) > 1 else ranks[0]
        os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_NAME, f"fxpipe rank {rank}".encode())
        os.write(ready, f"{rank} {os.getpid()}\n".encode())
        os.close(ready)
        pulse = Pulse(pulses.numbers(rank))
        pulse.begin()
        only_here()
        summary = join(RunOptions.from_json(text), pulse=pulse)
    except BaseException as error:
        os.close(spare)
        leave_error(board, rank, error, _name(json.loads(text)["build"], rank))
        end_process(1)
    if summary is not None:
        board.set(SUMMARY, json.dumps(summary))
    pulse.phase = "done"
    end_process(0)


def _forked(ranks: Sequence[int], launcher: int) -> int:
    """Fork a process for each rank, and end; in each of them, return its rank once the launcher is its parent."""
    starter = os.getpid()
    for rank in ranks:
        if os.fork() == 0:
            while os.getppid() == starter:  # a worker would take the end of this process for the launcher's
                time.sleep(0.001)
            end_with(launcher)
            os.setsid()
            return rank
    os._exit(0)


def _name(build: str, rank: int) -> str:
    """What to call this process."""
    from fxpipe.runtime.process.ends import process_name

    try:
        from fxpipe.plan.build_folder import read_plan

        return process_name(rank, read_plan(build).mesh)
    except Exception:  # another error is reported
        return process_name(rank)


def end_with(launcher: int) -> None:
    """End this process when the launcher ends, whatever this process does then, even if it is stopped."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    else:
        threading.Thread(target=_look_for, args=(launcher,), daemon=True).start()
    if os.getppid() != launcher:  # it ended before
        os._exit(1)


def only_here() -> None:
    """Communicate over the loopback interface only."""
    loopback = {"linux": "lo", "darwin": "lo0"}.get(sys.platform)
    if loopback:
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = loopback


def _look_for(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(0.5)
    os._exit(1)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), [int(rank) for rank in sys.argv[4:]])

"""A worker process that `launch` starts: `python -m fxpipe.runtime.process.child OPTIONS LAUNCHER`.

First of all it sees to it that it ends with the launcher, while torch is still to be imported. Ctrl-C ends it silently:
the launcher decides what to print.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

from fxpipe.observe.pulse import PULSES, Pulse, PulseFile

_PR_SET_PDEATHSIG = 1


def main(text: str, launcher: int) -> NoReturn:
    """Run the workers of a rank for `launch`, and leave its error or its summary in the exchange folder."""
    end_with(launcher)
    exchange, rank, ranks = Path(json.loads(text)["exchange"]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    pulse = Pulse(PulseFile(exchange / PULSES, ranks).numbers(rank))
    pulse.phase = "importing"
    pulse.begin()
    only_here()
    gc.disable()  # imported modules stay: no collection has to look at them, neither now nor while the run goes on
    from fxpipe.runtime.options import RunOptions
    from fxpipe.runtime.process.end_process import end_process
    from fxpipe.runtime.process.first_cause import leave_error
    from fxpipe.runtime.process.rank import join

    gc.freeze()
    gc.enable()
    try:
        summary = join(RunOptions.from_json(text), pulse=pulse)
    except BaseException as error:
        leave_error(exchange, rank, error, _name(json.loads(text)["build"], rank))
        end_process(1)
    if summary is not None:
        (exchange / "summary.json").write_text(json.dumps(summary))
    pulse.phase = "done"
    end_process(0)


def _name(build: str, rank: int) -> str:
    """What to call this process."""
    from fxpipe.errors import FxpipeError
    from fxpipe.plan.build_folder import read_plan
    from fxpipe.runtime.process.process_name import process_name

    try:
        return process_name(rank, read_plan(build).mesh)
    except FxpipeError:  # there is another error to tell
        return process_name(rank)


def end_with(launcher: int) -> None:
    """End this process when the launcher ends, whatever it is doing then, even if it is stopped."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    else:
        threading.Thread(target=_look_for, args=(launcher,), daemon=True).start()
    if os.getppid() != launcher:  # it ended before
        os._exit(1)


def only_here() -> None:
    """Talk over the loopback interface alone."""
    loopback = {"linux": "lo", "darwin": "lo0"}.get(sys.platform)
    if loopback:
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = loopback


def _look_for(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(0.5)
    os._exit(1)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    main(sys.argv[1], int(sys.argv[2]))

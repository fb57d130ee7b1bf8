"""How a process of a run ends."""

from __future__ import annotations

import atexit
import os
import sys
from typing import NoReturn


def end_process(code: int) -> NoReturn:
    """End this process without tearing the interpreter down.

    Threads of gloo may still hold Python objects: a thread that releases one while the interpreter shuts down aborts
    the process (SIGABRT). And the interpreter would wait for the threads of a broken process group.
    """
    if code == 0:
        atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

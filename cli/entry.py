"""Where the command begins; it imports almost nothing until signals are handled."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from fxpipe.cli.signals import first_signal, heed_signals, leave, over


def main() -> NoReturn:
    """Run the command that the arguments name, and exit with its code; 128 + n after signal n."""
    heed_signals()
    _open_streams()
    try:
        from fxpipe.cli.main import main as run

        run()
    except SystemExit as ended:
        over()
        code = ended.code
    except BaseException:
        if (number := first_signal()) is None:
            over()
            raise
        leave(number)  # whatever exception it became on the way, the signal is the cause
    else:
        over()
        code = 0
    number = first_signal()
    sys.exit(code if number is None else 128 + number)


def _open_streams() -> None:
    """Make stdin, stdout and stderr usable: closed ones read and write nothing, and what an encoding lacks is `?`.

    A closed one is opened, since else the next file or socket would get its number, and what is printed.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number, which is this one
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))
        elif number and hasattr(getattr(sys, name), "reconfigure"):
            getattr(sys, name).reconfigure(errors="replace")

"""Where the command begins; it imports almost nothing until signals are handled."""

from __future__ import annotations

import sys
from typing import NoReturn

from fxpipe.cli.signals import asked, heed_signals, leave, over


def main() -> NoReturn:
    """Run the command that the arguments name, and exit with its code; 128 + n after signal n."""
    heed_signals()
    try:
        from fxpipe.cli.main import main as run

        run()
    except SystemExit as ended:
        over()
        code = ended.code
    except BaseException:
        if (number := asked()) is None:
            over()
            raise
        leave(number)  # whatever exception it became on the way, the signal is the cause
    else:
        over()
        code = 0
    number = asked()
    sys.exit(code if number is None else 128 + number)

"""A worker process that `launch` starts: `python -m fxpipe.runtime.process.child OPTIONS`.

Ctrl-C ends it silently, even while torch is still being imported: the launcher decides what to print.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn


def main(text: str) -> NoReturn:
    """Run a worker for `launch`, and leave its error or its summary in the exchange folder."""
    from fxpipe.errors import FxpipeError
    from fxpipe.runtime.options import RunOptions
    from fxpipe.runtime.process.rank import end_process, join

    options = RunOptions.from_json(text)
    assert options.exchange is not None
    exchange = Path(options.exchange)
    threading.Thread(target=_die_with, args=(os.getppid(), exchange), daemon=True).start()
    loopback = {"linux": "lo", "darwin": "lo0"}.get(sys.platform)
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    rank = os.environ["RANK"]
    try:
        summary = join(options)
    except FxpipeError as error:
        said = {"what": error.what, "where": error.where, "hint": error.hint, "page": error.page}
        _leave(exchange, rank, {"kind": type(error).__name__, **said})
    except Exception as error:
        trace = traceback.format_exc()
        _leave(exchange, rank, {"kind": None, "what": f"{type(error).__name__}: {error}", "trace": trace})
    else:
        if summary is not None:
            (exchange / "summary.json").write_text(json.dumps(summary))
        end_process(0)
    end_process(1)


def _leave(exchange: Path, rank: str, error: dict[str, Any]) -> None:
    path = exchange / f"{rank}.json"
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps({**error, "rank": int(rank), "time": time.time()}))
    os.replace(temporary, path)


def _die_with(parent: int, exchange: Path) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    shutil.rmtree(exchange, ignore_errors=True)  # no one else is left to do it
    os._exit(1)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    main(sys.argv[1])

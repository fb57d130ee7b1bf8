"""fxpipe's commands as users give them, each in a process of its own, and how fast a run was."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def run_fxpipe(*arguments: object, folder: Path | None = None) -> str:
    """What a command prints, run in `folder`.

    Raises:
        SystemExit: it failed; with what it said.
    """
    command = [sys.executable, "-m", "fxpipe", *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"fxpipe {' '.join(command[3:])} failed\n{done.stderr}")
    return done.stdout


def minibatch_seconds(out: Path) -> float:
    """Of a run, without the first fifth of them: there the pipeline fills and memory is first touched."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines() if "eval" not in line]
    skip = max(1, len(rows) // 5)
    seconds: float = (rows[-1]["seconds"] - rows[skip - 1]["seconds"]) / (len(rows) - skip)
    return seconds

"""`fxpipe run` with processes of its own: how fast it trains, and how much memory each worker needs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from fxpipe.plan.build_folder import read_plan


def compile_build(model: Path, folder: Path, *options: str) -> Path:
    """The build that `fxpipe compile` leaves in `folder`."""
    _fxpipe("compile", str(model), "-o", str(folder), "--threads", "1", *options, folder=folder.parent)
    return folder


def rate(build: Path, policy: str, steps: int) -> float:
    """Minibatches a second, without the first fifth: there the pipeline fills and memory is first touched."""
    out = _run(build, policy, steps)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines() if "eval" not in line]
    skip = max(1, len(lines) // 5)
    return (len(lines) - skip) / (lines[-1]["seconds"] - lines[skip - 1]["seconds"])


def peaks(build: Path, policy: str, steps: int) -> list[int]:
    """The greatest resident set of each worker while it trains, in bytes; `build` is one of `watched.py`."""
    _run(build, policy, steps)
    files = [build.parent / f"peak_{worker}" for worker in range(read_plan(build).workers)]
    found = [int(file.read_text()) for file in files]
    for file in files:
        file.unlink()
    return found


def _run(build: Path, policy: str, steps: int) -> Path:
    out = build.parent / "out"
    options = ["--policy", policy, "--steps", str(steps), "--threads", "1", "--out", str(out), "--json"]
    _fxpipe("run", str(build), *options, folder=build.parent)
    return out


def _fxpipe(*arguments: str, folder: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "fxpipe", *arguments], cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"fxpipe {' '.join(arguments)} failed\n{done.stderr}")

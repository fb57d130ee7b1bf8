"""`fxpipe run` with processes of its own: how fast it trains, and how much memory each worker needs."""

from __future__ import annotations

import sys
from pathlib import Path

from fxpipe.plan.build_folder import read_plan

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from commands import minibatch_seconds, run_fxpipe


def compile_build(model: Path, folder: Path, *options: str) -> Path:
    """The build that `fxpipe compile` leaves in `folder`."""
    run_fxpipe("compile", model, "-o", folder, "--threads", 1, *options, folder=folder.parent)
    return folder


def run_time(build: Path, policy: str, steps: int) -> float:
    """Seconds of a minibatch, in a run."""
    return minibatch_seconds(_run(build, policy, steps))


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
    options = ("--policy", policy, "--steps", steps, "--threads", 1, "--out", out, "--json")
    run_fxpipe("run", build, *options, folder=build.parent)
    return out

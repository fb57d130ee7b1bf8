"""fxpipe: what `fxpipe run` does under torchrun, in a process that goes on afterwards."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from commands import minibatch_seconds

from fxpipe.runtime.options import RunOptions
from fxpipe.runtime.process.start import join


def run(settings: dict[str, Any], steps: int, out: Path) -> None:
    """Train a build for so many minibatches, and leave in `out` what a run writes.

    Args:
        settings: `build`, its folder; `throttle`, for links that only fxpipe's meter makes slow.
    """
    join(RunOptions(settings["build"], steps=steps, threads=1, out=str(out), throttle=settings.get("throttle")))


def losses(out: Path) -> list[float]:
    """Of all minibatches of a run."""
    return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]


def seconds(out: Path) -> float:
    """Of a minibatch, without the first fifth of them."""
    return minibatch_seconds(out)

"""A run's folder as `fxpipe run` leaves it, without a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fxpipe.observe.trace import KINDS


def write_run(folder: Path, step_ms: float = 100.0, steps: int = 40, **changes: Any) -> Path:
    """A run of two workers that wait a tenth of their time, unless `changes` says otherwise."""
    folder.mkdir(parents=True)
    workers = changes.pop("workers", 2)
    wait, decay = changes.pop("wait", 0.1), changes.pop("decay", 0.02)
    seconds = step_ms * steps / 1e3
    spent = dict.fromkeys((*KINDS, "other"), 0.0)
    spent |= {"F": 0.3 * seconds, "wait": wait * seconds, "B": (0.7 - wait) * seconds}
    run = {
        "format": 1,
        "build": {"folder": "build", "digest": "0123456789abcdef"},
        "schedule": "async",
        "policy": "spectrain",
        "microbatches": 1,
        "seed": 0,
        "threads": 1,
        "transport": "gloo",
        "steps": steps,
        "samples": 32,
        "seconds": seconds,
        "samples_per_second": 32e3 / step_ms,
        "bubble": wait,
        "efficiency": 0.9,
        "workers": [
            {"rank": k, "engines": ["eager", "eager"], "busy": 1 - wait, "seconds": seconds, "spent": spent}
            for k in range(workers)
        ],
        "time_losses": [{"worker": 1, "share": wait, "cause": "wait", "text": f"worker 1 waits {100 * wait:.0f}%"}],
        "evaluation": {"accuracy": 0.5},
        "trace": None,
    } | changes
    (folder / "run.json").write_text(json.dumps(run))
    (folder / "metrics.jsonl").write_text(
        "".join(
            json.dumps({"step": i + 1, "loss": 2 - decay * i, "seconds": step_ms * (i + 1) / 1e3}) + "\n"
            for i in range(steps)
        )
    )
    return folder

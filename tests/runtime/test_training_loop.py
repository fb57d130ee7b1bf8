"""Workers in threads over wires as strict as wires may be: the local run's bits, and no deadlock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from covering import covering
from pipelines import pipeline_of
from strict_wires import run_in_threads

STEPS = 12


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9)


OPTIONS: list[dict[str, Any]] = [
    {"policy": "latest"},
    {"policy": "stash"},
    {"policy": "spectrain"},
    {"policy": "vertical"},
    {"policy": "pipeoptim+keep"},
    {"policy": "lwp+sc"},
    {"policy": "spectrain+ef"},
    {"policy": "2bw", "microbatches": 2},
    {"policy": "2bw+predict+ef", "microbatches": 2},
    {"policy": "xpipe+decay+sc", "microbatches": 4},
    {"policy": "stash", "microbatches": 4},
    {"forward": (0, 1, 2, 3), "backward": (0, 1, 2, 3), "policy": "vertical", "microbatches": 2},
    {"schedule": "1f1b", "microbatches": 2},
    {"schedule": "gpipe", "microbatches": 4},
    {"forward": (0, 1, 2, 3), "backward": (0, 1, 2, 3), "policy": "spectrain"},
    {"forward": (0, 0), "backward": (0, 0), "tied": False},
]


@pytest.mark.parametrize(("options", "by_channel"), covering(OPTIONS, [False, True], strength=1))
def test_threads_are_the_local_run(
    toy: Any, batches: Any, tmp_path: Path, options: dict[str, Any], by_channel: bool
) -> None:
    mixed = {"forward": (0, 0, 1, 2, 2), "backward": (0, 1, 1, 1, 2), "tied": True}
    folder = toy(**{**mixed, **options}).save(tmp_path / "build")
    data = (batches * 2)[:STEPS]
    run = run_in_threads(folder, data, sgd, by_channel)
    pipeline = pipeline_of(folder, sgd)
    run.check(pipeline.run(data), pipeline.state_dict())

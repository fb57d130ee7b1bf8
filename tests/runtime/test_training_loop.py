"""Workers in threads over wires as strict as wires may be: the local run's bits, and no deadlock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pipelines import pipeline_of
from strict_wires import run_in_threads

from fxpipe.runtime.options import PipelineOptions

STEPS = 12


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9)


OPTIONS: list[dict[str, Any]] = [
    {"policy": "latest"},
    {"policy": "stash"},
    {"policy": "spectrain"},
    {"policy": "vertical"},
    {"policy": "pipeoptim+keep"},
    {"policy": "lwp"},
    {"policy": "spectrain+ef"},
    {"policy": "2bw", "microbatches": 2},
    {"policy": "2bw+predict+ef", "microbatches": 2},
    {"policy": "xpipe+decay", "microbatches": 4},
    {"policy": "stash", "microbatches": 4},
    {"forward": (0, 1, 2, 3), "backward": (0, 1, 2, 3), "policy": "vertical", "microbatches": 2},
    {"schedule": "1f1b", "microbatches": 2},
    {"schedule": "gpipe", "microbatches": 4},
    {"forward": (0, 1, 2, 3), "backward": (0, 1, 2, 3), "policy": "spectrain"},
    {"forward": (0, 0), "backward": (0, 0), "tied": False},
]
ROUNDS, FOLDED, UNEVEN = (0, 1, 0, 1), (0, 1, 1, 0), (0, 1, 0, 0)
FOUR: dict[str, Any] = {"forward": (0, 0, 1, 2, 3, 3), "backward": (0, 1, 1, 2, 2, 3), "tied": True, "dropout": True}
HOSTED: list[dict[str, Any]] = [
    {"schedule": "interleaved", "placement": ROUNDS, "microbatches": 4},
    {"schedule": "interleaved", "placement": (0, 0, 0, 0), "microbatches": 2},
    {"schedule": "1f1b", "placement": ROUNDS, "microbatches": 2},
    {"schedule": "1f1b", "placement": FOLDED, "microbatches": 4},
    {"schedule": "1f1b", "placement": UNEVEN, "microbatches": 2},
    {"schedule": "gpipe", "placement": (0, 1, 2, 1), "microbatches": 2},
    {"schedule": "gpipe", "placement": (0, 2, 1, 0), "microbatches": 1},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_threads_are_the_local_run(toy: Any, batches: Any, tmp_path: Path, options: dict[str, Any]) -> None:
    mixed = {"forward": (0, 0, 1, 2, 2), "backward": (0, 1, 1, 1, 2), "tied": True}
    folder = toy(**{**mixed, **options}).save(tmp_path / "build")
    data = (batches * 2)[:STEPS]
    run = run_in_threads(folder, data, sgd, by_channel=True)
    pipeline = pipeline_of(folder, sgd)
    run.check(pipeline.run(data), pipeline.state_dict())


@pytest.mark.parametrize("clip_norm", [None, 0.1])
@pytest.mark.parametrize("options", HOSTED)
def test_ranks_with_several_workers_are_the_local_run(
    toy: Any, batches: Any, tmp_path: Path, options: dict[str, Any], clip_norm: float | None
) -> None:
    folder = toy(**FOUR, **options).save(tmp_path / "build")
    run = run_in_threads(folder, batches, sgd, by_channel=True, options=PipelineOptions(clip_norm=clip_norm))
    pipeline = pipeline_of(folder, sgd, clip_norm=clip_norm)
    run.check(pipeline.run(batches), pipeline.state_dict())

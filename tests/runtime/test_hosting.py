"""Ranks with several workers whose weight gradients are apart, over wires as strict as wires may be: no deadlock."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from cached import cuts, lowered
from pipelines import pipeline_of
from small_models import CASES
from strict_wires import run_in_threads

from fxpipe.builds.build import Build
from fxpipe.plan.mesh import Mesh
from fxpipe.runtime.options import PipelineOptions
from fxpipe.runtime.process.ends import process_name

FOLDED, ROUNDS = (0, 1, 1, 0), (0, 1, 0, 1)
STEPS = 3


def adam(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in named], lr=1e-2)


def placed(build: Build, schedule: str, placement: tuple[int, ...], folder: Path) -> Path:
    """The same stages on these ranks, in a folder."""
    plan = dataclasses.replace(build.plan, schedule=schedule, placement=placement)
    dataclasses.replace(build, plan=plan).save(folder)
    return folder


def trained(folder: Path, data: list[Any], **options: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses, and the state after them, of all workers in one process."""
    pipeline = pipeline_of(folder, adam, **options)
    return pipeline.run(data), pipeline.state_dict()


@pytest.mark.parametrize(
    ("placement", "rows"),
    [
        (FOLDED, ["0F0,3F0,3I0,0I0,0W0,3W0", "1F0,2F0,2I0,1I0,1W0,2W0"]),
        (ROUNDS, ["0F0,2F0,2I0,0I0,0W0,2W0", "1F0,3F0,3I0,1I0,1W0,3W0"]),
        (ROUNDS, ["0F0,2F0,2I0,2W0,0I0,0W0", "1F0,3F0,3I0,1I0,1W0,3W0"]),
    ],
)
def test_updates_that_wait_for_each_other_come_in_one_order(
    tmp_path: Path, placement: tuple[int, ...], rows: list[str]
) -> None:
    """Though a worker ends its minibatch before one whose norms it must know, which may be in the same process."""
    build = lowered("gpt", 1, workers=4, schedule="zb-h1", **cuts(CASES["gpt"], 4, 1))
    data = CASES["gpt"].batches(STEPS)
    folder = placed(build, "zb-h1", placement, tmp_path / "several")
    run = run_in_threads(folder, data, adam, False, "\n".join(rows), options=PipelineOptions(clip_norm=0.1))
    run.check(*trained(folder, data, clip_norm=0.1))


def test_a_process_is_called_by_its_workers() -> None:
    assert process_name(1) == process_name(1, Mesh((0, 1))) == "worker 1"
    assert process_name(1, Mesh((0, 2, 1))) == "worker 2"
    assert process_name(1, Mesh(ROUNDS)) == "rank 1 (workers 1, 3)"

"""Ranks with several workers, over wires as strict as wires may be: the bits of one worker a rank, and no deadlock."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import overflowing
import pytest
import torch
from cached import cuts, lowered
from covering import covering
from pipelines import pipeline_of
from small_models import CASES
from strict_wires import run_in_threads

import fxpipe as fxp
from fxpipe.build.build import Build
from fxpipe.plan.spec import Mesh
from fxpipe.runtime.options import PipelineOptions
from fxpipe.runtime.process.process_name import process_name

FOLDED, ROUNDS = (0, 1, 1, 0), (0, 1, 0, 1)
PLACED = [
    ("zb-v", FOLDED),
    ("v-half", FOLDED),
    ("v-min", FOLDED),
    ("dualpipev", FOLDED),
    ("zb-h1", ROUNDS),
    ("zb-h2", ROUNDS),
    ("zb-h1", (0, 1, 0, 0)),
    ("zb-h1", (0, 2, 1, 0)),
]
STEPS = 5


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
    ("where", "case", "by_channel", "clip_norm"),
    covering(PLACED, ["gpt", "conv", "unet"], [False, True], [None, 0.1], strength=1),
)
def test_it_has_the_bits_of_one_worker_a_rank(
    tmp_path: Path, where: tuple[str, tuple[int, ...]], case: str, by_channel: bool, clip_norm: float | None
) -> None:
    """Weights tied across workers of a rank and of two, batch norm, skips."""
    build = lowered(case, 4, workers=4, schedule="zb-h1", **cuts(CASES[case], 4, 1))
    data = CASES[case].batches(STEPS)
    build.save(tmp_path / "one_each")
    expected = trained(tmp_path / "one_each", data, clip_norm=clip_norm)
    folder = placed(build, *where, tmp_path / "several")
    run = run_in_threads(folder, data, adam, by_channel, options=PipelineOptions(clip_norm=clip_norm))
    run.check(*expected)
    losses, state = trained(folder, data, clip_norm=clip_norm)
    assert losses == expected[0]
    assert all(torch.equal(value, state[name]) for name, value in expected[1].items())


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


@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_what_overflows_on_one_worker_is_skipped_on_all(tmp_path: Path, clip_norm: float | None) -> None:
    data = overflowing.batches(6, 3, {1: [0], 3: [2]})
    where = ["layers.1", "layers.2", "head"]
    build = fxp.compile(
        overflowing.made(),
        overflowing.loss,
        data[0],
        workers=4,
        forward_at=where,
        schedule="zb-h1",
        microbatches=4,
        autocast="fp16",
        cost="analytic",
    )
    options: dict[str, Any] = {"clip_norm": clip_norm, "loss_scale": 2.0**14}
    build.save(tmp_path / "one_each")
    expected = trained(tmp_path / "one_each", data, **options)
    for number, ranks in enumerate(PLACED[:5]):
        folder = placed(build, *ranks, tmp_path / f"several_{number}")
        run = run_in_threads(folder, data, adam, False, options=PipelineOptions(**options))
        run.check(*expected)
        assert {executor.scaler.scale.skipped for executor in run.executors if executor.scaler} == {2}


def test_a_process_is_called_by_its_workers() -> None:
    assert process_name(1) == process_name(1, Mesh((0, 1))) == "worker 1"
    assert process_name(1, Mesh((0, 2, 1))) == "worker 2"
    assert process_name(1, Mesh(ROUNDS)) == "rank 1 (workers 1, 3)"

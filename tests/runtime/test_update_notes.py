"""How many notes workers tell each other for a minibatch: one up and one down, whatever is clipped and scaled."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import overflowing
import pytest
import torch
from strict_wires import run_in_threads
from torch import Tensor

import fxpipe as fxp
from fxpipe.runtime.options import PipelineOptions
from fxpipe.runtime.wires.wired import WiredTransport
from fxpipe.runtime.worker.loss_scaler import LossScaler

FOUR = {"forward": (0, 1, 2, 3), "backward": (0, 1, 2, 3)}


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.05)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many notes of each kind were told between two workers."""
    found: Counter[str] = Counter()
    send_note = WiredTransport.send_note

    def counting(self: WiredTransport, to: int, what: Any, numbers: Tensor) -> None:
        found[what[0]] += 1
        send_note(self, to, what, numbers)

    monkeypatch.setattr(WiredTransport, "send_note", counting)
    return found


@pytest.mark.parametrize("schedule", ["1f1b", "async", "interleaved"])
def test_clipping_tells_one_note_up_and_one_down(
    toy: Any, batches: Any, tmp_path: Path, told: Counter[str], schedule: str
) -> None:
    shape = {"schedule": schedule, "microbatches": 2} | (
        {"placement": (0, 1, 0, 1)} if schedule == "interleaved" else {}
    )
    build = fxp.load(toy(**FOUR, **shape).save(tmp_path / "build"))
    build.local(optimizer=sgd).run(batches)
    assert told == {}
    build.local(optimizer=sgd, clip_norm=0.1).run(batches)
    assert told == {"up": 3 * len(batches), "down": 3 * len(batches)}


@pytest.mark.parametrize("clip_norm", [None, 1e6])
def test_scaling_shares_them(told: Counter[str], clip_norm: float | None) -> None:
    build = fxp.compile(
        overflowing.made(), overflowing.loss, overflowing.batches(1, 0)[0], autocast="fp16", schedule="1f1b",
        workers=3, microbatches=2, cost="analytic",
    )  # fmt: skip
    pipeline = build.local(optimizer=sgd, clip_norm=clip_norm, loss_scale=1024.0)
    pipeline.run(overflowing.batches(5, 0, {1: [2], 3: [0]}))
    assert told == {"up": 10, "down": 10}
    scalers = [executor.store.part(LossScaler) for executor in pipeline.executors]
    assert [scaler.scale.skipped for scaler in scalers if scaler is not None] == [2] * 3, "wherever it overflows"
    if clip_norm is not None:
        unscaled = torch.nn.utils.get_total_norm(pipeline.gradients().values())
        assert pipeline.gradient_norm == pytest.approx(float(unscaled))


@pytest.mark.parametrize("schedule", ["1f1b", "async"])
def test_shapes_take_one_note_more(toy: Any, batches: Any, tmp_path: Path, told: Counter[str], schedule: str) -> None:
    folder = toy(**FOUR, schedule=schedule).save(tmp_path / "build")
    run = run_in_threads(folder, batches, sgd, False, options=PipelineOptions(new_shapes=1, clip_norm=0.1))
    assert not run.failures, run.failures
    assert told.pop("loss") == len(batches), "each loss crosses once"
    assert told == dict.fromkeys(("up", "down", "call"), 3 * len(batches))

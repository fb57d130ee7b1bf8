"""A disk that is slower than the run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.checkpoint import shard


def test_checkpoints_become_whole_while_others_wait_to_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were left half done, and took up the disk, as long as the next shard was there when one was written."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    batches = [(torch.randn(4, 4), torch.randint(0, 2, (4,))) for _ in range(9)]

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    half_done = []

    def written(*arguments: Any) -> Any:
        time.sleep(0.1)
        half_done.append(len(list(tmp_path.glob("checkpoints/.step-*.partial"))))
        return write_shard(*arguments)

    write_shard = shard.write_shard
    monkeypatch.setattr(shard, "write_shard", written)
    build = fxpipe.compile(model, loss, batches[0], workers=2, cost="analytic")
    pipeline = build.local(checkpoint_every="1", out=tmp_path)
    pipeline.run(batches)
    pipeline.checkpoints.finish()
    waited = sum(executor.watch.seconds("save") for executor in pipeline.executors)
    assert waited > 0.1 * (2 * len(batches) - 6), "all but those that were being written at the end"
    assert len(half_done) == 2 * len(batches)
    assert max(half_done) <= 2

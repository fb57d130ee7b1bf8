"""Makes a golden checkpoint, in the formats of this version: python tests/checkpoint/golden/make.py

It trains a small network by two workers without a flush, saves it in the middle, and notes what comes after. Beside
this script, `checkpoint-1-build-7/` (of the format 1 of checkpoints and 7 of builds) gets

    step-9/                                    the checkpoint
    batches.safetensors                        what the run is fed: no generator has to give the same for ever
    synchronous.json, synchronous.safetensors  the losses if three workers go on from there, with flushes, and weights
                                               and averages at the end

A folder that is there is never made again: what the fxpipe of its time has written is what it is for.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

import fxpipe
from fxpipe import Build
from fxpipe.checkpoint import manifest
from fxpipe.plan import plan

HERE = Path(__file__).parent
STEPS, SAVED = 16, 9
RUN: dict[str, Any] = {"schedule": "async", "policy": "spectrain", "clip_norm": 0.5, "ema": 0.9}


class Net(nn.Module):
    """With buffers that forwards update, and parameters of one and of two dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(4, 8, bias=False)  # a bias before a norm has gradients of rounding errors alone
        self.norm = nn.BatchNorm1d(8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.leave = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.enter(x))
        for layer in self.layers:
            x = torch.tanh(layer(x)) + x
        return self.leave(x)


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def optimizer(named: Any) -> torch.optim.Optimizer:
    """Two groups, one with a rate of its own; rounding errors stay small."""
    matrices, vectors = [p for _, p in named if p.ndim > 1], [p for _, p in named if p.ndim == 1]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 0.02}], lr=0.01, eps=1e-3
    )


def scheduler(made: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(made, STEPS)


def compiled(workers: int, batch: Any) -> Build:
    """The network, cut for so many workers."""
    torch.manual_seed(0)
    return fxpipe.compile(Net(), loss, batch, workers=workers, microbatches=1, cost="analytic")


def name() -> str:
    """Of the golden checkpoint that this version makes."""
    return f"checkpoint-{manifest.FORMAT}-build-{plan.FORMAT}"


def end_of(pipeline: Any) -> dict[str, torch.Tensor]:
    """Weights, and their averages as `ema.NAME`."""
    averages = {f"ema.{name}": value for name, value in pipeline.averaged_state_dict().items()}
    return pipeline.state_dict() | averages


def main() -> None:
    """Make it, if it is not there."""
    target = HERE / name()
    if target.exists():
        sys.exit(f"{target} is there already: it stays as it is")
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / target.name
        draw = torch.Generator().manual_seed(1)
        batches = [(torch.randn(4, 4, generator=draw), torch.randn(4, 2, generator=draw)) for _ in range(STEPS)]
        hooks: dict[str, Any] = {"optimizer": optimizer, "lr_scheduler": scheduler}
        folder.mkdir()
        whole = compiled(2, batches[0]).local(**hooks, **RUN, checkpoint_every=str(SAVED), out=Path(made) / "run")
        whole.run(batches)
        assert whole.checkpoints is not None
        whole.checkpoints.finish()
        saved = folder / f"step-{SAVED}"
        (Path(made) / "run" / "checkpoints" / saved.name).rename(saved)
        other = compiled(3, batches[0]).local(**hooks, schedule="1f1b", resume=saved)
        (folder / "synchronous.json").write_text(json.dumps(other.run(batches[SAVED:])) + "\n")
        save_file(end_of(other), folder / "synchronous.safetensors")
        parts = {f"{step}.{part}": value for step, batch in enumerate(batches) for part, value in enumerate(batch)}
        save_file(parts, folder / "batches.safetensors")
        shutil.copytree(folder, target)


if __name__ == "__main__":
    main()

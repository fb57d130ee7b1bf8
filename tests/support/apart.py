"""Builds and runs of the model file of replicas: they train apart, and add gradients up with `outer=None`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

import fxpipe as fxp
from fxpipe.runtime.options import RunOptions
from fxpipe.runtime.process.launch import launch
from fxpipe.task.model_file import load_task

MODEL = Path(__file__).parents[1] / "runtime" / "replica_model.py"


def compiled_file(folder: Path, schedule: str, workers: int, dp: int, own: int, more: str = "", **outer: Any) -> None:
    """A build of the model file, which is next to it."""
    folder.mkdir(exist_ok=True)
    path = folder / "model.py"
    path.write_text(MODEL.read_text() + more)
    task = load_task(path)
    assert task.metrics is not None
    assert task.eval_data is not None
    torch.manual_seed(0)
    fxp.compile(
        task.model(),
        task.loss,
        task.example(),
        workers=workers,
        dp=dp,
        microbatches=own,
        schedule=schedule,
        cost="analytic",
        forward_at=["norm"] if schedule == "1f1b" and workers == 2 else [],
        evaluation=(task.metrics, task.eval_data()),
        **{"outer": "diloco", **outer},
    ).save(folder / "build", model_file=path)


def launched(options: RunOptions) -> dict[str, Any]:
    """The summary of a run in processes."""
    plan = fxp.load(options.build).plan
    return json.loads(json.dumps(launch(options, plan.processes, plan.mesh)))

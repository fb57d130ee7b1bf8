"""Validates a run's final weights, loaded into the user's own model, in eval mode, in this process.

This is for builds without evaluation: those whose metrics could not be captured.
"""

from __future__ import annotations

from pathlib import Path

import torch

from fxpipe.errors import FxpipeError, TaskError
from fxpipe.plan.plan import Plan
from fxpipe.task.batch import Batch
from fxpipe.task.bf16_parameters import narrow
from fxpipe.task.loss_weights import LossWeights, weighted_means
from fxpipe.task.model_file import Task, hook_raised
from fxpipe.task.wrapped_tensors import load_weights


def evaluate(task: Task, plan: Plan, weights: Path) -> dict[str, float]:
    """The metrics of `eval_data()`, as a run computes them in its pipeline; empty if the file defines none."""
    if not task.validates:
        return {}
    model = task.model()
    load_weights(model, weights)
    if plan.precision.params is not None:
        narrow(model)
    model.eval()
    with torch.no_grad():
        task.reset_model(model)
    weigh = LossWeights(plan, task.loss_weight)
    rows: list[tuple[float, dict[str, float]]] = []
    gathered: dict[str, list[torch.Tensor]] = {}
    with torch.no_grad():
        try:
            for batch in task.eval_data():
                values = dict(task.metrics(model, Batch.of(batch).padded(plan.padding).given))
                for name in [n for n, v in values.items() if task.gathers and isinstance(v, torch.Tensor) and v.dim()]:
                    gathered.setdefault(name, []).append(values.pop(name))
                for name, value in values.items():
                    if isinstance(value, str):
                        raise TaskError(f"metrics() returned {name!r} as a str, not as a number", where=task.file)
                rows.append((weigh(batch), {name: float(value) for name, value in values.items()}))
        except FxpipeError:
            raise
        except Exception as error:
            raised = hook_raised("metrics", error, task.path)
            what, safe = f"evaluating with {raised.what}", f"the trained weights are safe in {weights.name}"
            hint = f"metrics(model, batch) returns a dictionary of scalars; {safe}"
            raise TaskError(what, where=raised.where, hint=hint) from error
    return weighted_means(rows) | (task.metrics_of_all(gathered) if gathered else {})

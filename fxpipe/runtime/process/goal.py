"""The metric that `--save-best` names, and whether more of it is better."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fxpipe.errors import RunError, near
from fxpipe.plan.spec import Plan
from fxpipe.runtime.options import RunOptions

SMALLER = ("loss", "error", "perplexity", "ppl", "mse", "mae", "nll", "bpc", "wer", "cer", "fid")
"""Metrics whose names end so are better where they are smaller."""


@dataclass(frozen=True)
class Goal:
    """A metric, and its better direction."""

    metric: str
    greater: bool

    @staticmethod
    def of(options: RunOptions, plan: Plan) -> Goal | None:
        """What the options ask for; None if they ask for none.

        `accuracy` is better where it is greater, `-cost` where it is smaller, and so is what is named like a loss.

        Raises:
            RunError: what they ask for cannot be done.
        """
        if options.save_best is None:
            if options.patience is not None:
                raise RunError(
                    "--patience needs --save-best: the metric that has to improve", hint="--save-best loss, say"
                )
            return None
        if options.eval_every is None:
            raise RunError(
                "--save-best needs --eval-every: the weights at the end are written in any case",
                hint="--eval-every N, or epoch",
            )
        if options.out is None:
            raise RunError("--save-best needs an output folder", hint="give out=FOLDER, where best.safetensors will be")
        metric = options.save_best.removeprefix("-")
        known = metrics_of(plan)
        if metric not in known:
            raise RunError(
                f"--save-best: metrics(model, batch) gives no {metric!r}{near(metric, known)}",
                hint=f"one of {', '.join(known)}; with - before it, smaller is better",
            )
        smaller = options.save_best.startswith("-") or metric.lower().endswith(SMALLER)
        return Goal(metric, not smaller)

    def better(self, value: float, than: float | None) -> bool:
        """Whether a value is the best so far; one that is not finite never is."""
        if not math.isfinite(value):
            return False
        return than is None or (value > than if self.greater else value < than)

    def __str__(self) -> str:
        return f"{self.metric} ({'greater' if self.greater else 'smaller'} is better)"


def metrics_of(plan: Plan) -> list[str]:
    """The names of all metrics of a build, in the order in which all workers know them."""
    return list(dict.fromkeys(name for evaluation in plan.evaluations for name in evaluation.metrics))

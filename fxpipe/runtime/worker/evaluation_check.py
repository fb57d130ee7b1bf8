"""Whether a run evaluates in its pipeline, and if it cannot, why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fxpipe.errors import RunError
from fxpipe.plan.spec import Plan
from fxpipe.task.paced_scheduler import EPOCH

if TYPE_CHECKING:
    from fxpipe.task.model_file import Task


def evaluates(plan: Plan, task: Task, eval_every: int | str | None) -> bool:
    """Whether a run evaluates in its pipeline.

    Raises:
        RunError: `eval_every` is given, but the build or the task has no evaluation.
    """
    if eval_every is not None:
        what = "evaluation every epoch" if eval_every == EPOCH else f"evaluation every {eval_every} steps"
        check_evaluation(plan, what)
        if not task.validates:
            raise RunError(f"{what} needs eval_data", hint="give both, or neither")
    return bool(plan.evaluations) and task.validates


def check_evaluation(plan: Plan, what: str) -> None:
    """Refuse `what` for a build without evaluation.

    Raises:
        RunError: the build has none; the message says why.
    """
    if plan.evaluations:
        return
    reason = f": {plan.not_evaluated}" if plan.not_evaluated else ""
    hint = "define eval_data() and metrics(model, batch) in the model file, and compile it again"
    if reason:
        hint = "fix that and compile again; without it, `fxpipe run` evaluates the trained weights in one process"
    raise RunError(f"{what} needs a build with evaluation, and this one has none{reason}", hint=hint)

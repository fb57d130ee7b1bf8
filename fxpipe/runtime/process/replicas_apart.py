"""What a run of replicas that train apart cannot do: whatever follows from numbers that are each replica's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fxpipe.errors import RunError
from fxpipe.plan.spec import Plan
from fxpipe.runtime.options import RunOptions
from fxpipe.task.callbacks import ON_EVAL, ON_STEP

if TYPE_CHECKING:
    from fxpipe.task.model_file import Task


def decides_alike(plan: Plan, options: RunOptions) -> bool:
    """Whether all replicas evaluate the same weights.

    Those that train apart do so right after outer steps without a delay.
    """
    outer, every = plan.outer, options.eval_every
    if outer is None or every is None:  # at the end, all have the same
        return True
    return isinstance(every, int) and every % outer.every == 0 and not outer.delay


def unlike(what: str, plan: Plan) -> RunError:
    """The error that says why something cannot follow evaluations."""
    assert plan.outer is not None
    return RunError(
        f"{what} follows evaluations, and the weights of replicas that train apart differ then",
        hint="compile with --outer-delay 0: after its outer steps all have the same"
        if plan.outer.delay
        else f"--eval-every {plan.outer.every}, or a multiple of it: then all have the same",
    )


def check_replicas_apart(plan: Plan, options: RunOptions, task: Task) -> None:
    """Refuse what such replicas would decide each for itself, and differently.

    Args:
        options: which count epochs in steps.

    Raises:
        RunError: names what decides.
    """
    callbacks = task.callbacks
    if plan.outer is None:
        return
    if found := [name for name in (ON_STEP, ON_EVAL) if name in callbacks.names]:
        raise RunError(
            f"{found[0]}() is called with numbers, and replicas that train apart have each its own: they would decide "
            "differently",
            where=None if callbacks.path is None else callbacks.path.name,
            hint="take it out, and read metrics.jsonl; or compile without --outer",
        )
    for name, given in (("--save-best", options.save_best), ("--patience", options.patience)):
        if given is not None and not decides_alike(plan, options):
            raise unlike(name, plan)

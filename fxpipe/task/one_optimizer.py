"""Is what optimizer() returned one optimizer that a worker can step?"""

from __future__ import annotations

import inspect
from typing import Any

from fxpipe.errors import TaskError

NEEDS_CLOSURE = (
    "a pipeline makes the gradients of a minibatch once, so step() gets none: take an optimizer whose step() needs no "
    "arguments, such as torch.optim.AdamW"
)


class OptimizerRefused(TaskError):
    """An optimizer that no run can use, whatever parameters it is given."""


def check_one_optimizer(made: Any, where: str | None = None) -> None:
    """Refuse several optimizers, and one whose step() computes the loss again.

    Raises:
        OptimizerRefused: it is one of these.
    """
    if isinstance(made, (list, tuple, dict)):
        kinds = [type(part).__name__ for part in (made.values() if isinstance(made, dict) else made)]
        raise OptimizerRefused(
            f"optimizer() returned a {type(made).__name__} ({', '.join(kinds)}), not one optimizer",
            where=where,
            hint="groups of parameters may have options of their own: torch.optim.AdamW([{'params': …, 'lr': …}, …]); "
            "optimizers of several kinds become one whose step() calls theirs (docs/guide.md, Several optimizers); a "
            "scheduler is made by lr_scheduler(optimizer)",
        )
    if _needs_closure(made):
        raise OptimizerRefused(
            f"{type(made).__name__}.step() needs a closure that computes the loss again and again, and a pipeline "
            "computes it once",
            where=where,
            hint=NEEDS_CLOSURE,
        )


def _needs_closure(made: Any) -> bool:
    """Whether step() has an argument that must be given."""
    try:
        arguments = inspect.signature(made.step).parameters.values()
    except (AttributeError, TypeError, ValueError):  # there is none, or it is not written in Python
        return False
    return any(a.default is a.empty and a.kind in (a.POSITIONAL_ONLY, a.POSITIONAL_OR_KEYWORD) for a in arguments)

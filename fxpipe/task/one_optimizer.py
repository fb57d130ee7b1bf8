"""Is what optimizer() returned one optimizer that a worker can step?"""

from __future__ import annotations

import inspect
from typing import Any

from fxpipe.errors import TaskError


def check_one_optimizer(made: Any, where: str | None = None) -> None:
    """Refuse several optimizers, and one whose step() computes the loss again.

    Raises:
        TaskError: it is one of these.
    """
    if isinstance(made, (list, tuple, dict)):
        kinds = [type(part).__name__ for part in (made.values() if isinstance(made, dict) else made)]
        raise TaskError(
            f"optimizer() returned a {type(made).__name__} ({', '.join(kinds)}), not one optimizer",
            where=where,
            hint="groups of parameters may have options of their own: torch.optim.AdamW([{'params': …, 'lr': …}, …]); "
            "optimizers of several kinds become one whose step() calls theirs (docs/guide.md, Several optimizers); a "
            "scheduler is made by lr_scheduler(optimizer)",
        )
    step = getattr(made, "step", None)
    closure = inspect.signature(step).parameters.get("closure") if callable(step) else None
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TaskError(
            f"{type(made).__name__}.step() needs a closure that computes the loss again and again, and a pipeline "
            "computes it once",
            where=where,
            hint="take an optimizer whose step() needs none, such as torch.optim.AdamW or torch.optim.SGD",
        )

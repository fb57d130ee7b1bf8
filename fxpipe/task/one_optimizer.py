"""The result of optimizer() as one optimizer that a worker can step."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from fxpipe.errors import TaskError
from fxpipe.task.several_optimizers import SeveralOptimizers

NEEDS_CLOSURE = (
    "a pipeline makes the gradients of a minibatch once, so step() gets none: take an optimizer whose step() needs no "
    "arguments, such as torch.optim.AdamW"
)


class OptimizerRefused(TaskError):
    """An optimizer that no run can use, with any parameters."""


def one_optimizer(result: Any, where: str | None = None) -> torch.optim.Optimizer:
    """The optimizer, or one that steps all in a list or tuple.

    Raises:
        OptimizerRefused: something in it is not an optimizer, or has a step() that computes the loss again; or two of
            them hold the same parameter.
        ValueError: an empty list, as any torch.optim.Optimizer raises without parameters.
    """
    several = isinstance(result, (list, tuple))
    for optimizer in result if several else [result]:
        _refuse(optimizer, type(result).__name__ if several else None, where)
    if not several:
        one: torch.optim.Optimizer = result
        return one
    try:
        return SeveralOptimizers(result)
    except ValueError as error:
        if "more than one parameter group" not in str(error):
            raise
        raise OptimizerRefused(
            f"a parameter is in more than one of the optimizers that optimizer() returned ({_kinds(result)})",
            where=where,
            hint="give each parameter to one of them",
        ) from error


def _refuse(result: Any, container: str | None, where: str | None) -> None:
    if not isinstance(result, torch.optim.Optimizer):
        held = f" in a {container}" if container else ""
        kinds = f" ({_kinds(result.values() if isinstance(result, dict) else result)})" if _holds_some(result) else ""
        raise OptimizerRefused(
            f"optimizer() returned {type(result).__name__}{kinds}{held}, not a torch.optim.Optimizer",
            where=where,
            hint="return an optimizer, or a list of optimizers, each over parameters of its own; leave out those that "
            "have none; a scheduler is made by lr_scheduler(optimizer)",
        )
    if _needs_closure(result):
        raise OptimizerRefused(
            f"{type(result).__name__}.step() needs a closure that computes the loss repeatedly, but a pipeline "
            "computes it once",
            where=where,
            hint=NEEDS_CLOSURE,
        )


def _kinds(optimizers: Any) -> str:
    return ", ".join(type(part).__name__ for part in optimizers)


def _holds_some(result: Any) -> bool:
    return isinstance(result, (list, tuple, dict))


def _needs_closure(optimizer: Any) -> bool:
    """Whether step() has an argument that must be given: of the class, or of its replacement.

    A scheduler replaces it with a function that claims to be the method.
    """
    try:
        arguments = [
            *list(inspect.signature(type(optimizer).step).parameters.values())[1:],
            *inspect.signature(optimizer.step, follow_wrapped=False).parameters.values(),
        ]
    except (AttributeError, TypeError, ValueError):  # it does not exist, or is not written in Python
        return False
    return any(a.default is a.empty and a.kind in (a.POSITIONAL_ONLY, a.POSITIONAL_OR_KEYWORD) for a in arguments)

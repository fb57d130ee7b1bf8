"""Small copies of parameters, on which an optimizer is tried before the model is trained."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from fxpipe.errors import TaskError
from fxpipe.task.one_optimizer import NEEDS_CLOSURE, OptimizerRefused

STILL = 1e-6
"""The factor on learning rates that keeps weights where they are: nothing overflows or underflows."""


def shrunk(shape: Sequence[int], numel: float) -> tuple[int, ...]:
    """The shape with its largest dimension halved repeatedly, until it has at most `numel` elements."""
    sides = list(shape)
    while sides and max(sides) > 1 and torch.Size(sides).numel() > numel:
        largest = sides.index(max(sides))
        sides[largest] = -(-sides[largest] // 2)
    return tuple(sides)


def hold_still(made: torch.optim.Optimizer) -> None:
    """Make its steps so small that weights do not move; groups without a rate are skipped."""
    for group in made.param_groups:
        if group.get("lr") is not None:
            group["lr"] = group["lr"] * STILL


@contextmanager
def users() -> Iterator[None]:
    """Errors in here come from the user's optimizer.

    Raises:
        OptimizerRefused: no run can use it.
        TaskError: it fails on the copies; it may work in a run.
    """
    try:
        yield
    except OptimizerRefused:
        raise
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        if "closure" in said.lower():
            raise OptimizerRefused(f"step() of the optimizer needs a closure: {said}", hint=NEEDS_CLOSURE) from error
        if "process group" in said.lower():
            raise OptimizerRefused(
                f"the optimizer communicates with other processes: {said}",
                hint="in a pipeline they train other parameters: use the optimizer's form for one device",
            ) from error
        raise TaskError(
            f"the optimizer fails on small copies of the model's parameters: {said}",
            hint="optimizer(named_parameters) returns a torch.optim.Optimizer whose step() needs no arguments",
        ) from error

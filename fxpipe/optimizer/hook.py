"""Asks the user for the optimizer of some parameters: of small copies at compile time, of a worker's own in a run."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fxpipe.task.hooks import MakeOptimizer
from fxpipe.task.one_optimizer import OptimizerRefused, one_optimizer
from fxpipe.torch_private import accumulated_hooks, backward_hooks


def make_optimizer(make: MakeOptimizer, named: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer | None:
    """The user's optimizer for these parameters, or several in one, checked; None if it chooses none of them.

    A rate that is a tensor is copied: a scheduler writes into it.

    Raises:
        OptimizerRefused: it is not an optimizer, holds other parameters, needs a closure, or hooks into gradients.
    """
    before = [_hooks(parameter) for _, parameter in named]
    try:
        made = one_optimizer(make(list(named)))
    except Exception as error:
        if _chose_none(error):
            return None
        raise
    _refuse_foreign_parameters(made, named)
    hooked = [name for (name, p), count in zip(named, before, strict=True) if _hooks(p) != count]
    if hooked:
        raise OptimizerRefused(
            f"optimizer() puts a hook on the gradient of {hooked[0]}, which does not run in a pipeline: stages "
            "compute gradients without autograd",
            hint="change gradients in step(), or with register_hook in model(), which is captured",
        )
    if not any(group["params"] for group in made.param_groups):
        return None
    for options in (made.defaults, *made.param_groups):
        if isinstance(options.get("lr"), Tensor):
            options["lr"] = options["lr"].detach().clone()
    return made


def _hooks(parameter: nn.Parameter) -> int:
    """How many hooks autograd would call with its gradient."""
    return len(backward_hooks(parameter) or ()) + len(accumulated_hooks(parameter) or ())


def _chose_none(error: BaseException | None) -> bool:
    """Whether torch refused an empty list anywhere below the error."""
    while error is not None:
        if isinstance(error, ValueError) and "empty parameter list" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _refuse_foreign_parameters(made: torch.optim.Optimizer, named: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Refuse an optimizer over other tensors, which would silently train nothing here."""
    own = {id(parameter) for _, parameter in named}
    foreign = [p for group in made.param_groups for p in group["params"] if id(p) not in own]
    if foreign:
        raise OptimizerRefused(
            f"optimizer() holds {len(foreign)} parameters that it was not given: they are not the worker's own",
            hint="build it from named_parameters: [p for _, p in named_parameters]",
        )

"""Asks the user for the optimizer of some parameters: of small copies at compile time, of a worker's own in a run."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

from fxpipe.errors import TaskError
from fxpipe.task.guarded_step import guard
from fxpipe.task.hooks import MakeOptimizer
from fxpipe.task.one_optimizer import NEEDS_CLOSURE, OptimizerRefused, one_optimizer
from fxpipe.task.several_optimizers import changes_torchs, parts_of
from fxpipe.torch_private import DYNAMO, accumulated_hooks, backward_hooks
from fxpipe.tracing.reach import Walk

STILL = 1e-6
"""The factor on learning rates that keeps weights where they are: nothing overflows or underflows."""


def make_optimizer(make: MakeOptimizer, named: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer | None:
    """The user's optimizer for these parameters, or several in one, checked; None if it chooses none of them.

    A rate that is a tensor is copied: a scheduler writes into it.

    Raises:
        OptimizerRefused: it is not an optimizer, holds other parameters, needs a closure, or hooks into gradients.
    """
    before = [_hooks(parameter) for _, parameter in named]
    try:
        optimizer = one_optimizer(make(list(named)))
    except Exception as error:
        if _chose_none(error):
            return None
        raise
    _refuse_foreign_parameters(optimizer, named)
    hooked = [name for (name, p), count in zip(named, before, strict=True) if _hooks(p) != count]
    if hooked:
        raise OptimizerRefused(
            f"optimizer() puts a hook on the gradient of {hooked[0]}, which does not run in a pipeline: stages "
            "compute gradients without autograd",
            hint="change gradients in step(), or with register_hook in model(), which is captured",
        )
    for part in parts_of(optimizer):
        if getattr(part, "is_paged", False):
            kind = type(part).__name__
            raise OptimizerRefused(
                f"{kind} keeps its state in memory that CUDA pages, which neither forecasts of memory nor copies for "
                "checkpoints know",
                hint=f"use {kind.removeprefix('Paged')}: with --shard optimizer replicas share its state out",
            )
        if getattr(getattr(part, "mng", None), "module_weight_config_triple", None):  # of bitsandbytes
            raise OptimizerRefused(
                "register_module_override() sets options of single parameters, which it finds by objects of the "
                "model that workers do not have",
                hint="put these parameters into a group of their own in optimizer(named_parameters)",
            )
    if not any(group["params"] for group in optimizer.param_groups):
        return None
    if modules := _reached(optimizer):
        guard(optimizer, modules, [parameter for _, parameter in named])
    for options in (optimizer.defaults, *optimizer.param_groups):
        if isinstance(options.get("lr"), Tensor):
            options["lr"] = options["lr"].detach().clone()
    return optimizer


@contextmanager
def uncompiled() -> Iterator[None]:
    """Inside, torch.compile does not compile the optimizer: it takes long, and no mode sees what compiled code does."""
    with torch.compiler.set_stance("force_eager") if DYNAMO in sys.modules else nullcontext():
        yield


def _hooks(parameter: nn.Parameter) -> int:
    """How many hooks autograd would call with its gradient."""
    return len(backward_hooks(parameter) or ()) + len(accumulated_hooks(parameter) or ())


def _reached(optimizer: torch.optim.Optimizer) -> list[nn.Module]:
    """The modules with values that its step, or a hook of it, can reach: a model that the user has made."""
    parts = [part for part in parts_of(optimizer) if changes_torchs(part)]
    roots = [root for part in parts for root in (type(part), *vars(part).values())]
    seen = Walk(None, roots, passed=parts).seen.values() if roots else ()
    modules = [value for value in seen if isinstance(value, nn.Module)]
    return [m for m in modules if all(not tensor.is_meta for tensor in (*m.parameters(), *m.buffers()))]


def _chose_none(error: BaseException | None) -> bool:
    """Whether torch refused an empty list anywhere below the error."""
    while error is not None:
        if isinstance(error, ValueError) and "empty parameter list" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _refuse_foreign_parameters(optimizer: torch.optim.Optimizer, named: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Refuse an optimizer over other tensors, which would silently train nothing here."""
    own_ids = {id(parameter) for _, parameter in named}
    foreign = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in own_ids]
    if foreign:
        raise OptimizerRefused(
            f"optimizer() holds {len(foreign)} parameters that it was not given: they are not the worker's own",
            hint="build it from named_parameters: [p for _, p in named_parameters]",
        )


def shrunk(shape: Sequence[int], numel: float) -> tuple[int, ...]:
    """The shape with its largest dimension halved repeatedly, until it has at most `numel` elements."""
    sides = list(shape)
    while sides and max(sides) > 1 and torch.Size(sides).numel() > numel:
        largest = sides.index(max(sides))
        sides[largest] = -(-sides[largest] // 2)
    return tuple(sides)


def hold_still(optimizer: torch.optim.Optimizer) -> None:
    """Make its steps so small that weights do not move; groups without a rate are skipped."""
    for group in optimizer.param_groups:
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
        message = f"{type(error).__name__}: {error}"
        if "closure" in message.lower():
            raise OptimizerRefused(f"step() of the optimizer needs a closure: {message}", hint=NEEDS_CLOSURE) from error
        if "process group" in message.lower():
            raise OptimizerRefused(
                f"the optimizer communicates with other processes: {message}",
                hint="in a pipeline they train other parameters: use the optimizer's form for one device",
            ) from error
        raise TaskError(
            f"the optimizer fails on small copies of the model's parameters: {message}",
            hint="optimizer(named_parameters) returns a torch.optim.Optimizer whose step() needs no arguments",
        ) from error

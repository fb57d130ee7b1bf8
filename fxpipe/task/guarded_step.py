"""Steps of optimizers that can reach the model: they may use the parameters of their worker, and nothing else of it.

A hook of the optimizer, or a step() of the user's, may hold the model. What it reads there are no values of the run,
and what it writes there reaches no worker. So each use of such a tensor, or an attribute that is set, is refused.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.task.one_optimizer import OptimizerRefused
from fxpipe.torch_private import LightDispatchMode, memory_of, pytree, schema_of

CURE = (
    "a step may use the parameters that optimizer() was given; let forward or loss() update a teacher or a buffer, "
    "under torch.no_grad(), as momentum encoders do; --ema averages weights"
)
_DETACH = torch.ops.aten.detach.default


def guard(optimizer: torch.optim.Optimizer, modules: Iterable[nn.Module], parameters: Sequence[nn.Parameter]) -> None:
    """Let the optimizer's step() refuse to use what these modules hold, except its worker's own parameters.

    Parameters of other workers, which have no values here, may be changed in place: their own worker does it.
    """
    held = {id(module): module for root in modules for module in root.modules()}
    live = {memory_of(parameter) for parameter in parameters}
    names, spare = dict[int, str](), set[int]()
    tensors = []  # kept, so that their memory is not another's
    for module in held.values():
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            tensors.append(tensor)
            if (memory := memory_of(tensor)) not in live:
                names.setdefault(memory, name)
                spare |= {memory} if tensor.is_meta and tensor.requires_grad else set()
    step, guarding = optimizer.step, functools.partial(_Guard, names, spare, live)

    @functools.wraps(step)
    def guarded(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        assert len(tensors) >= len(names)
        with guarding(), _modules_kept(held):
            return step(*args, **kwargs)

    optimizer.step = types.MethodType(guarded, optimizer)  # type: ignore[method-assign] # schedulers need a method


class _Guard(LightDispatchMode):
    """Refuses calls of torch with tensors of this memory, which it names.

    The `spare` ones may be changed in place, if nothing `live`, which has its values, takes part.
    """

    def __init__(self, names: dict[int, str], spare: set[int], live: set[int]) -> None:
        super().__init__()
        self._names, self._spare, self._live = names, spare, live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        memories = {memory_of(leaf) for leaf in leaves if isinstance(leaf, Tensor)}
        used = memories & self._names.keys()
        changes = schema_of(func).is_mutable or func is _DETACH  # `.data`
        if used and not (changes and used <= self._spare and not memories & self._live):
            raise _refused(f"uses {self._names[min(used)]}, of which it has no values of the run")
        return func(*args, **(kwargs or {}))


@contextmanager
def _modules_kept(modules: dict[int, nn.Module]) -> Iterator[None]:
    """Inside, no attribute of these modules can be set, and their state be taken only where it has values."""
    setting, taking = nn.Module.__setattr__, nn.Module.state_dict

    def set_(module: nn.Module, name: str, value: Any) -> None:
        if modules.get(id(module)) is module:
            raise _refused(f"sets {name} of a {type(module).__name__}, which no worker would see")
        setting(module, name, value)

    def take(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if any(parameter.is_meta for parameter in module.parameters()):
            raise _refused(f"takes the state of a {type(module).__name__}, of which it has only a part")
        return taking(module, *args, **kwargs)

    nn.Module.__setattr__, nn.Module.state_dict = set_, take  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.__setattr__, nn.Module.state_dict = setting, taking  # type: ignore[method-assign]


def _refused(what: str) -> OptimizerRefused:
    """The error, with the place in the user's code."""
    frame: Any = sys._getframe()
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in ("torch", "fxpipe", "contextlib"):
        frame = frame.f_back
    place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}, in {frame.f_code.co_name}"
    return OptimizerRefused(
        f"a step of the optimizer looks at the model: {frame.f_code.co_name} {what}", where=place, hint=CURE
    )

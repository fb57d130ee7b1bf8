"""A view of the model for a worker's optimizer: the worker's own parameters are live, all others have no values.

    def optimizer(named_parameters, model):                       # its second parameter asks for it
        norms = {p: None for m in model.modules() if isinstance(m, nn.LayerNorm) for p in m.parameters()}
        return torch.optim.AdamW([
            {"params": [p for p in model.parameters() if p not in norms]},
            {"params": [*norms], "weight_decay": 0.0},
        ])

A view is the user's module: names, types, attributes, ties. Each of its parameters is either the very object that the
optimizer is given, or one on the meta device with its name, shape, dtype and `requires_grad`. The latter are removed
from the optimizer afterwards. A group that becomes empty stays, so that every worker has the same groups in the same
order, as a scheduler with a function for each group needs it.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.errors import FxpipeError, TaskError, listed
from fxpipe.random_state import random_state_kept
from fxpipe.task.guarded_step import guard
from fxpipe.task.meta import on_meta, valueless
from fxpipe.task.one_optimizer import OptimizerRefused, one_optimizer
from fxpipe.task.parameter_attributes import is_absent
from fxpipe.task.several_optimizers import may_draw, parts_of

Named = Sequence[tuple[str, nn.Parameter]]
VALUELESS = "parameters of other workers have no values here: group them by name, shape, dtype or module"
_CONTAINERS = (list, tuple, set, dict, OrderedDict)


def asks_for_model(hook: Callable[..., Any]) -> bool:
    """Whether a hook `optimizer` has a second positional parameter that is named `model` or has no default.

    An optimizer class has none: its arguments are options.
    """
    if inspect.isclass(hook):
        return False
    try:
        arguments = list(inspect.signature(hook).parameters.values())
    except (TypeError, ValueError):  # it is not written in Python
        return False
    places = [a for a in arguments if a.kind in (a.POSITIONAL_ONLY, a.POSITIONAL_OR_KEYWORD)]
    return len(places) > 1 and (places[1].name == "model" or places[1].default is inspect.Parameter.empty)


class ModelViews:
    """Makes views of one model, which is made without values when the first is needed.

    `make` is called as under `--meta`, and again with values if its code needs them: then the model is in memory for
    that time. The random state stays unchanged.
    """

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        self._make = make

    @functools.cached_property
    def model(self) -> nn.Module:
        """The module; its parameters have no values."""
        with random_state_kept(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they appeared when the model was compiled
            try:
                model = on_meta(self._make, all_of_it=False).model
            except Exception:
                model = self._make()
            return without_values(model)

    def optimizer(
        self, call: Callable[[nn.Module], Any], named: Named, where: str | None = None
    ) -> torch.optim.Optimizer:
        """The optimizer that `call` makes from a view, over live parameters among these, whose shapes may be smaller.

        Attributes that they lack are model()'s, but for tensors, of which it may make others.
        """
        present = dict(self.model.named_parameters(remove_duplicate=False))
        wrong = [name for name, p in named if name not in present or present[name].dim() != p.dim()]
        if wrong:
            raise OptimizerRefused(
                f"optimizer() asks for the model, but model() does not give the one that was compiled: {listed(wrong)} "
                "differs",
                where=where,
                hint="give the same model, or compile it again",
            )
        originals = {id(present[name]): parameter for name, parameter in named}
        for name, parameter in named:
            for key, value in vars(present[name]).items():
                lacks = key not in vars(parameter) or is_absent(vars(parameter)[key])
                if lacks and (id(value) in originals or not isinstance(value, Tensor)):
                    vars(parameter)[key] = replaced(value, originals)
        view = replaced(self.model, originals)
        try:
            optimizer = one_optimizer(call(view), where)
        except FxpipeError as error:
            if "meta" in error.what:
                error.hint = error.hint or VALUELESS
            raise
        own_ids = {id(parameter) for _, parameter in named}
        _take_out(optimizer, {id(parameter) for parameter in view.parameters()} - own_ids)
        if may_draw(optimizer):  # its step is not torch's alone
            guard(optimizer, [view], [parameter for _, parameter in named])
        return optimizer


def without_values(model: nn.Module) -> nn.Module:
    """A copy of the module with parameters on the meta device; it takes no memory, and shares buffers and all else."""
    copy: nn.Module = replaced(model, {id(parameter): valueless(parameter) for parameter in model.parameters()})
    return copy


def no_model(hook: str) -> TaskError:
    """The error if a hook asks for the model, and there is none."""
    other = "; or ask for named_parameters alone" if hook == "optimizer()" else ""
    return TaskError(
        f"{hook} asks for the model, but the build has only its parameters",
        hint=f"give model=, a function that makes the model that was compiled{other}",
    )


def of_parameters(hook: Callable[..., Any] | None, make: Callable[[], nn.Module] | None) -> Any:
    """The hook in a form that is called with named parameters only; `make` gives the model (`ModelViews`)."""
    if hook is None or not asks_for_model(hook):
        return hook
    if make is None:
        raise no_model("optimizer()")
    views = ModelViews(make)

    def optimizer(named_parameters: Named) -> torch.optim.Optimizer:
        return views.optimizer(lambda view: hook(list(named_parameters), view), named_parameters)

    return optimizer


def replaced(value: Any, replacements: dict[int, Any]) -> Any:
    """The value with replacements for objects known by their id, in modules and containers of its own.

    A module's attributes may hold parameters and modules in lists and dictionaries; other objects are not searched.
    """
    if id(value) in replacements:
        return replacements[id(value)]
    if isinstance(value, nn.Module):
        module = replacements[id(value)] = object.__new__(type(value))
        for name, held in vars(value).items():
            member = replaced(held, replacements)
            vars(module)[name] = type(held)(held) if member is held and type(held) in _CONTAINERS else member
        return module
    if type(value) in (dict, OrderedDict):
        pairs = [(key, replaced(held, replacements)) for key, held in value.items()]
        return type(value)(pairs) if any(member is not value[key] for key, member in pairs) else value
    if type(value) in (list, tuple, set):
        several = [(held, replaced(held, replacements)) for held in value]
        return type(value)(member for _, member in several) if any(a is not b for a, b in several) else value
    return value


def _take_out(optimizer: torch.optim.Optimizer, foreign: set[int]) -> None:
    """Remove parameters, given by their ids, from the optimizer's groups and state."""
    for part in parts_of(optimizer):
        for group in part.param_groups:
            stay = [id(parameter) not in foreign for parameter in group["params"]]
            for key in ("params", "param_names"):  # names if it was made from pairs
                if key in group:
                    group[key] = [entry for entry, stays in zip(group[key], stay, strict=True) if stays]
        for held in [held for held in part.state if isinstance(held, Tensor) and id(held) in foreign]:
            del part.state[held]

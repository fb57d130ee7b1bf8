"""Random numbers that are the same for every sample, so that a batch and its microbatches can be compared."""

from __future__ import annotations

import math
from typing import Any

import torch

from fxpipe.torch_private import TorchDispatchMode, schema_of


class SteadyRandomness(TorchDispatchMode):
    """Inside, operators that draw random numbers give the same number for every element, whatever the shape: dropout
    drops nothing.

    It works below autograd, so that eager PyTorch and a captured program see the same numbers.

    Attributes:
        unknown: random operators that were met and are not known here; their numbers stay random.
    """

    def __init__(self) -> None:
        super().__init__()
        self.unknown: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        given = {a.name: v for a, v in zip(schema_of(func).arguments, args, strict=False)} | kwargs
        if "dropout_p" in given or any(a.name == "dropout_p" for a in schema_of(func).arguments):
            return func(**{**given, "dropout_p": 0.0})
        name = schema_of(func).name.partition("::")[2]
        steady = _STEADY.get(name.rstrip("_"))
        if steady is None:
            self.unknown.add(name)
            return func(*args, **kwargs)
        made = func(*args, **kwargs)  # for its shape, type and place
        return steady(made, given) if isinstance(made, tuple) else made.copy_(steady(made, given))


def _dropout(made: Any, given: dict[str, Any]) -> Any:
    source, probability = given["input"], given["p"]
    if not given["train"] or probability == 0:
        return made
    kept = torch.ones_like(made[1])
    scale = 0.0 if probability == 1 else 1 / (1 - probability)
    return source * scale, kept


def _number(made: torch.Tensor, value: float) -> torch.Tensor:
    return torch.full_like(made, value)


def _normal(made: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
    """Mean and deviation may be tensors."""
    return torch.zeros_like(made) + given.get("mean", 0.0) + 0.5 * given.get("std", 1.0)


def _indices(made: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
    """The first ones, each once where they must differ."""
    return (torch.arange(made.shape[-1], device=made.device) % given["self"].shape[-1]).expand_as(made)


_STEADY: dict[str, Any] = {
    "native_dropout": _dropout,
    "bernoulli": lambda made, given: torch.ones_like(made),
    "rand": lambda made, given: _number(made, 0.5),
    "rand_like": lambda made, given: _number(made, 0.5),
    "uniform": lambda made, given: _number(made, (given.get("from", 0.0) + given.get("to", 1.0)) / 2),
    "randn": lambda made, given: _number(made, 0.5),
    "randn_like": lambda made, given: _number(made, 0.5),
    "normal": _normal,
    "normal_functional": _normal,
    "log_normal": lambda made, given: _normal(made, {"mean": 1.0, "std": 2.0} | given).exp(),
    "cauchy": lambda made, given: _number(made, given.get("median", 0.0) + given.get("sigma", 1.0)),
    "geometric": lambda made, given: _number(made, 1 + math.floor(-math.log(2) / math.log1p(-given["p"]))),
    "binomial": lambda made, given: (given["count"] * given["prob"]).floor(),
    "multinomial": _indices,
    "_standard_gamma": lambda made, given: given["self"],
    "_sample_dirichlet": lambda made, given: given["self"] / given["self"].sum(-1, keepdim=True),
    "exponential": lambda made, given: _number(made, math.log(2) / given.get("lambd", 1.0)),
    "poisson": lambda made, given: given["self"],
    "randint": lambda made, given: _number(made, given.get("low", 0)),
    "randint_like": lambda made, given: _number(made, given.get("low", 0)),
    "random": lambda made, given: _number(made, given.get("from", 0) or 0),
    "randperm": lambda made, given: torch.arange(made.shape[0], dtype=made.dtype, device=made.device),
}

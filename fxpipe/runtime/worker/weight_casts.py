"""Weights in the types in which stages read them, if these have fewer bits; each is cast once a version."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

from fxpipe.plan.plan import Plan
from fxpipe.runtime.worker.weight_copies import Key

Take = Callable[[Key, Sequence[str]], Mapping[str, Tensor]]
"""Gives weights of a version as they are."""


class WeightCasts:
    """The casts that one worker's actions read.

    Attributes:
        types: by name, of the weights that are cast.
    """

    def __init__(self, plan: Plan) -> None:
        self.types: dict[str, torch.dtype] = {p.name: getattr(torch, p.cast) for p in plan.parameters if p.cast}
        self._casts: dict[Key, dict[str, Tensor]] = {}

    def read(self, key: Key, names: Sequence[str], take: Take) -> Mapping[str, Tensor]:
        """These weights, and perhaps others, as stages read them; `take` gives those that are not cast yet."""
        if not self.types:
            return take(key, names)
        casts = self._casts.setdefault(key, {})
        weights = dict(take(key, [name for name in names if name not in casts]))
        casts |= {name: self.cast(name, weights[name]) for name in names if name in self.types and name not in casts}
        return weights | casts

    def cast(self, name: str, weight: Tensor) -> Tensor:
        """One weight as stages read it."""
        dtype = self.types.get(name)
        return weight if dtype is None else weight.detach().to(dtype)

    def keep(self, key: Key, names: Collection[str], take: Take) -> list[str]:
        """The version is about to be replaced: keep these of its weights; returns those that are not cast."""
        if casts := self.types.keys() & names:
            read = self.read(key, sorted(casts), take)
            self._casts[key] = {name: read[name] for name in casts}
        return [name for name in names if name not in casts]

    def forget(self, wanted: Callable[[Key], bool] = lambda key: False) -> None:
        """Forget the casts of all versions but those that are `wanted`."""
        self._casts = {key: casts for key, casts in self._casts.items() if wanted(key)}

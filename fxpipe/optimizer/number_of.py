"""A number that knows whose values it is made of, as long as Python computes with it by operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fxpipe.optimizer.whose import Workers, several


class NumberOf(float):
    """A float that was read from a tensor, or computed from one that was; functions such as `math.sqrt` lose it.

    Attributes:
        workers: whose values it is made of.
        met: called where it becomes one of several workers' values, or is compared with another worker's.
    """

    workers: Workers
    met: Callable[[], None]

    def __new__(cls, value: float, workers: Workers, met: Callable[[], None]) -> NumberOf:
        made = super().__new__(cls, value)
        made.workers, made.met = workers, met
        return made

    def __reduce__(self) -> tuple[type[float], tuple[float]]:
        """A copy is a plain number."""
        return float, (float(self),)


def _knowing(name: str) -> Callable[..., Any]:
    plain = getattr(float, name)

    def operate(self: NumberOf, *others: Any) -> Any:
        workers = self.workers
        for other in others:
            if isinstance(other, NumberOf):
                workers |= other.workers
        if several(workers) and workers != self.workers:
            self.met()
        found = plain(self, *others)
        return NumberOf(found, workers, self.met) if type(found) is float else found

    return operate


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    for _side in ("", "r"):
        setattr(NumberOf, f"__{_side}{_name}__", _knowing(f"__{_side}{_name}__"))
for _name in ("lt", "le", "gt", "ge", "eq", "ne", "neg", "pos", "abs"):
    setattr(NumberOf, f"__{_name}__", _knowing(f"__{_name}__"))

"""merge_equal: what is computed twice is computed once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from fxpipe.ir.aten import is_random
from fxpipe.ir.program import Level, Program
from fxpipe.ir.transform import Pass


@dataclass(frozen=True)
class MergeEqual(Pass):
    """Merge equal calls with equal arguments into one node, except those that draw random numbers.

    Metrics often call the model several times, `loss(model, batch)` and `model(x).argmax(1)`: in eval mode both
    give the same.

    Before:                                After:
        y = aten.mm.default(x, w)              y = aten.mm.default(x, w)
        a = aten.argmax.default(y, 1)          a = aten.argmax.default(y, 1)
        y_1 = aten.mm.default(x, w)            m = aten.mean.default(y)
        m = aten.mean.default(y_1)
    """

    name: ClassVar[str] = "merge_equal"
    requires: ClassVar[Level] = Level.FOLDED
    provides: ClassVar[Level] = Level.FOLDED

    def __call__(self, program: Program) -> Program:
        program = program.copy()
        first: dict[Any, fx.Node] = {}
        for node in list(program):
            if is_random(node):
                continue
            same = first.setdefault((node.target, _key(node.args), _key(node.kwargs)), node)
            if same is not node:
                node.replace_all_uses_with(same)
                program.graph.erase_node(node)
        return program


def _key(argument: Any) -> Any:
    """Equal for equal arguments: 1, 1.0 and True differ."""
    if isinstance(argument, fx.Node):
        return argument
    if isinstance(argument, (list, tuple)):
        return type(argument).__name__, tuple(map(_key, argument))
    if isinstance(argument, dict):
        return tuple((name, _key(value)) for name, value in argument.items())
    return type(argument).__name__, repr(argument)

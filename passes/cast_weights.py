"""cast_weights: a weight that is read only in a type of fewer bits is read in that type, cast once for each version."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from fxpipe.ir.program import Level, Program, value
from fxpipe.ir.transform import Pass
from fxpipe.ir.wire import is_send

_CAST = torch.ops.aten._to_copy.default


@dataclass(frozen=True)
class CastWeights(Pass):
    """Take casts of weights, which autocast and `--params` make, out of the step: whoever gives weights casts them.

    A weight that another call reads as it is keeps its casts, and so does one whose cast is sent or returned.

    Fields:
        types: by parameter, the type in which another shape's stages read it; others keep their casts. None for all.

    Before:  w = placeholder  # f32          After:  w = placeholder  # bf16
             w_bf16 = _to_copy(w, bf16)              y = mm(x, w)
             y = mm(x, w_bf16)
    """

    name: ClassVar[str] = "cast_weights"
    requires: ClassVar[Level] = Level.WIRED
    provides: ClassVar[Level] = Level.WIRED

    types: dict[str, str] | None = None

    def __call__(self, program: Program) -> Program:
        placeholders = program.placeholders
        chosen = [p.node for p in program.parameters if self._takes_out(p.names[0], _only_type(placeholders[p.node]))]
        if not chosen:
            return program
        program = program.copy()
        placeholders = program.placeholders
        for name in chosen:
            weight = placeholders[name]
            weight.meta["val"] = value(next(iter(weight.users)))
            for cast in list(weight.users):
                cast.replace_all_uses_with(weight)
                program.graph.erase_node(cast)
        return program

    def _takes_out(self, name: str, dtype: torch.dtype | None) -> bool:
        """Whether the casts of a parameter to its only type go, if it has one."""
        return dtype is not None and (self.types is None or str(dtype) == f"torch.{self.types.get(name)}")


def _only_type(weight: fx.Node) -> torch.dtype | None:
    """The type of fewer bits to which all calls cast a weight that read it; None if there is none."""
    held = value(weight)
    types = {_type_of(cast, held) for cast in weight.users}
    return types.pop() if len(types) == 1 else None


def _type_of(cast: fx.Node, held: torch.Tensor) -> torch.dtype | None:
    """The type of a cast that does nothing but make the weight narrower, if it is neither sent nor returned."""
    if cast.target is not _CAST or any(user.op == "output" or is_send(user) for user in cast.users):
        return None
    narrow = value(cast)
    alike = narrow.device == held.device and narrow.stride() == held.stride()
    return narrow.dtype if alike and narrow.dtype.itemsize < held.dtype.itemsize else None

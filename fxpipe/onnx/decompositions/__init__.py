"""What ONNX lacks, in operators that it has. One file a family; `table` is all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._ops import OpOverload

from fxpipe.onnx.decompositions import attention, convolution, indexing, losses, norms, pointwise, pooling, resizing

_FAMILIES = (attention, convolution, indexing, losses, norms, pointwise, pooling, resizing)


def table() -> dict[OpOverload, Callable[..., Any]]:
    """Decompositions by operator, for `make_fx` and `ExportedProgram.run_decompositions`."""
    return {op: function for family in _FAMILIES for op, function in family.TABLE.items()}

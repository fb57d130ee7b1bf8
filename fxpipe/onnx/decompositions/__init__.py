"""What ONNX lacks, in operators that it has. Each family has a file; `table` combines them."""

from __future__ import annotations

from fxpipe.onnx.decompositions import (
    attention,
    convolution,
    experts,
    indexing,
    losses,
    norms,
    pointwise,
    pooling,
    recurrent,
    resizing,
)
from fxpipe.torch_private import Decompositions

_FAMILIES = (attention, convolution, experts, indexing, losses, norms, pointwise, pooling, recurrent, resizing)


def table() -> Decompositions:
    """Decompositions by operator, for `make_fx` and `ExportedProgram.run_decompositions`."""
    return {op: function for family in _FAMILIES for op, function in family.TABLE.items()} | experts.of_libraries()

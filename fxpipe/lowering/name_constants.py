"""Names for the constants that a further capture found, next to those that the build has already."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

import torch

from fxpipe.ir.program import Program
from fxpipe.task.batch import tensor_spec


def name_constants(program: Program, prefix: str, known: Mapping[str, torch.Tensor]) -> Program:
    """A constant gets the name of an equal one in the build; else a new name, which begins with `prefix`.

    The same is done for the constants of the program's totals.

    Args:
        known: the build's tensors by name.
    """
    constants = {name: t for name, t in known.items() if re.fullmatch(r"((evaluate|shape)\.\d+\.)?constant_\d+", name)}

    def named(part: Program) -> Program:
        rows = []
        for row in part.buffers:
            if row.constant:
                tensor = part.values[row.node]
                spec = tensor_spec(tensor)
                alike = (name for name, t in constants.items() if tensor_spec(t) == spec and torch.equal(t, tensor))
                row = dataclasses.replace(row, names=(next(alike, f"{prefix}.{row.names[0]}"),))
            rows.append(row)
        return dataclasses.replace(part, buffers=tuple(rows), totals=part.totals and named(part.totals))

    return named(program)

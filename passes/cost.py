"""cost: bytes and seconds of every node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from fxpipe.costs.analytic import analytic_seconds
from fxpipe.ir.program import Level, Program, info, size_of, value
from fxpipe.ir.transform import Pass
from fxpipe.planner.device import CPU, Device


@dataclass(frozen=True)
class Cost(Pass):
    """Give every node its bytes and seconds.

    Without measured `seconds`, by node name, they follow from FLOPs and bytes, for a device that need not be present.
    """

    name: ClassVar[str] = "cost"
    requires: ClassVar[Level] = Level.NUMBERED
    provides: ClassVar[Level] = Level.COSTED

    seconds: Mapping[str, float] | None = None
    device: Device = CPU

    def __call__(self, program: Program) -> Program:
        program = program.copy(level=Level.COSTED)
        for node in program:
            record = info(node)
            record.bytes = size_of(value(node))
            record.seconds = analytic_seconds(node, self.device) if self.seconds is None else self.seconds[node.name]
        return program

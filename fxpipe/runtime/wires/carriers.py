"""Which transport carries the messages from one process to another, and why."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fxpipe.errors import listed


@dataclass(frozen=True)
class Carrier:
    """What carries the messages of a direction.

    Attributes:
        source, target: the processes.
        transport: 'shared memory', 'gloo', or of CUDA tensors 'peer memory', 'nccl', 'gloo through CPU memory'.
        why: this one.
    """

    source: int
    target: int
    transport: str
    why: str


def carriers_text(carriers: Iterable[Carrier], most: int = 20) -> list[str]:
    """A line for each transport and reason: `0 ↔ 1, 2 → 3: gloo: different hosts`.

    Args:
        most: how many pairs a line names.
    """
    found: dict[tuple[str, str], set[tuple[int, int]]] = {}
    for each in carriers:
        found.setdefault((each.transport, each.why), set()).add((each.source, each.target))
    lines = []
    for (transport, why), directions in found.items():
        both = {(one, other) for one, other in directions if (other, one) in directions}
        named = sorted((min(way), max(way), "↔") for way in both if way[0] < way[1])
        named += sorted((*way, "→") for way in directions - both)
        pairs = (
            "all pairs" if len(found) == 1 else listed([f"{one} {sign} {other}" for one, other, sign in named], most)
        )
        lines.append(f"{pairs}: {transport}: {why}")
    return lines

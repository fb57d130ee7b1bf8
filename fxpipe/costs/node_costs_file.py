"""Measured costs, kept with the build: the same program on the same device is measured once. Needs no torch to read.

`node_costs.json` is in the build folder, next to `costs.json`, and like it not part of the plan: it may be deleted. It
is used only if its fingerprint is the same: the program's calls with their shapes, the device, the threads, torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fxpipe.errors import BuildError
from fxpipe.planner.profile import check_amounts
from fxpipe.typed_json import Malformed, convert, explained, parse

if TYPE_CHECKING:
    from fxpipe.ir.program import Program

NODE_COSTS = "node_costs.json"
_FORMAT = 1
_HINT = "it may be deleted: costs are then measured"

TRUSTED = 0.25
"""The largest difference between the sum of the nodes' times and the whole's before they are in doubt."""


def doubt(ratio: float) -> float:
    """How far off nodes' times are, from the whole's time over their sum; 0 if that is near enough to 1."""
    off = abs(1 / ratio - 1) if ratio else 1.0
    return off if off > TRUSTED else 0.0


@dataclass(frozen=True)
class MeasuredCosts:
    """The measured times of every node of a program.

    Attributes:
        fingerprint: of what was measured, and on what.
        seconds: by node name; they add up to the whole forward and the whole backward.
        ratios: by phase, the whole's time over the sum of its nodes' times before they were scaled by it.
        spread: the share of the step's time that two halves of the measurements put on different sides of some cut.
        warnings: why they are in doubt; not saved, since doubtful costs are measured again.
    """

    fingerprint: str
    seconds: Mapping[str, float]
    ratios: Mapping[str, float]
    spread: float = 0.0
    warnings: tuple[str, ...] = ()

    def to_json(self) -> str:
        """The text of `node_costs.json`; `read` gives the same numbers back, to the last bit."""
        body = {
            "format": _FORMAT,
            "fingerprint": self.fingerprint,
            "ratios": dict(self.ratios),
            "spread": self.spread,
            "seconds": dict(self.seconds),
        }
        return json.dumps(body, indent=1) + "\n"


def read(path: str | Path, fingerprint: str) -> MeasuredCosts | None:
    """The costs saved at `path`; None if there are none, or they are for another program, device, thread count or
    torch.

    Raises:
        BuildError: the file exists, but `to_json` did not write it.
    """
    path = Path(path)
    if not path.exists():
        return None
    with explained(path, error=BuildError, hint=_HINT):
        body = parse(path)
        if not isinstance(body, dict) or "format" not in body:
            raise Malformed("the format is missing", ", $")
        if body.pop("format") != _FORMAT:
            return None
        costs = convert(body, MeasuredCosts)
        check_amounts(body)
        if costs.ratios.keys() != {"F", "B"} or not all(costs.ratios.values()):
            raise Malformed("F and B need a ratio each", ", $.ratios")
    return costs if costs.fingerprint == fingerprint else None


def fingerprint(program: Program, device: str, threads: int) -> str:
    """A digest of everything that affects how long a program's nodes take: the same in every process.

    `device` is as `device_name` gives it, `threads` the CPU threads while measuring.
    """
    import torch

    digest = hashlib.sha256()
    for line in (torch.__version__, device, str(threads), str(program.autocast), *_lines(program)):
        digest.update(line.encode() + b"\n")
    return digest.hexdigest()


def device_name(kind: str) -> str:
    """The device that measures: `cuda: NVIDIA H200`, `cpu: AMD EPYC 9654, 2 cores`."""
    if kind == "cuda":
        import torch

        return f"cuda: {torch.cuda.get_device_name()}"
    return f"{kind}: {_processor()}, {os.cpu_count()} cores"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    models = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or platform.machine())


def _lines(program: Program) -> Iterator[str]:
    """Every node with its phase, shapes and strides; but not its origin or its unit, which do not affect its time."""
    from fxpipe.ir.printer import call_text
    from fxpipe.ir.program import info, value

    for name, node in program.placeholders.items():
        yield f"{name} {_type(value(node))}"
    for node in program:
        yield f"{info(node).phase} {node.name} = {call_text(node, str)} {_type(value(node))}"
    yield " ".join(node.name for node in program.output_nodes)


def _type(value: Any) -> str:
    import torch

    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{tuple(value.shape)}{tuple(value.stride())}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_type, value))})"
    return type(value).__name__

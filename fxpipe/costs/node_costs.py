"""The time of every node of a program: measured here, or known from an earlier compile."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from fxpipe.costs.node_costs_file import MeasuredCosts, device_name, doubt, fingerprint, read
from fxpipe.costs.node_times import Yardstick, measure
from fxpipe.errors import BuildError
from fxpipe.ir.program import Program


def node_costs(
    program: Program,
    threads: int | None = None,
    known: Path | None = None,
    repeats: int | None = None,
    yardstick: Yardstick | None = None,
) -> MeasuredCosts:
    """An earlier compile's costs if they are for this program and not in doubt, else new ones.

    Forward and backward are run on the model's own device (`fxpipe/costs/node_times.py`).

    Args:
        threads: CPU threads while measuring: as many as one worker will have.
        known: where an earlier compile may have saved its costs.
        repeats: runs after the warm-up; None adapts them to the step's length.
        yardstick: makes new costs comparable with its own; what an earlier compile saved is not, and then not used.

    Raises:
        CaptureError: the step fails on the example batch, or does not fit the device; names the node's place.
    """
    mark = fingerprint(program, device_name(program.device), threads or torch.get_num_threads())
    warnings: tuple[str, ...] = ()
    if known is not None and yardstick is None:
        try:
            costs = read(known, mark)
            complete = costs is not None and costs.seconds.keys() == {n.name for n in program}
            if costs is not None and complete and not _doubts(costs.ratios):
                return costs
        except BuildError as error:
            warnings = (f"{error.what} ({error.where}); they are measured again",)
    seconds, ratios, spread = measure(program, threads, repeats, yardstick)
    return MeasuredCosts(mark, seconds, ratios, spread, (*warnings, *_doubts(ratios)))


def _doubts(ratios: Mapping[str, float]) -> tuple[str, ...]:
    names = {"F": "forward", "B": "backward"}
    return tuple(
        f"the times of {names[phase]}'s nodes add up to {1 / ratio:.2f} times what it takes as a whole; they were "
        "scaled to fit, but the machine may have been busy: compile again when it is not"
        for phase, ratio in ratios.items()
        if doubt(ratio)
    )

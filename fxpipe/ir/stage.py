"""A stage: what one worker executes, as two graphs with an explicit interface."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from fxpipe.plan.spec import PartSpec


@dataclass(frozen=True)
class Part:
    """One function of a stage.

    `graph` has a placeholder for every weight, buffer and batch leaf or saved value (in the order of `spec`), ATen
    calls, Send and Recv nodes (`edges` gives the edge's name by node name), and the output tuple: forward
    `(loss or None, updates, saved)`, backward `gradients`, a worker's share of an evaluation `metrics`.
    """

    graph: fx.Graph
    spec: PartSpec
    edges: dict[str, str]


@dataclass(frozen=True)
class Stage:
    """The forward and the backward of one worker."""

    worker: int
    forward: Part
    backward: Part

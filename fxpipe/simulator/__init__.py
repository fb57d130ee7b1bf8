"""How long a schedule takes on given workers and links, without running anything. Pure Python: no torch.

model (the inputs) → simulate (the run) → result (what came out) → timeline (as a picture and for Perfetto). From a
build: `timings` records where in a stage its messages are sent and awaited, `of_build` makes the inputs; these two
know torch and are not imported here.
"""

from __future__ import annotations

from fxpipe.simulator.model import Message, Replica, Scenario, WorkerCost
from fxpipe.simulator.result import Simulation, Span, Transfer
from fxpipe.simulator.simulate import simulate
from fxpipe.simulator.timeline import picture

__all__ = [
    "Message",
    "Replica",
    "Scenario",
    "Simulation",
    "Span",
    "Transfer",
    "WorkerCost",
    "picture",
    "simulate",
]

"""How long a schedule takes on given workers and links. Pure Python: only `of_build` imports torch.

scenario (the inputs) → simulate (the run) → result. `of_build` and `of_partition` make the
inputs from a build or a partition; they are not imported here.
"""

from __future__ import annotations

from fxpipe.plan.cost_records import StageTime
from fxpipe.simulator.result import Simulation, Span
from fxpipe.simulator.scenario import NEVER, Message, Scenario, WeightCopy
from fxpipe.simulator.simulate import simulate

__all__ = [
    "NEVER",
    "Message",
    "Scenario",
    "Simulation",
    "Span",
    "StageTime",
    "WeightCopy",
    "simulate",
]

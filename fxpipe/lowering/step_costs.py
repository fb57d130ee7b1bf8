"""What a training step costs: its nodes and its optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from fxpipe.costs.node_costs_file import MeasuredCosts, device_name, doubt
from fxpipe.costs.node_times import Yardstick, node_costs
from fxpipe.costs.optimizer import optimizer_costs
from fxpipe.ir.program import Program
from fxpipe.lowering.options import CompileOptions
from fxpipe.passes.analysis.profile import profile_of
from fxpipe.passes.cost import Cost
from fxpipe.plan.cost_records import OptimizerCosts
from fxpipe.planner.device import CPU, Device
from fxpipe.planner.profile import Profile
from fxpipe.task.hooks import OF_OPTIMIZERS
from fxpipe.task.meta import are_on_meta
from fxpipe.task.model_file import default_optimizer
from fxpipe.task.parameter_attributes import hang
from fxpipe.threads import threads as worker_threads
from fxpipe.tracing.hook_state import undone


@dataclass(frozen=True)
class StepCosts:
    """The costs of a training step.

    Attributes:
        nodes: the measured costs; None if they are computed.
        device: the device that they are computed for.
        optimizer: its update and its state.
    """

    nodes: MeasuredCosts | None
    device: Device
    optimizer: OptimizerCosts

    @property
    def of_nodes(self) -> Cost:
        """The pass that gives the nodes their costs."""
        return Cost(None if self.nodes is None else self.nodes.seconds, self.device)

    def profile(self, program: Program, levels: bool) -> Profile:
        """The costs of the program's units, whose nodes have these costs; `levels` as in `profile_of`."""
        found = profile_of(program, self.optimizer.seconds_per_byte, levels)
        if self.nodes is None:
            return replace(found, device=f"{self.device.name}, computed")
        doubts = max(map(doubt, self.nodes.ratios.values()))
        return replace(found, device=device_name(program.device), spread=self.nodes.spread, doubt=doubts)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about the costs."""
        return (*(self.nodes.warnings if self.nodes else ()), *([self.optimizer.doubt] if self.optimizer.doubt else ()))


@dataclass
class SharedCosts:
    """What the costs of one training with different numbers of microbatches share; None until it is known.

    Attributes:
        yardstick: makes what is measured at another moment comparable.
        optimizer: the costs of the optimizer.
    """

    yardstick: Yardstick | None = None
    optimizer: OptimizerCosts | None = None


def step_costs(program: Program, options: CompileOptions, shared: SharedCosts | None = None) -> StepCosts:
    """The costs of a program whose units are numbered, measured on its own device or left to be computed.

    Args:
        shared: what is known from other numbers of microbatches; what becomes known is added.

    Raises:
        CaptureError: the step fails on the example batch, or does not fit the device; names the node's place.
    """
    shared = shared or SharedCosts()
    measured = options.cost == "measured" or (options.cost is None and not has_no_values(program))
    nodes = None
    if measured:
        nodes = node_costs(program, options.threads, options.known_costs, yardstick=shared.yardstick)
        shared.yardstick = shared.yardstick or Yardstick.of(program, nodes.seconds)
    device = options.device or CPU
    if shared.optimizer is None:
        hook = options.optimizer or default_optimizer

        def make(named: Sequence[tuple[str, nn.Parameter]]) -> Any:
            return hook([(name, hang(parameter, name, program.attributes.get(name, {}))) for name, parameter in named])

        with worker_threads(options.threads, 1), tried(options):
            found = optimizer_costs(trained(program), make, timed=measured, bandwidth=device.bandwidth)
        # a run's optimizer may have no momentum
        shared.optimizer = found if options.optimizer else replace(found, momentum=False)
    return StepCosts(nodes, device, shared.optimizer)


def tried(options: CompileOptions) -> AbstractContextManager[None]:
    """Inside, the optimizer and its scheduler are tried; afterwards what they reach is as before."""
    return undone({name: hook for name, hook in options.hooks.items() if name in OF_OPTIMIZERS})


def trained(program: Program) -> list[tuple[str, Tensor]]:
    """The trained parameters, under their first names."""
    return [(p.names[0], program.values[p.node]) for p in program.parameters if p.trained]


def has_no_values(program: Program) -> bool:
    """Whether parameters are on the meta device."""
    return are_on_meta([program.values[p.node] for p in program.parameters])

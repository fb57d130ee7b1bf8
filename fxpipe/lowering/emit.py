"""Cuts, wires and emits a program with costs: once in `lower`, several times to compare."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from fxpipe.builds.build import Build
from fxpipe.ir.program import Buffer, Parameter, Program
from fxpipe.ir.program_table import table_of
from fxpipe.lowering.choose_cuts import Choice, choose_cuts
from fxpipe.lowering.lowering import Lowering
from fxpipe.lowering.make_plan import make_plan
from fxpipe.lowering.step_costs import StepCosts
from fxpipe.passes.analysis.edge_timings import edge_timings
from fxpipe.passes.analysis.metric_nodes import without_metrics
from fxpipe.passes.analysis.summary import summarize
from fxpipe.passes.encode import Encode
from fxpipe.passes.recompute import Recompute
from fxpipe.passes.reduce import Reduce
from fxpipe.plan.cost_records import CodecTimes
from fxpipe.plan.plan import Plan
from fxpipe.plan.spec import EdgeSpec
from fxpipe.planner.costs_file import BuildCosts
from fxpipe.planner.partition import Partition
from fxpipe.planner.profile import Profile
from fxpipe.planner.quantity import size
from fxpipe.planner.setting import Setting
from fxpipe.planner.workers import Ratios
from fxpipe.policy import make as make_policy
from fxpipe.policy.demand import Demand
from fxpipe.policy.recipe import refuse_crossing
from fxpipe.schedule import of_plan
from fxpipe.simulator.memory import GRAPHS, process_peaks

Codecs = Callable[[Sequence[EdgeSpec]], Mapping[str, str]]
"""Gives edges their codecs, by edge name."""


@dataclass(frozen=True)
class Emitter:
    """Cuts and emits a program with costs, any number of times.

    `known` are partitions that were planned before, the one to take last, by the bytes that travel for each byte of
    values.
    """

    step: Lowering
    costs: StepCosts
    setting: Setting
    codec_times: Mapping[str, CodecTimes]
    known: Mapping[Ratios, tuple[Partition, ...]] = field(default_factory=dict)
    reduce: Reduce | None = None

    @cached_property
    def planned(self) -> Program:
        """The program without its metrics, which decide nothing about the cuts."""
        return without_metrics(self.step.program)

    @cached_property
    def profile(self) -> Profile:
        """The costs of its units."""
        return self.costs.profile(self.planned, self.step.options.recomputes)

    def choose(self, setting: Setting) -> Choice:
        """The cuts, as given or as the planner finds best."""
        partitions = self.known.get(setting.ratios, ())
        return choose_cuts(self.planned, self.profile, self.step.options, setting, partitions)

    def emit(self, choice: Choice, codecs: Codecs, observed: bool = True) -> tuple[Program, Build]:
        """The emitted program, and its build; the step's observers are called if it is `observed`."""
        recompute = Recompute(choice.rooms) if choice.rooms else None
        along = () if self.reduce is not None and len(set(self.reduce.replicas)) > 1 else None
        step = self.step if observed else replace(self.step, observers=())
        step = step.wired(choice.cuts, recompute, along)
        step = step.emitted(Encode(codecs(step.program.edges), self.codec_times), self.reduce)
        build = self._build(step, choice)
        return step.program, replace(build, programs=(step.saved("training"),)) if observed else build

    def _build(self, step: Lowering, choice: Choice) -> Build:
        program, options = step.program, step.options
        setting, costs = self.setting, self.costs
        plan = make_plan(program, setting)
        plan = replace(plan, codec=options.codec, weights_codec=options.encoding.of_weights)
        schedule = of_plan(plan)
        demand = Demand(plan, schedule, make_policy(plan.policy))
        run = plan  # as it will, for its memory; engines are checked later
        if options.backend == GRAPHS:
            run = plan.with_step(stages=tuple(replace(stage, engines=(GRAPHS, GRAPHS)) for stage in plan.stages))
        refuse_crossing(plan, demand)
        held: tuple[Parameter | Buffer, ...] = (*program.parameters, *program.buffers)
        tensors = {row.names[0]: program.values[row.node] for row in held if not program.values[row.node].is_meta}
        summary = BuildCosts(
            workers=tuple(summarize(program, run, demand, costs.optimizer)),
            timings=edge_timings(program),
            partitions=choice.partitions,
            links=setting.links,
            speeds=setting.speeds,
            memory=setting.memory if all(map(math.isfinite, setting.memory)) else (),
            optimizer_bytes=costs.optimizer.state_bytes,
            step_memory=costs.optimizer.step,
            policy_times=costs.optimizer.policy,
        )
        return Build(
            plan=plan,
            files=program.files,
            tensors={name: t.detach().clone() for name, t in tensors.items()},
            costs=summary,
            profile=self.profile,
            nodes=table_of(program, plan),
            passes=step.lines,
            node_costs=None if costs.nodes is None else costs.nodes.to_json(),
            warnings=(
                *program.warnings,
                *costs.warnings,
                *(_idle(plan) if choice.partitions else ()),
                *_full(run, summary, demand, setting),
            ),
        )


def _full(plan: Plan, costs: BuildCosts, demand: Demand, setting: Setting) -> Iterator[str]:
    """A warning for each process whose forecast exceeds the given memory, which the planner only estimates."""
    if not setting.memory:
        return
    needed = process_peaks(plan, costs, demand) if plan.virtual else [row.memory_bytes for row in costs.workers]
    for rank, (need, limit) in enumerate(zip(needed, setting.memory_of(plan.ranks), strict=True)):
        if need > limit:
            yield (
                f"{'process' if plan.virtual else 'worker'} {rank} will need {size(need)} of memory, and has "
                f"{size(limit)}: more workers, more microbatches or a smaller --memory, for which the planner leaves "
                "more room"
            )


def _idle(plan: Plan) -> tuple[str, ...]:
    idle = [
        k
        for k, s in enumerate(plan.stages)
        if all(first == end for first, end in (s.forward_units, s.backward_units, s.weight_units))
    ]
    if not idle:
        return ()
    workers = f"workers {', '.join(map(str, idle))} have" if len(idle) > 1 else f"worker {idle[0]} has"
    return (f"{workers} nothing to do: on these links more workers do not help",)

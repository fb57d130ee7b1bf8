"""Batches of several shapes: the step for each further shape becomes separate stages, cut where the first's are.

Every worker owns the same parameters and updates the same buffers for any batch; only the work differs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from fxpipe.builds.build import Build
from fxpipe.costs.step_work import step_work
from fxpipe.errors import BatchError, CutError, FxpipeError
from fxpipe.ir.program import Program, info, is_call_of
from fxpipe.lowering.choose_codecs import like
from fxpipe.lowering.evaluation import with_readers, with_totals
from fxpipe.lowering.first_of_each import check_number, fits
from fxpipe.lowering.lowering import Lowering, name_constants
from fxpipe.lowering.make_plan import make_plan
from fxpipe.lowering.minibatch_loss import capture_microbatch, checked_loss
from fxpipe.lowering.option_rules import setting_of
from fxpipe.lowering.options import CompileOptions
from fxpipe.passes.analysis.sources import sources_of
from fxpipe.passes.cost import Cost
from fxpipe.passes.encode import Encode
from fxpipe.passes.recompute import Recompute
from fxpipe.passes.reduce import Reduce
from fxpipe.passes.whole_loss import WholeLoss
from fxpipe.plan.plan import Plan
from fxpipe.plan.spec import FUNCTIONS
from fxpipe.planner.cuts import Cuts
from fxpipe.planner.device import CPU
from fxpipe.schedule.graph import graph_of_edges
from fxpipe.task.batch import Batch, is_named
from fxpipe.task.hooks import Loss
from fxpipe.tracing.joint import NO_GRADIENT

VALUES = 4
"""How many values a number or string that the step reads may have: each has its own stages."""


@dataclasses.dataclass(frozen=True)
class CapturedShape:
    """The captured step for batches of one further shape, and the pass that makes its loss the whole batch's.

    The step of `last`, the smaller last batch of an epoch, is left out where it cannot be cut.
    """

    program: Program
    whole_loss: WholeLoss | None
    last: Batch | None = None


def left_out(last: Batch, error: FxpipeError, cure: str = "give the DataLoader drop_last=True") -> str:
    """The warning that the smaller last batch of an epoch has no stages."""
    return (
        f"the last batch of an epoch will be smaller ({last}), and its step cannot be compiled: {error.what}; a run "
        f"ends there: {cure}"
    )


def further_shapes(program: Program, microbatches: int, batches: Iterable[Batch]) -> list[Batch]:
    """The first batch of every shape except the captured program's.

    Raises:
        BatchError: there are too many shapes.
    """
    found = [batch for batch in batches if not fits(program, batch, microbatches)]
    check_number(
        [*found, *found[:1]],
        "the training data have",
        "pad them to a few lengths (--pad-to 64), or drop the last, smaller batch (drop_last=True); or "
        "read fewer before the run (a smaller --scan), and let it make stages for others (--new-shapes N)",
    )
    return found


def constants_of(program: Program, batch: Batch) -> tuple[str, ...]:
    """The leaves of a batch whose values are in a program: those asked for, and those that its step reads."""
    found = [b.leaf.name for b in program.batch if b.leaf.tensor is None and b.leaf.read]
    return tuple(dict.fromkeys([*batch.constants, *(name for name in found if name in batch.names)]))


def refuse_changing(program: Program, batches: Sequence[Batch], asked: Sequence[str]) -> None:
    """Refuse numbers and strings that the step reads and that change from batch to batch.

    Given are the batch that the program was captured on, and those that do not fit it; and the leaves that the user
    declared constant, with any number of values.
    """
    wrong, places = [], {b.leaf.name: b.where for b in program.batch if b.where is not None}
    for row in program.batch:
        name = row.leaf.name
        if row.leaf.tensor is not None or not row.leaf.read or is_named(name, asked):
            continue
        column = [batch.values[batch.names.index(name)] for batch in batches if name in batch.names]
        values = list(dict.fromkeys(map(repr, column)))
        if len(values) > VALUES and not any(isinstance(value, torch.Tensor) for value in column):
            wrong.append((name, values))
    if wrong:
        what = "; ".join(f"{name} ({', '.join(values[:3])}, …)" for name, values in wrong)
        raise BatchError(
            f"the step reads values that change from batch to batch: {what}",
            where=next((places[name] for name, _ in wrong if name in places), None),
            hint="use a number as a tensor, without if, min, float() or math: torch.where, clamp, exp of "
            "a torch.tensor(number) that train_data() gives; or compute in train_data() what the step needs. "
            f"constant_batch = {[wrong[0][0]]} in the model file makes stages for every value",
            page="batch-shapes",
        )


def capture_shape(model: nn.Module, loss: Loss, batch: Batch, options: CompileOptions) -> CapturedShape:
    """Capture the step for a batch of another shape, cut into as many microbatches; compare with eager's loss."""
    program = capture_microbatch(model, loss, batch, options)
    return CapturedShape(*checked_loss(program, model, loss, batch, options))


def with_shape(build: Build, captured: CapturedShape, options: CompileOptions) -> Build:
    """The build with the files, the plan and the constants of a further shape.

    Raises:
        CutError: its step cannot be cut so that every worker keeps the parameters and buffers that it has.
    """
    plan, number = build.plan, len(build.plan.steps)
    program = name_constants(captured.program, f"shape.{number}", build.tensors)
    step = Lowering(program, options, number, f"shape_{number}_")
    step = step.front(captured.whole_loss or options.whole_loss(), options.splits_backward)
    step = step.through([Cost(device=CPU)])
    work, again = step_work(step.program), again_like(plan, step.program)
    recompute = Recompute(known=again) if any(again) else None
    step = step.wired(cuts_like(plan, step.program), recompute, graph_of_edges(plan.edges, plan.workers))
    types = {p.name: p.cast for p in plan.parameters if p.cast}
    step = step.emitted(Encode(like(plan)(step.program.edges)), Reduce.like(plan), types)
    program = step.program
    made = make_plan(program, setting_of(options, program.device))
    if made.metrics != plan.metrics:
        raise BatchError(
            f"loss(model, batch) returns the metrics {list(plan.metrics)} for the first batch, and "
            f"{list(made.metrics)} for batches of shape {number}",
            hint="return the same metrics, in the same order, for every batch",
        )
    _check_alike(plan, made, number)
    alone = dataclasses.replace(build, plan=dataclasses.replace(plan, steps=made.steps).with_step(**work))
    if program.totals is not None:
        alone = with_totals(alone, program.totals, options, shape=number)
    buffers = with_readers(alone.plan.buffers, made.buffers)
    values = {row.names[0]: part.values[row.node] for part in (program, program.totals) if part for row in part.buffers}
    more = {b.name for b in buffers} - {b.name for b in plan.buffers}
    plan = dataclasses.replace(plan, buffers=buffers, steps=(*plan.steps, *alone.plan.steps)).watching(program.watched)
    return dataclasses.replace(
        step.added_to(alone, plan, f"shape {number}"),
        tensors={**build.tensors, **{name: values[name].detach().clone() for name in sorted(more)}},
        warnings=tuple(dict.fromkeys((*build.warnings, *(w for w in program.warnings if NO_GRADIENT not in w)))),
    )


def cuts_like(plan: Plan, program: Program) -> Cuts:
    """The cuts of a program with numbered units that let its workers own what the plan's workers own.

    Each cut is before the unit of the same call of the same module as in the plan. It is moved as little as needed for
    parameters' owners to make gradients, for buffers to be updated at home, and for one worker's forward to read the
    weights that it reads in the plan.

    Raises:
        CutError: there are no such cuts.
    """
    cuts = Cuts.of(plan)
    if program.units == plan.step.units:
        return cuts
    places = _same_places(plan.step.units, program.units)
    owners = {p.name: p.owner for p in plan.parameters}
    homes = {b.name: b.home for b in plan.buffers if b.home is not None}
    parameters = {p.node: p.names[0] for p in program.parameters}
    buffers = {b.node: b.names[0] for b in program.buffers}
    made = [(info(n).unit, owners[parameters[p]]) for p, n in program.gradients().items() if n.op == "call_function"]
    updated = [(info(n).unit, homes[buffers[b]]) for b, n in program.updates().items() if n.op == "call_function"]
    like = Cuts(_moved(cuts.forward, places), _moved(cuts.backward, places), _moved(cuts.weights, places))
    weights = _within(like.weights, made, "gradients")
    backward = weights if like.weights == like.backward else tuple(map(min, like.backward, weights))
    readers = {p.name: [k for k, phase in p.readers if phase == "F"] for p in plan.parameters}
    at = {p.node: readers.get(p.names[0], []) for p in program.parameters}
    reads = [
        (info(user).unit, at[name][0])
        for name, node in program.placeholders.items()
        if len(at.get(name, ())) == 1
        for user in node.users
        if is_call_of(user, "F")
    ]
    forward = _within(like.forward, [*updated, *reads], "reads of weights and updates of buffers")
    return dataclasses.replace(like, forward=forward, backward=backward, weights=weights)


def again_like(plan: Plan, program: Program) -> tuple[tuple[str, ...], ...]:
    """By worker, what its backward computes again, as in the plan: forward nodes of the same names.

    Nodes are left out if the backward would need weights, or updated buffers, that it does not have in the plan.
    """
    sources = sources_of(program)
    nodes = {node.name: node for node in program if info(node).phase == "F"}
    parameters = {p.node: p.names[0] for p in program.parameters}
    homes = {b.name for b in plan.buffers if b.home is not None}
    live = {b.node for b in program.buffers if b.names[0] in homes} - set(program.updates())
    found = []
    for stage in plan.stages:
        read = {name for phase, part in stage.parts.items() if phase != "F" for name in part.weights}
        mine = []
        for node in (nodes[name] for name in stage.again if name in nodes):
            leaves = {leaf for n in node.all_input_nodes for leaf in sources.leaves.get(n, frozenset([n]))}
            foreign = any(leaf.name in live or parameters.get(leaf.name, "") not in {"", *read} for leaf in leaves)
            if not foreign:
                mine.append(node.name)
        found.append(tuple(mine))
    return tuple(found)


def _moved(bounds: Sequence[int], places: Sequence[int]) -> tuple[int, ...]:
    """The bounds at their new places, none before an earlier bound."""
    return tuple(accumulate((places[bound] for bound in bounds), max))


def _same_places(old: Sequence[str], new: Sequence[str]) -> list[int]:
    """For each place between the old units, and for both ends, the place between the new: before the same call of a
    module.

    Calls of a module are counted from the start in their earlier half, and from the end in the later half.
    """
    places: dict[str, list[int]] = {}
    for i, unit in enumerate(new):
        places.setdefault(unit, []).append(i)
    counts: dict[str, int] = {}
    for unit in old:
        counts[unit] = counts.get(unit, 0) + 1
    seen: dict[str, int] = {}
    found: list[int] = []
    for i, unit in enumerate(old):
        call = seen[unit] = seen.get(unit, -1) + 1
        calls = places.get(unit, [])
        if not calls:
            at = found[-1] if found else 0
        elif call < counts[unit] / 2:
            at = calls[min(call, len(calls) - 1)]
        else:
            at = calls[max(len(calls) - (counts[unit] - call), 0)]
        found.append(at if i else 0)
    return [*found, len(new)]


def _within(bounds: Sequence[int], placed: Iterable[tuple[int, int]], what: str) -> tuple[int, ...]:
    """The bounds, moved as little as needed for each `placed` unit to be on its worker."""
    placed = list(placed)
    found = list(bounds)
    for k in range(1, len(bounds) - 1):
        least = max((unit + 1 for unit, worker in placed if worker < k), default=0)
        most = min((unit for unit, worker in placed if worker >= k), default=bounds[-1])
        if least > most:
            raise CutError(
                f"the step for a batch of another shape cannot be cut so that {what} stay on their workers: unit "
                f"{least - 1} belongs before worker {k}, and unit {most} on or after it",
                hint="use fewer workers, pin the cuts (--fp-cut, --bp-cut) where all batches run the same modules in "
                "one order, or pad the batches to one shape",
                page="batch-shapes",
            )
        found[k] = max(least, min(most, max(found[k], found[k - 1])))
    return tuple(found)


def _check_alike(plan: Plan, made: Plan, number: int) -> None:
    """Refuse stages that do not read and make the same things as the first shape's."""
    wrong, names = [], list[str]()
    if made.loss.worker != plan.loss.worker:
        wrong.append(f"the loss is on worker {made.loss.worker} , not {plan.loss.worker}")
    if made.loss.of_microbatches != plan.loss.of_microbatches:
        wrong.append(
            f"the loss is the {made.loss.of_microbatches} of the microbatches', not their {plan.loss.of_microbatches}"
        )
    owners = _by_name((p.names, p.owner) for p in plan.parameters if p.trained)
    for parameter in made.parameters:
        if parameter.trained and owners.get(parameter.name) != parameter.owner:
            wrong.append(f"{parameter.name} gets its gradient on worker {parameter.owner}")
            names.append(parameter.name)
    casts = _by_name((p.names, p.cast) for p in plan.parameters if p.cast)
    for parameter in made.parameters:
        if parameter.readers and parameter.cast != casts.get(parameter.name, parameter.cast):
            wrong.append(f"{parameter.name} is read as {parameter.tensor.dtype}, not only as {casts[parameter.name]}")
    homes = _by_name((b.names, b.home) for b in plan.buffers)
    updated = {b.name for b in made.buffers if b.home is not None}
    for buffer in made.buffers:
        if buffer.home is not None and homes.get(buffer.name) != buffer.home:
            wrong.append(f"{buffer.name} is updated on worker {buffer.home}")
    for k, (first, other) in enumerate(zip(plan.stages, made.stages, strict=True)):
        for phase, new in other.parts.items():
            name, old = FUNCTIONS[phase], first.part(phase)
            if more := [w for w in new.weights if w not in old.weights]:
                wrong.append(f"{name} of worker {k} reads {more[0]}, too")
                names.append(more[0])
            # What this shape only reads may have changed by the time of its backward, and has a value at home alone.
            live = [b for b in new.buffers if homes.get(b) is not None and b not in updated]
            if more := [b for b in live if phase != "F" or homes[b] != k]:
                wrong.append(f"{name} of worker {k} reads {more[0]}, which batches of another shape update")
    if wrong:
        cuts = Cuts.of(plan)
        same = "" if cuts.forward == cuts.backward else "use --cuts same, "
        modules = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
        before = f"--fp-cut {modules[0]}, so that no cut goes through it" if modules and modules[0] else "--fp-cut"
        raise CutError(
            f"the step for batches of shape {number} differs in what the workers hold: " + "; ".join(wrong[:4]),
            hint=f"pin the cuts before modules that all batches run ({before}), {same}or pad the batches to one shape",
            page="batch-shapes",
        )


def _by_name(rows: Iterable[tuple[Sequence[str], Any]]) -> Mapping[str, Any]:
    return {name: value for names, value in rows for name in names}

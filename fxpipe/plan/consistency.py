"""Checks that the parts of a plan fit together after reading, which its types alone do not ensure."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fxpipe.options import unfit
from fxpipe.plan.limits import MOST_ELEMENTS, MOST_MICROBATCHES, MOST_WORKERS
from fxpipe.plan.mesh import OuterSpec
from fxpipe.plan.plan import BufferSpec, LossSpec, ParameterSpec, Plan, WeightsSpec
from fxpipe.plan.spec import EdgeSpec, LeafSpec, PartSpec, StageSpec, StepSpec, TensorSpec
from fxpipe.typed_json import Malformed, parse

_DTYPES = frozenset(
    f"{kind}{bits}"
    for kind, sizes in (
        ("float", ("16", "32", "64", "8_e4m3fn", "8_e4m3fnuz", "8_e5m2", "8_e5m2fnuz", "8_e8m0fnu")),
        ("bfloat", ("16",)),
        ("complex", ("32", "64", "128")),
        ("int", ("8", "16", "32", "64")),
        ("uint", ("8", "16", "32", "64")),
        ("bool", ("",)),
    )
    for bits in sizes
)


_DEVICE = re.compile(r"(cpu|cuda|mps|xpu|privateuseone)(:\d{1,3})?")


def check(plan: Plan) -> None:
    """Raise Malformed for a plan that refers to missing parts, or that no run could follow."""
    if not plan.steps:
        raise Malformed("there is no step", ", $.steps")
    for name, count, most, place in (
        ("workers", plan.workers, MOST_WORKERS, "steps[0].stages"),
        ("microbatches", plan.microbatches, MOST_MICROBATCHES, "microbatches"),
    ):
        if not 1 <= count <= most:
            raise Malformed(f"there are {count} {name}: a plan has 1 to {most}", f", $.{place}")
    if not _DEVICE.fullmatch(plan.device):
        raise Malformed(f"there is no device {plan.device[:80]!r}", ", $.device")
    for found, place in _parts(plan, ", $"):
        _check_part(plan, found, place)
    for every in ([n for held in plan.tensors for n in held.names], [n for held in plan.tensors for n in held.saved]):
        if len(set(every)) < len(every):
            raise Malformed("two parameters or buffers have the same name", ", $")
    for name in plan.model_file.sources:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise Malformed(f"{name[:80]!r} is not a file next to the model file", ", $.model_file.sources")
    ranks = set(plan.placement)
    if ranks and (
        len(plan.placement) != plan.workers or ranks != set(range(len(ranks))) or plan.placement[0] or not plan.virtual
    ):
        raise Malformed(f"{plan.workers} workers cannot run on ranks {list(plan.placement)[:80]}", ", $.placement")
    _check_replicas(plan)
    steps = [(f", $.steps[{i}]", step) for i, step in enumerate(plan.steps)]
    alone = [(f", $.evaluations[{i}]", evaluation) for i, evaluation in enumerate(plan.evaluations)]
    for place, step in (*steps, *alone):
        if len(step.stages) != plan.workers:
            raise Malformed(f"there are {len(step.stages)} stages for {plan.workers} workers", f"{place}.stages")
        if (count := _tree_leaves(step.batch_spec, f"{place}.batch_spec")) != (leaves := len(step.given)):
            raise Malformed(f"the batch has {count} leaves, but {leaves} are listed", f"{place}.batch_spec")
    for at, step in steps:
        _check_units(step, at)
        if step.tokens < 0 or not all(0 <= flops < math.inf for flops in step.flops.values()):
            raise Malformed("tokens and FLOPs must be 0 or more", at)
        for i, stage in enumerate(step.stages):
            place = f"{at}.stages[{i}]"
            if stage.backward is None:
                raise Malformed("the stage has no backward", place)
            if (stage.weights is None) == plan.weights_apart:
                raise Malformed("other stages have a separate function for weight gradients, this one does not", place)
            _check_buckets(plan, i, stage, place)
            for phase, part in stage.parts.items():
                _check_names(plan, part, step, place)
                _check_held(part, plan.stages[i].part(phase), place)
        if step.totals is not None:
            if len(step.totals.stages) != 1:
                raise Malformed(f"there are {len(step.totals.stages)} files", f"{at}.totals.stages")
            alone.append((f"{at}.totals", step.totals))
    names = [edge.name for edge in plan.all_edges]
    if len(set(names)) < len(names):
        raise Malformed("two edges have the same name", ", $.steps")
    for at, evaluation in alone:
        for i, share in enumerate(evaluation.stages):
            if tuple(share.parts) != ("F",):
                raise Malformed("the stage has more than a forward", f"{at}.stages[{i}]")
            _check_names(plan, share.forward, evaluation, f"{at}.stages[{i}]")


def _parts(found: Any, place: str) -> Iterator[tuple[Any, str]]:
    """The dataclasses in a plan, itself first, and the place of each in the file."""
    if isinstance(found, tuple):
        for i, inner in enumerate(found):
            yield from _parts(inner, f"{place}[{i}]")
    elif dataclasses.is_dataclass(found):
        yield found, place
        for field in dataclasses.fields(found):
            yield from _parts(getattr(found, field.name), f"{place}.{field.name}")


def _check_part(plan: Plan, found: Any, place: str) -> None:
    """Check that one part of a plan names possible workers and files, and has the sizes of a tensor."""
    workers: tuple[int, ...] = ()
    file = None
    match found:
        case LossSpec():
            workers = (found.worker,)
        case WeightsSpec():
            file = found.file
        case ParameterSpec():
            workers = (found.owner, *(reader for reader, _ in found.readers))
        case BufferSpec():
            workers = (found.home or 0, *found.workers)
        case EdgeSpec():
            workers = (found.src, found.dst)
        case StageSpec():
            file = found.file
        case TensorSpec(shape, stride, dtype):
            sizes = len(shape) == len(stride) and min((*shape, *stride), default=0) >= 0
            if dtype not in _DTYPES or not sizes or max((math.prod(shape), *stride)) > MOST_ELEMENTS:
                raise Malformed(f"a tensor cannot have {dtype[:40]}, {shape}, {stride}", place)
        case LeafSpec(tensor=TensorSpec() as tensor, dim=int() as dim) if not 0 <= dim < len(tensor.shape):
            raise Malformed(f"{found.name[:80]!r} has no dimension {dim}", place)
    if isinstance(found, ParameterSpec | BufferSpec) and not found.names:
        raise Malformed("the tensor has no name", place)
    for worker in workers:
        if not 0 <= worker < plan.workers:
            raise Malformed(f"there is no worker {worker}", place)
    if file is not None and (file in ("", "..") or "/" in file or "\\" in file):
        raise Malformed(f"{file[:80]!r} is not a file of the build", place)


def _check_replicas(plan: Plan) -> None:
    """Check that replicas divide the microbatches, and workers of a rank have equal numbers of replicas."""
    counts = plan.replicas
    if counts and (len(counts) != plan.workers or any(count < 1 or plan.microbatches % count for count in counts)):
        what = f"{plan.workers} workers cannot have {list(counts)[:80]} replicas for {plan.microbatches} microbatches"
        raise Malformed(what, ", $.replicas")
    for rank in range(plan.ranks if counts else 0):
        if len({counts[worker] for worker in plan.hosted(rank)}) > 1:
            raise Malformed(f"the workers of rank {rank} have different numbers of replicas", ", $.replicas")
    outer = plan.outer
    if outer is not None and (plan.dp == 1 or unfit(OuterSpec, dataclasses.asdict(outer))):
        raise Malformed(f"{plan.dp} replicas cannot combine weights by {outer}", ", $.outer")


def _check_buckets(plan: Plan, worker: int, stage: StageSpec, place: str) -> None:
    """Check that a stage's buckets have each gradient once, are handed over, and equal those of the first shape."""
    first = plan.stages[worker]
    several = bool(plan.replicas) and plan.replicas[worker] > 1 and plan.outer is None
    members = [name for bucket in stage.buckets for name in bucket.parameters]
    if sorted(members) != sorted(first.gradients if several else ()):
        what = "there are buckets without replicas" if not several else "not every gradient is in exactly one bucket"
        raise Malformed(what, f"{place}.buckets")
    if stage.buckets != first.buckets:
        raise Malformed("the buckets differ from those of the first shape", f"{place}.buckets")
    names = tuple(bucket.name for bucket in stage.buckets)
    if len(set(names)) < len(names) or any(bucket.bytes < 0 for bucket in stage.buckets):
        raise Malformed("two buckets have the same name, or one has negative bytes", f"{place}.buckets")
    if len({bucket.sharded for bucket in stage.buckets}) > 1:
        raise Malformed("some buckets are sharded, others are not", f"{place}.buckets")
    for bucket in stage.buckets:
        count = len(bucket.parameters) if bucket.sharded else 0
        if len(bucket.updaters) != count or not all(0 <= r < plan.replicas[worker] for r in bucket.updaters):
            raise Malformed(f"{bucket.name} must have one replica as updater for each parameter", f"{place}.buckets")
    *before, last = stage.parts.values()
    if last.reduces != names or any(part.reduces for part in before):
        raise Malformed("the code does not hand over the buckets in order where it makes gradients", place)


def _check_units(step: StepSpec, at: str) -> None:
    """Check that the workers divide the units among them, each kind in the workers' order."""
    for kind in ("forward_units", "backward_units", "weight_units"):
        reached = 0
        for i, stage in enumerate(step.stages):
            start, end = getattr(stage, kind)
            last = len(step.units) if i + 1 == len(step.stages) else end
            if start != reached or not start <= end <= len(step.units) or end != last:
                what = f"units {start} to {end} do not follow those of the worker before, or leave some out"
                raise Malformed(what, f"{at}.stages[{i}].{kind}")
            reached = end


def _tree_leaves(text: str, place: str) -> int:
    """The number of leaves of a serialised pytree: its nodes without a type."""

    def leaves(node: Any) -> int:
        return 1 if node["type"] is None else sum(map(leaves, node["children_spec"]))

    try:
        _protocol, tree = parse(text, finite=False)
        return leaves(tree)
    except (Malformed, RecursionError, KeyError, TypeError, ValueError) as error:
        raise Malformed("not a pytree in torch's format", place) from error


def _check_names(plan: Plan, part: PartSpec, of: StepSpec, place: str) -> None:
    """Check that a part names what the plan has, and the step or evaluation that it belongs to."""
    parameters = {p.name for p in plan.parameters}
    wires = {edge.name for edge in of.edges}
    for found, known, what in (
        (part.weights, parameters, "parameter"),
        (part.gradients, parameters, "parameter"),
        (part.buffers, {b.name for b in plan.buffers}, "buffer"),
        (part.updates, {b.name for b in plan.buffers}, "buffer"),
        (part.batch, {leaf.name for leaf in of.batch}, "leaf of the batch"),
        (part.receives, wires, "edge"),
        (part.sends, wires, "edge"),
    ):
        for name in found:
            if name not in known:
                raise Malformed(f"there is no {what} {name[:80]!r}", place)


def _check_held(part: PartSpec, first: PartSpec, place: str) -> None:
    """Check that a part for any shape reads and makes only what the first shape's part does: a worker holds no more."""
    for found, held, what in (
        (part.weights, first.weights, "be read"),
        (part.gradients, first.gradients, "get a gradient"),
        (part.updates, first.updates, "be updated"),
    ):
        if more := set(found) - set(held):
            raise Malformed(f"{min(more)[:80]!r} cannot {what} here: it is not for batches of the first shape", place)
    if part.loss != first.loss:
        raise Malformed("the loss is on another worker than for batches of the first shape", place)

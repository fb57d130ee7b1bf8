"""Checks whether the parts of a plan that was read fit together, which its types alone do not ensure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fxpipe.plan.limits import MOST_ELEMENTS, MOST_MICROBATCHES, MOST_WORKERS
from fxpipe.plan.spec import EdgeSpec, LeafSpec, PartSpec, Plan, StageSpec, TensorSpec
from fxpipe.typed_json import Malformed, convert, parse

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


_DEVICE = re.compile(r"(cpu|cuda|mps|xpu)(:\d{1,3})?")


def check(plan: Plan) -> None:
    """Raise Malformed for a plan that refers to what it does not have, or that no run could follow."""
    for name, count, most in (
        ("workers", plan.workers, MOST_WORKERS),
        ("microbatches", plan.microbatches, MOST_MICROBATCHES),
    ):
        if not 1 <= count <= most:
            raise Malformed(f"there are {count} {name}: a plan has 1 to {most}", f", $.{name}")
    if not _DEVICE.fullmatch(plan.device):
        raise Malformed(f"there is no device {plan.device[:80]!r}", ", $.device")
    for i, held in enumerate(plan.tensors):
        if not held.names:
            raise Malformed("it has no name", f", $.parameters and $.buffers, entry {i}")
    every = [name for held in plan.tensors for name in held.names]
    if len(set(every)) < len(every):
        raise Malformed("two parameters or buffers have one name", ", $")
    for name in plan.sources:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise Malformed(f"{name[:80]!r} is not a file beside the model file", ", $.sources")
    for place, count in _stage_counts(plan):
        if count != plan.workers:
            raise Malformed(f"there are {count} stages for {plan.workers} workers", place)
    ranks = set(plan.placement)
    if ranks and (
        len(plan.placement) != plan.workers or ranks != set(range(len(ranks))) or plan.placement[0] or not plan.virtual
    ):
        raise Malformed(f"{plan.workers} workers cannot run on ranks {list(plan.placement)[:80]}", ", $.placement")
    _check_replicas(plan)
    for place, worker in _workers(plan):
        if not 0 <= worker < plan.workers:
            raise Malformed(f"there is no worker {worker}", place)
    for place, tensor in _tensors(plan):
        sizes = len(tensor.shape) == len(tensor.stride) and min((*tensor.shape, *tensor.stride), default=0) >= 0
        sizes = sizes and math.prod(tensor.shape) <= MOST_ELEMENTS and max(tensor.stride, default=0) <= MOST_ELEMENTS
        if tensor.dtype not in _DTYPES or not sizes:
            raise Malformed(f"there is no tensor of {tensor.dtype[:40]}, {tensor.shape}, {tensor.stride}", place)
    for place, leaf in _leaves(plan):
        if leaf.dim is not None and leaf.tensor is not None and not 0 <= leaf.dim < len(leaf.tensor.shape):
            raise Malformed(f"{leaf.name[:80]!r} has no dimension {leaf.dim}", place)
    for place, text, leaves in _trees(plan):
        if (count := _tree_leaves(text, f"{place}.batch_spec")) != leaves:
            raise Malformed(f"it is a batch of {count} leaves, but {leaves} are listed", f"{place}.batch_spec")
    for at, shape in _shapes(plan):
        _check_units(shape, at)
        for i, stage in enumerate(shape.stages):
            place = f", {at}.stages[{i}]"
            if (stage.weights is None) == plan.weights_apart:
                raise Malformed("some stages make weight gradients apart, and it does not", place)
            _check_buckets(plan, i, stage, place)
            for phase, part in stage.parts.items():
                _check_names(plan, part, shape.edges, shape.batch, place)
                _check_held(part, plan.stages[i].part(phase), place)
        if shape.totals is not None:
            if len(shape.totals.stages) != 1:
                raise Malformed(f"there are {len(shape.totals.stages)} files", f", {at}.totals.stages")
            _check_names(plan, shape.totals.stages[0].part, (), shape.totals.batch, f", {at}.totals")
    names = [edge.name for edge in plan.all_edges]
    if len(set(names)) < len(names):
        raise Malformed("two edges have one name", ", $.edges")
    for i, evaluation in enumerate(plan.evaluations):
        for k, share in enumerate(evaluation.stages):
            place = f", $.evaluations[{i}].stages[{k}]"
            _check_names(plan, share.part, evaluation.edges, evaluation.batch, place)
    for file in (plan.weights_file, *(code.file for code in plan.code)):
        if not file or "/" in file or "\\" in file or file == "..":
            raise Malformed(f"{file[:80]!r} is not a file of the build", ", $")


def _check_replicas(plan: Plan) -> None:
    """Whether each worker has some replicas, with as many microbatches each, and those of one rank equally many."""
    counts = plan.replicas
    if counts and (len(counts) != plan.workers or any(count < 1 or plan.microbatches % count for count in counts)):
        what = f"{plan.workers} workers cannot have {list(counts)[:80]} replicas for {plan.microbatches} microbatches"
        raise Malformed(what, ", $.replicas")
    for rank in range(plan.ranks if counts else 0):
        if len({counts[worker] for worker in plan.hosted(rank)}) > 1:
            raise Malformed(f"the workers of rank {rank} have different numbers of replicas", ", $.replicas")
    outer = plan.outer
    if outer is not None:
        rates = math.isfinite(outer.lr) and outer.lr > 0 and 0 <= outer.momentum < 1
        if plan.dp == 1 or outer.every < 1 or not rates or outer.delay not in (0, 1):
            raise Malformed(f"{plan.dp} replicas cannot come together by {outer}", ", $.outer")


def _check_buckets(plan: Plan, worker: int, stage: StageSpec, place: str) -> None:
    """Whether the buckets of a stage have all gradients, each once, are handed over, and are the first shape's."""
    first = plan.stages[worker]
    several = bool(plan.replicas) and plan.replicas[worker] > 1 and plan.outer is None
    members = [name for bucket in stage.buckets for name in bucket.parameters]
    if sorted(members) != sorted(first.gradients if several else ()):
        what = "there are buckets without replicas" if not several else "its buckets do not have each gradient once"
        raise Malformed(what, f"{place}.buckets")
    if stage.buckets != first.buckets:
        raise Malformed("its buckets are not those of the first shape", f"{place}.buckets")
    names = tuple(bucket.name for bucket in stage.buckets)
    if len(set(names)) < len(names) or any(bucket.bytes < 0 for bucket in stage.buckets):
        raise Malformed("two buckets have one name, or one has less than no bytes", f"{place}.buckets")
    if len({bucket.sharded for bucket in stage.buckets}) > 1:
        raise Malformed("some buckets are shared out, and others are not", f"{place}.buckets")
    for bucket in stage.buckets:
        count = len(bucket.parameters) if bucket.sharded else 0
        if len(bucket.updaters) != count or not all(0 <= r < plan.replicas[worker] for r in bucket.updaters):
            raise Malformed(f"{bucket.name} has other updaters than a replica for each parameter", f"{place}.buckets")
    *before, last = stage.parts.values()
    if last.reduces != names or any(part.reduces for part in before):
        raise Malformed("its code does not hand over its buckets, in their order, where it makes gradients", place)


def _shapes(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """Where each shape of batch is in the file, and its plan."""
    yield from zip(["$", *(f"$.shapes[{i}]" for i in range(len(plan.shapes)))], plan.of_shapes, strict=True)


def _check_units(shape: Plan, at: str) -> None:
    """Whether the workers divide the units among them, each kind in the workers' order."""
    for kind in ("forward_units", "backward_units", "weight_units"):
        reached = 0
        for i, stage in enumerate(shape.stages):
            start, end = getattr(stage, kind)
            last = len(shape.units) if i + 1 == len(shape.stages) else end
            if start != reached or not start <= end <= len(shape.units) or end != last:
                what = f"units {start} to {end} do not follow those of the worker before, or leave some out"
                raise Malformed(what, f", {at}.stages[{i}].{kind}")
            reached = end


@dataclass(frozen=True)
class _BatchTree:
    """A node of a batch's pytree, as torch writes it; a leaf has no type."""

    type: str | None
    context: Any
    children_spec: tuple[_BatchTree, ...]

    @property
    def leaves(self) -> int:
        return 1 if self.type is None else sum(child.leaves for child in self.children_spec)


def _tree_leaves(text: str, place: str) -> int:
    """How many leaves a serialised pytree has."""
    try:
        _protocol, tree = convert(parse(text, finite=False), tuple[int, _BatchTree])
        return tree.leaves
    except (Malformed, RecursionError) as error:
        raise Malformed("it is not a pytree as torch writes it", place) from error


def _trees(plan: Plan) -> Iterator[tuple[str, str, int]]:
    """Where the shape of each batch of the user's is written, what is written there, and how many leaves are listed."""
    for at, shape in _shapes(plan):
        yield f", {at}", shape.batch_spec, len(shape.given)
    for i, evaluation in enumerate(plan.evaluations):
        yield f", $.evaluations[{i}]", evaluation.batch_spec, len(evaluation.batch)


def _leaves(plan: Plan) -> Iterator[tuple[str, LeafSpec]]:
    for at, shape in _shapes(plan):
        for i, leaf in enumerate(shape.batch):
            yield f", {at}.batch[{i}]", leaf
    for k, evaluation in enumerate(plan.alone):
        for i, leaf in enumerate(evaluation.batch):
            yield f", evaluation or totals {k}, batch[{i}]", leaf


def _check_names(plan: Plan, part: PartSpec, edges: Iterable[EdgeSpec], batch: Iterable[LeafSpec], place: str) -> None:
    parameters = {p.name for p in plan.parameters}
    wires = {e.name for e in edges}
    for found, known, what in (
        (part.weights, parameters, "parameter"),
        (part.gradients, parameters, "parameter"),
        (part.buffers, {b.name for b in plan.buffers}, "buffer"),
        (part.updates, {b.name for b in plan.buffers}, "buffer"),
        (part.batch, {leaf.name for leaf in batch}, "leaf of the batch"),
        (part.receives, wires, "edge"),
        (part.sends, wires, "edge"),
    ):
        for name in found:
            if name not in known:
                raise Malformed(f"there is no {what} {name[:80]!r}", place)


def _check_held(part: PartSpec, first: PartSpec, place: str) -> None:
    """Whether a part for any shape reads and makes only what that for the first shape does: a worker holds no more."""
    for found, held, what in (
        (part.weights, first.weights, "be read"),
        (part.gradients, first.gradients, "get a gradient"),
        (part.updates, first.updates, "be updated"),
    ):
        if more := set(found) - set(held):
            raise Malformed(f"{min(more)[:80]!r} cannot {what} here: it is not for batches of the first shape", place)
    if part.loss != first.loss:
        raise Malformed("the loss is elsewhere than for batches of the first shape", place)


def _stage_counts(plan: Plan) -> Iterator[tuple[str, int]]:
    for at, shape in _shapes(plan):
        yield f", {at}.stages", len(shape.stages)
    for i, evaluation in enumerate(plan.evaluations):
        yield f", $.evaluations[{i}].stages", len(evaluation.stages)


def _edges(plan: Plan) -> Iterator[tuple[str, EdgeSpec]]:
    for at, shape in _shapes(plan):
        for i, edge in enumerate(shape.edges):
            yield f", {at}.edges[{i}]", edge
    for i, evaluation in enumerate(plan.evaluations):
        for k, edge in enumerate(evaluation.edges):
            yield f", $.evaluations[{i}].edges[{k}]", edge


def _workers(plan: Plan) -> Iterator[tuple[str, int]]:
    yield ", $.loss_worker", plan.loss_worker
    for i, parameter in enumerate(plan.parameters):
        for worker in (parameter.owner, *(reader for reader, _ in parameter.readers)):
            yield f", $.parameters[{i}]", worker
    for i, buffer in enumerate(plan.buffers):
        for worker in (buffer.home or 0, *buffer.workers):
            yield f", $.buffers[{i}]", worker
    for place, edge in _edges(plan):
        yield place, edge.src
        yield place, edge.dst


def _tensors(plan: Plan) -> Iterator[tuple[str, TensorSpec]]:
    for i, parameter in enumerate(plan.parameters):
        yield f", $.parameters[{i}].tensor", parameter.tensor
    for i, buffer in enumerate(plan.buffers):
        yield f", $.buffers[{i}].tensor", buffer.tensor
    for place, edge in _edges(plan):
        yield f"{place}.tensor", edge.tensor
        if edge.packed is not None:
            yield f"{place}.packed", edge.packed
    batches = (*(shape.batch for shape in plan.of_shapes), *(e.batch for e in plan.alone))
    for leaf in (leaf for batch in batches for leaf in batch):
        if leaf.tensor is not None:
            yield ", $.batch", leaf.tensor

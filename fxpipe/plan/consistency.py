"""Checks whether the parts of a plan that was read fit together, which its types alone do not ensure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fxpipe.plan.spec import EdgeSpec, LeafSpec, PartSpec, Plan, TensorSpec
from fxpipe.typed_json import Malformed

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


def check(plan: Plan) -> None:
    """Raise Malformed for a plan that refers to what it does not have, or that no run could follow."""
    if plan.workers < 1 or plan.microbatches < 1:
        raise Malformed(f"there are {plan.workers} workers and {plan.microbatches} microbatches", ", $")
    for place, count in _stage_counts(plan):
        if count != plan.workers:
            raise Malformed(f"there are {count} stages for {plan.workers} workers", place)
    for place, worker in _workers(plan):
        if not 0 <= worker < plan.workers:
            raise Malformed(f"there is no worker {worker}", place)
    for place, tensor in _tensors(plan):
        sizes = len(tensor.shape) == len(tensor.stride) and min((*tensor.shape, *tensor.stride), default=0) >= 0
        if tensor.dtype not in _DTYPES or not sizes:
            raise Malformed(f"there is no tensor of {tensor.dtype[:40]}, {tensor.shape}, {tensor.stride}", place)
    for at, shape in _shapes(plan):
        for i, stage in enumerate(shape.stages):
            place = f", {at}.stages[{i}]"
            for start, end in (stage.forward_units, stage.backward_units, stage.weight_units):
                if not 0 <= start <= end <= len(shape.units):
                    raise Malformed(f"there are no units {start} to {end}", place)
            for part, first in zip((stage.forward, stage.backward), _parts_of(plan, i), strict=True):
                _check_names(plan, part, shape.edges, shape.batch, place)
                _check_held(part, first, place)
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


def _shapes(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """Where each shape of batch is in the file, and its plan."""
    yield from zip(["$", *(f"$.shapes[{i}]" for i in range(len(plan.shapes)))], plan.of_shapes, strict=True)


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


def _parts_of(plan: Plan, worker: int) -> tuple[PartSpec, PartSpec]:
    return plan.stages[worker].forward, plan.stages[worker].backward


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
    batches = (*(shape.batch for shape in plan.of_shapes), *(e.batch for e in plan.alone))
    for leaf in (leaf for batch in batches for leaf in batch):
        if leaf.tensor is not None:
            yield ", $.batch", leaf.tensor

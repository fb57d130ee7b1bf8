"""The law of replicas: a worker's replicas add up all of its gradients, each once, after it exists."""

from __future__ import annotations

from torch import fx

from fxpipe.errors import VerifyError
from fxpipe.ir.program import Program, home_of, info, value
from fxpipe.ir.wire import bucket_of, is_reduce, members_of
from fxpipe.plan.spec import BucketSpec


def check_reduced(program: Program) -> None:
    """Raise VerifyError if a gradient of a worker with replicas is in no bucket, or in two, or not handed over.

    A worker without replicas hands nothing over.
    """
    assert program.cuts is not None
    workers = program.cuts.workers
    calls: dict[int, list[fx.Node]] = {worker: [] for worker in range(workers)}
    for node in program:
        if is_reduce(node):
            calls[info(node).worker or 0].append(node)
    if program.replicas and not workers == len(program.replicas) == len(program.buckets):
        raise VerifyError(f"there are {workers} workers, but not as many numbers of replicas and lists of buckets")
    gradients = _gradients(program)
    for worker, nodes in calls.items():
        several = bool(program.replicas) and program.replicas[worker] > 1
        buckets = program.buckets[worker] if several else ()
        names, expected = [bucket_of(node) for node in nodes], [bucket.name for bucket in buckets]
        if names != expected or len(set(expected)) < len(expected):
            raise VerifyError(f"worker {worker} hands over the buckets {names}, but has {expected}")
        if several:
            _check_members(worker, buckets, gradients[worker])
        for bucket, node in zip(buckets, nodes, strict=True):
            _check_call(program, bucket, node, gradients[worker])


def _gradients(program: Program) -> list[dict[str, fx.Node]]:
    """By worker, the gradients that it makes, by parameter."""
    assert program.cuts is not None
    names = {p.node: p.names[0] for p in program.parameters}
    gradients: list[dict[str, fx.Node]] = [{} for _ in range(program.cuts.workers)]
    for parameter, node in program.gradients().items():
        gradients[home_of(node)][names[parameter]] = node
    return gradients


def _check_members(worker: int, buckets: tuple[BucketSpec, ...], gradients: dict[str, fx.Node]) -> None:
    members = [name for bucket in buckets for name in bucket.parameters]
    if twice := {name for name in members if members.count(name) > 1}:
        raise VerifyError(f"the gradient of {min(twice)} is in two buckets of worker {worker}")
    if missing := set(gradients) - set(members):
        raise VerifyError(f"the gradient of {min(missing)} is in no bucket of worker {worker}, which has replicas")


def _check_call(program: Program, bucket: BucketSpec, node: fx.Node, gradients: dict[str, fx.Node]) -> None:
    where = f"{node}, which hands over {bucket.name} of worker {info(node).worker},"
    if info(node).phase != program.phases[-1]:
        raise VerifyError(f"{where} is in {info(node).phase}, but gradients are returned in {program.phases[-1]}")
    if node.target.__name__ != bucket.call:  # type: ignore[union-attr]
        raise VerifyError(f"{where} is {node.target.__name__}, not {bucket.call}")  # type: ignore[union-attr]
    replicas = program.replicas[info(node).worker or 0]
    count = len(bucket.parameters) if bucket.sharded else 0
    if len(bucket.updaters) != count or not all(0 <= replica < replicas for replica in bucket.updaters):
        raise VerifyError(f"{where} has the updaters {bucket.updaters}: of {count} parameters, {replicas} replicas")
    if members_of(node) != [gradients.get(name) for name in bucket.parameters]:
        raise VerifyError(f"{where} hands over {members_of(node)}, which are not the gradients of {bucket.parameters}")
    if node.users:
        raise VerifyError(f"{where} gives no value, but {next(iter(node.users))} reads it")
    dtypes = {str(value(member).dtype) for member in members_of(node) if member is not None}
    if len(dtypes) > 1:
        raise VerifyError(f"{where} has gradients of {' and '.join(sorted(dtypes))}: a bucket has one dtype")

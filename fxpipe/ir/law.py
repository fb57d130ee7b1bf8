"""The law of the program, per level; checked after each pass.

CAPTURED  every output is the loss, a gradient of a trained parameter, a buffer's new value or a metric; without a loss
          all are metrics and new values of buffers. Every placeholder is in a table and comes before all calls; forward
          comes before backward, and an evaluation has no backward.
FOLDED    no call only repeats its input, and something reads every value, except random draws.
NUMBERED  every node has a unit; what makes only weight gradients is backward, and no other backward node reads it.
          Until nodes have workers, units never decrease along an F edge and never increase along a B edge.
COSTED    every node has bytes and time.
PLACED    every node has one worker; F workers never decrease along an edge, B workers, and W's, never increase; forward
          reads an updated buffer only on the worker that updates it. If weight gradients are separate, only W makes
          them, and only W reads them. The elements of a tuple are on the tuple's worker.
WIRED     no edge crosses workers without a Send/Recv pair of the same shape and dtype; where the edge has a codec, it
          packs what is sent and unpacks what is received; other edges have none; F of every worker comes after F of the
          worker before, B after B of the next worker; except in an evaluation, whose caller keeps the workers in step.
          Every gradient of a worker with replicas is in exactly one bucket, of one dtype, which is handed over once, in
          the phase that makes gradients.
SPLIT     every call is in exactly one part, which reads only its inputs, saved values and what it receives.
EMITTED   the text of every part parses, reads only its arguments and what it defined before, and sends and receives
          what its part does, and hands over its buckets.

Every check is one linear walk. A failure is a defect of a pass: the error shows the nodes around it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from torch import fx

from fxpipe.errors import VerifyError
from fxpipe.ir.aten import is_getitem, is_random, repeats
from fxpipe.ir.pace import first_gap
from fxpipe.ir.program import INFO, Level, Program, home_of, info, is_call_of, value
from fxpipe.ir.stage_law import check_emitted, check_split
from fxpipe.ir.wire import bucket_of, codec_of, is_pack, is_recv, is_reduce, is_send, is_unpack, members_of
from fxpipe.plan.spec import BucketSpec


def verify(program: Program) -> None:
    """Raise VerifyError if the program breaks the law of its level."""
    program.graph.lint()
    for level, check in _LAWS.items():
        if level <= program.level:
            check(program)


def _fail(program: Program, node: fx.Node, what: str) -> NoReturn:
    nodes = list(program.graph.nodes)
    at = nodes.index(node)
    lines = [f"{'>' if n is node else ' '} {n.format_node()}" for n in nodes[max(0, at - 5) : at + 5]]
    raise VerifyError(f"{what}\n" + "\n".join(lines))


def _captured(program: Program) -> None:
    inputs = program.placeholders
    parameters = {p.node: p for p in program.parameters}
    buffers = {b.node for b in program.buffers}
    in_tables = {*parameters, *buffers, *(b.node for b in program.batch if b.node)}
    if in_tables != set(inputs):
        raise VerifyError(f"placeholders and tables differ: {sorted(in_tables ^ set(inputs))}")
    if len(program.output_nodes) != len(program.outputs):
        raise VerifyError("the output tuple and its table differ in length")
    if "B" in program.phases:
        if sum(o.kind == "loss" for o in program.outputs) != 1:
            raise VerifyError("a program has exactly one loss")
        if any(o.kind == "metric" for o in program.outputs) and all(info(n).phase == "F" for n in program):
            raise VerifyError("there is no backward, but an evaluation has only metrics and buffers")
    for output in program.outputs:
        if output.kind == "gradient" and not (output.target in parameters and parameters[output.target].trained):
            raise VerifyError(f"{output.target} has a gradient but is not a trained parameter")
        if output.kind == "buffer" and output.target not in buffers:
            raise VerifyError(f"{output.target} has a new value but is not a buffer")
    last = max((i for i, n in enumerate(program.graph.nodes) if n.op == "placeholder"), default=-1)
    if last >= len(inputs):
        raise VerifyError("a placeholder comes after a call")
    seen_backward = False
    for node in program:
        if INFO not in node.meta:
            _fail(program, node, f"{node} has no record")
        if info(node).phase not in program.phases:
            _fail(program, node, f"{node} is backward, in an evaluation")
        if info(node).phase != "F":
            seen_backward = True
        elif seen_backward:
            _fail(program, node, f"{node} is forward, but comes after backward began")


def _folded(program: Program) -> None:
    for node in program:
        if (again := repeats(node)) is not None:
            _fail(program, node, f"{node} only repeats {again}")
        if not (node.users or is_random(node) or is_send(node) or is_recv(node) or is_reduce(node)):
            _fail(program, node, f"nothing reads {node}")


def _numbered(program: Program) -> None:
    for node in program:
        record = info(node)
        if not 0 <= record.unit < len(program.units):
            _fail(program, node, f"{node} has no unit")
        if record.weight and record.phase == "F":
            _fail(program, node, f"{node} makes weight gradients, but is forward")
        for source in node.all_input_nodes:
            if source.op == "call_function" and info(source).weight and not record.weight:
                _fail(program, node, f"{node} reads {source}, which makes only weight gradients")
        if program.level < Level.PLACED:
            _in_order(program, node)


def _in_order(program: Program, node: fx.Node) -> None:
    record = info(node)
    for source in node.all_input_nodes:
        if is_call_of(source, record.phase):
            before, after = info(source).unit, record.unit
            if (before > after) if record.phase == "F" else (before < after):
                _fail(program, node, f"{record.phase} edge {source} → {node} runs from unit {before} to {after}")


def _costed(program: Program) -> None:
    for node in program:
        if info(node).bytes is None or info(node).seconds is None:
            _fail(program, node, f"{node} has no cost")


def _placed(program: Program) -> None:
    if program.cuts is None:
        raise VerifyError("a placed program has cuts")
    for node in program:
        record = info(node)
        if record.worker is None or not 0 <= record.worker < program.cuts.workers:
            _fail(program, node, f"{node} has no worker")
        if record.phase == "W" and not record.weight:
            _fail(program, node, f"{node} is W, but does not make only weight gradients")
        if record.phase != "W" and any(info(n).phase == "W" for n in node.all_input_nodes if n.op == "call_function"):
            _fail(program, node, f"{node} reads W, but is {record.phase}")
        if is_getitem(node):
            whole = info(node.all_input_nodes[0])
            if (whole.worker, whole.phase) != (record.worker, record.phase):
                _fail(program, node, f"{node} is not on the worker of its tuple")
        for source in node.all_input_nodes:
            if source.op != "call_function" or (info(source).phase == "F") != (record.phase == "F"):
                continue
            before, after = info(source).worker, record.worker
            assert before is not None
            assert after is not None
            if (before > after) if record.phase == "F" else (before < after):
                _fail(program, node, f"{record.phase} edge {source} → {node} runs from worker {before} to {after}")
    placeholders = program.placeholders
    for name, new in program.updates().items():
        home = home_of(new)
        for user in placeholders[name].users:
            if user.op != "call_function" or info(user).phase != "F" or info(user).worker == home:
                continue
            if "B" in program.phases or (info(user).worker or 0) < home:  # an evaluation can send it on
                _fail(program, user, f"buffer {name} is updated on worker {home}, but {user} reads it elsewhere")


def _codec_beyond(program: Program, node: fx.Node, end: fx.Node) -> str:
    """The codec of the value that a Send takes or of the reader of a Recv; a Recv that is handed on has its edge's."""
    if (is_send(node) and is_recv(end)) or (is_recv(node) and is_send(end)):
        return program.wires[end.name].codec
    return codec_of(end) if (is_pack(end) if is_send(node) else is_unpack(end)) else ""


def _wired(program: Program) -> None:
    local = {p.node for p in program.parameters} | {b.node for b in program.buffers}
    for node in program:
        record = info(node)
        if is_send(node) or is_recv(node):
            edge = program.wires.get(node.name)
            if edge is None:
                _fail(program, node, f"{node} is not an end of any edge")
            worker, phase = (edge.src, edge.src_phase) if is_send(node) else (edge.dst, edge.dst_phase)
            if (record.worker, record.phase) != (worker, phase):
                _fail(program, node, f"{node} is in {record.phase} of worker {record.worker}, but its edge is not")
            val = node.meta["val"]
            if tuple(val.shape) != edge.sent.shape or str(val.dtype) != f"torch.{edge.sent.dtype}":
                _fail(program, node, f"{node} differs from its edge in shape or dtype")
            ends = node.all_input_nodes if is_send(node) else node.users
            if any(_codec_beyond(program, node, end) != edge.codec for end in ends):
                codec = f"the codec '{edge.codec}'" if edge.codec else "no codec"
                _fail(program, node, f"the edge of {node} has {codec}, but its neighbour has another")
        if is_recv(node):
            continue  # its one input is the Send, on the other worker
        for source in node.all_input_nodes:
            if source.op == "placeholder":
                crosses = source.name not in local and record.worker != 0
            else:
                crosses = info(source).worker != record.worker
            if crosses:
                _fail(program, node, f"{source} → {node} crosses workers without a Send/Recv pair")
    if gap := first_gap(program):
        raise VerifyError(f"nothing makes {gap.phase} of worker {gap.dst} wait for {gap.phase} of worker {gap.src}")
    _reduced(program)


def _reduced(program: Program) -> None:
    """A worker's replicas add up each of its gradients once, after it exists. A worker without replicas has none."""
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


_LAWS: dict[Level, Callable[[Program], None]] = {
    Level.CAPTURED: _captured,
    Level.FOLDED: _folded,
    Level.NUMBERED: _numbered,
    Level.COSTED: _costed,
    Level.PLACED: _placed,
    Level.WIRED: _wired,
    Level.SPLIT: check_split,
    Level.EMITTED: check_emitted,
}

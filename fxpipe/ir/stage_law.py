"""The law of stages: their parts hold the program's calls, each once, and their text says what the parts do."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from torch import fx

from fxpipe.errors import VerifyError
from fxpipe.ir.program import Program, info
from fxpipe.ir.stage import FunctionCall, Part, Stage, name_in_part
from fxpipe.ir.wire import bucket_of, is_recv, is_reduce, is_send
from fxpipe.plan.spec import PartSpec, Phase

_BUILTINS = {"float"}
"""The names of Python itself that emitted code reads: `float("inf")`."""


def check_split(program: Program) -> None:
    """Raise VerifyError if a call is not in exactly one part, or a part reads a value that it is not given."""
    assert program.cuts is not None
    if [stage.worker for stage in program.stages] != list(range(program.cuts.workers)):
        raise VerifyError("a split program has one stage for each worker, in order")
    calls: dict[tuple[int, Phase], list[fx.Node]] = {}
    for node in program:
        calls.setdefault((info(node).worker or 0, info(node).phase), []).append(node)
    for stage in program.stages:
        if tuple(stage.parts) != program.phases:
            raise VerifyError(f"stage {stage.worker} has the parts {tuple(stage.parts)}, not {program.phases}")
        for before, after in pairwise(stage.parts.values()):
            left = before.spec.saved if before.function == "forward" else before.spec.deferred
            if after.passed != left:
                what = f"{after.function} of stage {stage.worker} takes other values than its {before.function} leaves"
                raise VerifyError(what)
        for phase, part in stage.parts.items():
            _check_part(program, f"{part.function} of stage {stage.worker}", part, calls.get((stage.worker, phase), []))


def _check_part(program: Program, where: str, part: Part, calls: Sequence[fx.Node]) -> None:
    part.graph.lint()  # this also checks that a node reads only earlier nodes of its graph
    _compare(where, "is given", *_inputs(program, part))
    calls_by_name = {node.name: node for node in part.graph.nodes if node.op == "call_function"}
    _compare(where, "holds the calls", list(calls_by_name), [name_in_part(node) for node in calls])
    for node in calls:
        if not is_recv(node):  # it reads the Send, which is on the other worker
            reads = [source.name for source in calls_by_name[name_in_part(node)].all_input_nodes]
            _compare(f"{node} in {where}", "reads", reads, [name_in_part(source) for source in node.all_input_nodes])
    for names, is_end in ((part.spec.receives, is_recv), (part.spec.sends, is_send)):
        _compare(where, "has the edges", [part.edges[name] for name, n in calls_by_name.items() if is_end(n)], names)
    _compare(where, "hands over", [bucket_of(n) for n in calls_by_name.values() if is_reduce(n)], part.spec.reduces)
    order = {node: i for i, node in enumerate(part.graph.nodes)}
    for call in part.outlined:
        _check_outlined(where, call, order)


def _check_outlined(where: str, call: FunctionCall, order: Mapping[fx.Node, int]) -> None:
    """Raise VerifyError if a function does not compute what the calls that it replaces compute."""
    what = f"{call.function.name} for {call.nodes[0]} in {where}"
    holders = [node for node in call.function.graph.nodes if node.op == "placeholder"]
    replaced: dict[fx.Node, Any] = dict(zip(holders, call.arguments, strict=True))
    calls = [node for node in call.function.graph.nodes if node.op == "call_function"]
    for node, here, place in zip(calls, call.nodes, range(order[call.nodes[0]], len(order)), strict=False):
        arguments = fx.node.map_arg((node.args, node.kwargs), replaced.__getitem__)
        if node.target is not here.target or repr(arguments) != repr((here.args, here.kwargs)) or order[here] != place:
            raise VerifyError(f"{what} has {node.format_node()} in place of {here.format_node()}")
        replaced[node] = here
    _compare(what, "makes", [str(replaced.get(node)) for node in calls], list(map(str, call.nodes)))
    (results,) = call.function.graph.output_node().args
    _compare(what, "returns", [str(replaced[node]) for node in results], list(map(str, call.results)))  # type: ignore[union-attr, index]
    inside = set(call.nodes)
    outside = {node for node in call.nodes if any(user not in inside for user in node.users)}
    _compare(what, "returns what is read", sorted(map(str, call.results)), sorted(map(str, outside)))


def _inputs(program: Program, part: Part) -> tuple[list[str], list[str]]:
    """The inputs of a part, from its placeholders and from its interface: names of the model, then of saved values."""
    names = {p.node: p.names[0] for p in program.parameters} | {b.node: b.names[0] for b in program.buffers}
    names |= {b.node: b.leaf.name for b in program.batch if b.node}
    placeholders = [node.name for node in part.graph.nodes if node.op == "placeholder"]
    local = len(placeholders) - len(part.passed)
    inputs = [*(names.get(name, name) for name in placeholders[:local]), *placeholders[local:]]
    return inputs, [*part.spec.weights, *part.spec.buffers, *part.spec.batch, *part.passed]


def _compare(where: str, what: str, present: Sequence[str], expected: Sequence[str]) -> None:
    if list(present) != list(expected):
        missing, extra = (sorted(set(a) - set(b)) for a, b in ((expected, present), (present, expected)))
        raise VerifyError(f"{where} {what} {', '.join(present)}: missing {missing}, too many {extra}")


def check_emitted(program: Program) -> None:
    """Raise VerifyError if the text of a stage does not parse, or does not do what its parts say."""
    for stage in program.stages:
        try:
            module = ast.parse(stage.source)
        except SyntaxError as error:
            raise VerifyError(f"{stage.file} does not parse: {error}") from error
        functions = [statement for statement in module.body if isinstance(statement, ast.FunctionDef)]
        expected = [*(f.name for f in stage.functions), *(part.function for part in stage.parts.values())]
        _compare(stage.file, "has", [f.name for f in functions], expected)
        names = _BUILTINS | {f.name for f in stage.functions}
        names |= {name for statement in module.body if statement not in functions for name in _defined(statement)}
        nothing = PartSpec()
        for function in functions[: len(stage.functions)]:
            _check_function(stage, function, nothing, names)
        for function, part in zip(functions[len(stage.functions) :], stage.parts.values(), strict=True):
            _check_function(stage, function, part.spec, names)


def _check_function(stage: Stage, function: ast.FunctionDef, spec: PartSpec, defined: set[str]) -> None:
    defined = defined | {argument.arg for argument in function.args.args}
    edges: dict[str, list[str]] = {"recv": [], "send": []}
    handed: list[str] = []
    for statement in function.body:
        names = [n for n in ast.walk(statement) if isinstance(n, ast.Name)]
        for name in names:
            if not isinstance(name.ctx, ast.Store) and name.id not in defined:
                raise VerifyError(
                    f"{function.name} reads {name.id}, which is not an argument, and which no line before defines",
                    where=f"{stage.file}:{name.lineno}",
                )
        defined.difference_update(n.id for n in names if isinstance(n.ctx, ast.Del))
        defined.update(_defined(statement))
        for call in ast.walk(statement):
            match call:
                case ast.Call(ast.Attribute(ast.Name("comm"), "recv" | "send" as end), [ast.Constant(edge), *_]):
                    edges[end].append(str(edge))
                case ast.Call(
                    ast.Attribute(ast.Name("comm"), "all_reduce" | "reduce_scatter"), [ast.Constant(bucket), _]
                ):
                    handed.append(str(bucket))
    where = f"{function.name} in {stage.file}"
    _compare(where, "receives", edges["recv"], spec.receives)
    _compare(where, "sends", edges["send"], spec.sends)
    _compare(where, "hands over", handed, spec.reduces)


def _defined(statement: ast.stmt) -> list[str]:
    """The names that a statement defines."""
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name.partition(".")[0] for alias in statement.names]
    return [n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]

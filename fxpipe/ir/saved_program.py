"""Programs in a file, with the passes that they go through: what a build keeps for `fxpipe passes`.

`program.json` has the captured step for each shape of batch, the evaluations and the totals, and after each the passes
with their options, as they ran. A node is one line. Values of parameters, buffers and batches are not in it.
"""

from __future__ import annotations

import dataclasses
import json
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, get_type_hints

import torch
from torch import Tensor, fx

from fxpipe.errors import BuildError, FxpipeError, near
from fxpipe.ir.program import INFO, Level, NodeInfo, Program, value
from fxpipe.ir.transform import Pass
from fxpipe.torch_private import FakeTensorMode, OpOverload
from fxpipe.typed_json import Malformed, convert, explained, parse

FORMAT = 1
MOST_VALUES = 4096
"""Constants with more values than that are kept without them: to passes they are as those of the whole batch."""

HINT = "compile again; the file is the program.json of a build of this version"
_TABLES = (
    "parameters", "buffers", "batch", "outputs", "batch_spec", "device", "autocast", "params", "warnings",
    "own_backward", "attributes", "watched",
)  # fmt: skip
"""The fields of a captured program that are kept as they are."""


_HEAD, _BETWEEN, _TAIL = f'{{"format": {FORMAT}, "programs": [\n', ",\n\n", "\n]}\n"


@dataclass(frozen=True)
class SavedProgram:
    """A captured program, without most values, and the passes that it goes through.

    Attributes:
        name: `training`, `shape 1`, `evaluation 0`, `totals`.
    """

    name: str
    program: Program
    passes: tuple[Pass, ...]


def text_of(saved: SavedProgram, modules: Sequence[str]) -> str:
    """A JSON object; each pass and each node is a line. `modules` define its operators."""
    passes = ",\n".join(json.dumps({"name": step.name, **options_of(step)}) for step in saved.passes)
    head = json.dumps({"name": saved.name, "modules": modules})[:-1]
    return f'{head}, "passes": [\n{passes}\n], "program": {_text(saved.program)}}}'


def file_of(texts: Iterable[str]) -> str:
    """The text of `program.json`, from texts of `text_of`."""
    return f"{_HEAD}{_BETWEEN.join(texts)}{_TAIL}"


def texts_of(file: str) -> tuple[str, ...]:
    """The texts of the programs in a file of this version; none in others."""
    return tuple(file.removeprefix(_HEAD).removesuffix(_TAIL).split(_BETWEEN)) if file.startswith(_HEAD) else ()


def read_programs(source: Path | str, passes: Mapping[str, type[Pass]]) -> dict[str, SavedProgram]:
    """The programs of a file, or of its text, by name, the first step's first.

    Raises:
        BuildError: the file is missing or damaged, or has another form; or an operator is not known here.
    """
    with explained(source if isinstance(source, Path) else "program.json", error=BuildError, hint=HINT):
        body = parse(source)
        if not isinstance(body, dict) or body.get("format") != FORMAT or not body.get("programs"):
            raise Malformed(f"it has no programs of format {FORMAT}", ", $")
        try:
            return {one["name"]: _read(one, passes) for one in body["programs"]}
        except (FxpipeError, Malformed, RecursionError):
            raise
        except Exception as error:
            raise Malformed(f"a program has another form: {type(error).__name__}: {error}", ", $.programs") from error


def _read(body: Mapping[str, Any], passes: Mapping[str, type[Pass]]) -> SavedProgram:
    for module in body["modules"]:
        import_module(module)
    steps = [pass_of(passes, **options) for options in body["passes"]]
    return SavedProgram(body["name"], _program(body["program"], FakeTensorMode()), tuple(steps))


def options_of(step: Pass) -> dict[str, Any]:
    """The options of a pass as plain data, without those that are the defaults."""
    import msgspec

    options = ((f, getattr(step, f.name)) for f in dataclasses.fields(step))
    return {f.name: _plain(msgspec.to_builtins(option)) for f, option in options if option != f.default}


def pass_of(passes: Mapping[str, type[Pass]], name: str, **options: Any) -> Pass:
    """The pass of a name, with these options as plain data.

    Raises:
        FxpipeError: there is no such pass, or its options are others.
    """
    if name not in passes:
        raise FxpipeError(f"there is no pass {name!r}{near(name, passes)}", hint=f"the passes: {', '.join(passes)}")
    kind = passes[name]
    try:
        return convert(options, kind, lax=True)
    except Malformed as error:
        needed = ", ".join(f.name for f in dataclasses.fields(kind)) or "none"
        hint = f'its options: {needed}; write them as JSON after its name: {name}{{"option": …}}'
        raise FxpipeError(f"the pass {name}: {error.what}", hint=hint) from error


def _plain(option: Any) -> Any:
    """With `inf`, which JSON has not, as text."""
    if isinstance(option, float) and option in (float("inf"), float("-inf")):
        return str(option)
    if isinstance(option, dict):
        return {key: _plain(inner) for key, inner in option.items()}
    return [_plain(inner) for inner in option] if isinstance(option, list) else option


def _text(program: Program) -> str:
    import msgspec

    tables = {name: msgspec.to_builtins(getattr(program, name)) for name in _TABLES}
    constants = {b.node: program.values[b.node] for b in program.buffers if b.constant}
    small = {n: t.tolist() for n, t in constants.items() if t.numel() <= MOST_VALUES and not _valueless(t)}
    output = [node.name for node in program.output_nodes]
    head = json.dumps({**tables, "constants": small, "output": output}, ensure_ascii=False)[:-1]
    nodes = ",\n".join(json.dumps(row, ensure_ascii=False) for row in _rows(program))
    whole = json.dumps(program.whole) if not isinstance(program.whole, Program) else _text(program.whole)
    return f'{head}, "whole": {whole}, "nodes": [\n{nodes}\n]}}'


def _valueless(tensor: Tensor) -> bool:
    """Whether a tensor has no values, or such that JSON has no form for them."""
    return tensor.is_meta or tensor.is_complex() or not bool(tensor.isfinite().all())


def _rows(program: Program) -> Iterator[list[Any]]:
    """A row for each placeholder and call: name, operator, arguments, value, autograd's number, record."""
    for node in program.graph.nodes:
        if node.op == "placeholder":
            yield [node.name, _saved(value(node))]
        elif node.op == "call_function":
            target = "getitem" if node.target is operator.getitem else str(node.target)
            record = {
                f.name: v for f in dataclasses.fields(NodeInfo) if (v := getattr(node.meta[INFO], f.name)) != f.default
            }
            arguments = [_argument(node.args), {name: _argument(a) for name, a in node.kwargs.items()}]
            autograd = [node.meta.get("seq_nr"), node.meta.get("accumulates", False)]
            yield [node.name, _saved(value(node)), target, *arguments, *autograd, record]


def _argument(argument: Any) -> Any:
    """A node is its name; all but numbers, None and lists are objects."""
    match argument:
        case fx.Node():
            return argument.name
        case tuple():
            return {"tuple": [_argument(inner) for inner in argument]}
        case list():
            return [_argument(inner) for inner in argument]
        case torch.device():
            return {"device": str(argument)}
        case torch.dtype() | torch.layout() | torch.memory_format():
            return {"torch": str(argument).removeprefix("torch.")}
        case str():
            return {"str": argument}
        case complex():
            return {"complex": [argument.real, argument.imag]}
        case float() if argument != argument or abs(argument) == float("inf"):
            return {"float": str(argument)}
    return argument


def _read_argument(saved: Any, nodes: Mapping[str, fx.Node]) -> Any:
    if isinstance(saved, str):
        return nodes[saved]
    if isinstance(saved, list):
        return [_read_argument(inner, nodes) for inner in saved]
    if not isinstance(saved, dict):
        return saved
    ((kind, inner),) = saved.items()
    match kind:
        case "tuple":
            return tuple(_read_argument(each, nodes) for each in inner)
        case "device":
            return torch.device(inner)
        case "torch":
            return getattr(torch, inner)
        case "complex":
            return complex(*inner)
    return float(inner) if kind == "float" else str(inner)


def _saved(example: Any) -> Any:
    """A fake tensor as its dtype, shape, stride, offset and device; several in an object."""
    if isinstance(example, Tensor):
        stride = None if example.layout != torch.strided else list(example.stride())
        offset = 0 if stride is None else example.storage_offset()
        return [str(example.dtype).removeprefix("torch."), list(example.shape), stride, offset, str(example.device)]
    if isinstance(example, (tuple, list)):
        return {type(example).__name__: [_saved(inner) for inner in example]}
    return example


def _example(saved: Any, mode: FakeTensorMode) -> Any:
    if isinstance(saved, dict):
        ((kind, inner),) = saved.items()
        return {"tuple": tuple, "list": list}[kind](_example(each, mode) for each in inner)
    if not isinstance(saved, list):
        return saved
    dtype, shape, stride, offset, device = saved
    with mode:
        if stride is None:
            return torch.zeros(shape, dtype=getattr(torch, dtype), device=device, layout=torch.sparse_coo)
        plain = torch.empty_strided(shape, stride, dtype=getattr(torch, dtype), device=device)
        if not offset:
            return plain
        extent = offset + 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        return plain.new_empty(extent).as_strided(shape, stride, offset)


def _program(body: Mapping[str, Any], mode: FakeTensorMode) -> Program:
    """From what `_text` has written."""
    graph, nodes = fx.Graph(), dict[str, fx.Node]()
    for name, example, *call in body["nodes"]:
        if call:
            target, args, kwargs, number, accumulates, record = call
            arguments = _read_argument(args, nodes), {key: _read_argument(a, nodes) for key, a in kwargs.items()}
            node = graph.create_node("call_function", _operator(target), *arguments, name=name)
            node.meta = {"seq_nr": number, INFO: convert(record, NodeInfo)}
            if accumulates:
                node.meta["accumulates"] = True
        else:
            node = graph.create_node("placeholder", name, name=name)
        node.meta["val"] = _example(example, mode)
        nodes[name] = node
    results = tuple(nodes[name] for name in body["output"])
    graph.output(results).meta["val"] = tuple(value(node) for node in results)
    kinds = get_type_hints(Program)
    tables = {name: convert(body[name], kinds[name]) for name in _TABLES}
    values = {}
    for row in (*tables["parameters"], *tables["buffers"]):
        example = value(nodes[row.node])
        values[row.node] = torch.empty_strided(example.shape, example.stride(), dtype=example.dtype, device="meta")
        if row.node in body["constants"]:
            values[row.node] = torch.tensor(body["constants"][row.node], dtype=example.dtype).reshape(example.shape)
    whole = body["whole"] if not isinstance(body["whole"], dict) else _program(body["whole"], mode)
    return Program(graph, Level.CAPTURED, values=values, example={}, whole=whole, **tables)


def _operator(name: str) -> Any:
    if name == "getitem":
        return operator.getitem
    namespace, packet, overload = name.split(".")
    overloaded = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    if not isinstance(overloaded, OpOverload):
        raise TypeError(f"{name} is no operator")
    return overloaded

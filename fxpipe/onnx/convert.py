"""A pure graph of ATen calls as an ONNX model.

graph ─our decompositions, torch's─→ decomposed graph ─→ ExportedProgram ─torch.onnx─→ names, checks ─→ ModelProto
"""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import onnx
import onnx_ir as ir
import torch
from onnxscript import optimizer
from torch import fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.export.exported_program import ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import (
    ConstantArgument,
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.utils import _pytree as pytree

from fxpipe.errors import ExportError
from fxpipe.onnx import decompositions
from fxpipe.onnx.decompositions.strides import plain_view
from fxpipe.stages.random_inputs import PLACE

aten = torch.ops.aten
_ORIGIN = "fxpipe_origin"  # the operator that a node decomposes
_LIMIT = 12  # places named for one operator


def convert(
    module: fx.GraphModule,
    examples: Sequence[torch.Tensor],
    input_names: Sequence[str],
    output_names: Sequence[str],
    *,
    opset: int = 20,
    optimize: bool = True,
) -> onnx.ModelProto:
    """The module as an ONNX model with static shapes: inputs and outputs in order, under the names given.

    Args:
        module: functional ATen calls; every tensor it reads is a placeholder, its output a tuple of tensors.
        examples: a tensor for each placeholder; shape, strides and dtype count, not values. May be fake.
        input_names: a name for each placeholder. One that nothing reads stays an input of the model.
        output_names: a name for each output. An input or a value put out twice is copied.
        opset: the version of ONNX's operators.
        optimize: fold constants and remove what is superfluous.

    Raises:
        ExportError: operators that ONNX cannot express, each with its places; an output that is no tensor.
    """
    _check_counts(module, examples, input_names, output_names)
    with quiet():
        decomposed = decompose(module, examples, _table())
        _check_operators(decomposed)
        return _to_onnx(_program(decomposed), input_names, output_names, opset=opset, optimize=optimize)


def convert_exported(
    program: ExportedProgram,
    input_names: Sequence[str],
    output_names: Sequence[str],
    *,
    opset: int = 20,
    dynamic: Mapping[str, Mapping[int, str]] | None = None,
    optimize: bool = True,
) -> onnx.ModelProto:
    """An exported inference program as an ONNX model.

    Args:
        program: from `torch.export.export`; dimensions that it leaves open stay open.
        input_names: a name for each of the user's inputs.
        output_names: a name for each output.
        opset: the version of ONNX's operators.
        dynamic: names for open dimensions: input or output → dimension → name, as `{"x": {0: "batch"}}`.
        optimize: fold constants and remove what is superfluous.
    """
    with quiet():
        # ATen's own backward kernels and the like: those of the user's composite calls go to torch.onnx as they are.
        program = program.run_decompositions(dict(_table()))
        _check_operators(program.graph_module)
        return _to_onnx(program, input_names, output_names, opset=opset, optimize=optimize, dynamic=dynamic)


# ---- decomposing ----


def decompose(
    module: fx.GraphModule, examples: Sequence[torch.Tensor], table: Mapping[OpOverload, Callable[..., Any]]
) -> fx.GraphModule:
    """The module in operators that ONNX has; each node's place is that of the call it comes from."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        inputs = [torch.empty_strided(e.shape, e.stride(), dtype=e.dtype, device="cpu") for e in examples]
    with torch.no_grad():
        traced = make_fx(_OnCpu(module).run, decomposition_table=dict(table), tracing_mode="fake")(*inputs)
        if any(isinstance(n.target, OpOverload) and n.target._schema.is_mutable for n in traced.graph.nodes):
            # Some of torch's decompositions write in place.
            pure = functionalize(_OnCpu(traced).run, remove="mutations")
            trace = make_fx(pure, decomposition_table=dict(table), tracing_mode="fake", _allow_non_fake_inputs=True)
            traced = trace(*inputs)
    placeholders = {n for n in traced.graph.nodes if n.op == "placeholder"}
    traced.graph.eliminate_dead_code(is_impure_node=lambda n: n in placeholders or n.op == "output")
    traced.recompile()
    return traced


class _OnCpu(fx.Interpreter):
    """Runs a module on the CPU whatever device it names, free of strides, and passes places on to what is traced."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self._last: fx.Node | None = None

    def run_node(self, n: fx.Node) -> Any:
        try:
            return super().run_node(n)
        except ExportError:
            raise
        except Exception as error:
            raise ExportError(
                f"{_name(n.target)} cannot be exported: {str(error).splitlines()[0] if str(error) else error!r}",
                where=n.meta.get(PLACE),
            ) from error
        finally:
            self._mark(n)

    def _mark(self, made_for: fx.Node) -> None:
        notes = {PLACE: made_for.meta.get(PLACE), _ORIGIN: made_for.meta.get(_ORIGIN, _name(made_for.target))}
        mode = get_proxy_mode()
        if mode is None:
            return
        graph = mode.tracer.graph
        last = newest = next(iter(reversed(graph.nodes)), None)
        while newest is not None and newest is not self._last and newest.op != "root":
            newest.meta.update({k: v for k, v in notes.items() if v is not None})
            newest = newest.prev
        self._last = last

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = pytree.tree_map_only(torch.device, lambda _: torch.device("cpu"), (args, kwargs))
        kwargs = {k: v for k, v in kwargs.items() if k != "pin_memory"}
        if target in (aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default):
            return aten.reshape.default(args[0], args[1])
        if target is aten.as_strided.default:
            return plain_view(*args, **kwargs)
        if target is aten.clone.default:
            return aten.clone.default(args[0])
        return super().call_function(target, args, kwargs)


@functools.cache
def _table() -> dict[OpOverload, Callable[..., Any]]:
    """Torch's decompositions of what torch.onnx lacks, and ours before them."""
    table: dict[OpOverload, Callable[..., Any]] = {}
    for overload, function in [
        *torch.export.default_decompositions().items(),
        *torch._decomp.decomposition_table.items(),
    ]:
        if isinstance(overload, OpOverload) and overload not in _known() and not overload._schema.is_mutable:
            table.setdefault(overload, function)
    return table | decompositions.table()


_KNOWN: set[Any] = set()


def _known() -> set[Any]:
    """What torch.onnx translates."""
    if not _KNOWN:
        from torch.onnx._internal.exporter._registration import ONNXRegistry

        for found in ONNXRegistry.from_torchlib().functions.values():
            _KNOWN.add(found[0].fx_target)
    return _KNOWN


def _check_operators(module: fx.GraphModule) -> None:
    places: dict[str, list[str]] = {}
    for node in module.graph.nodes:
        if node.op != "call_function" or node.target in _known() or node.target is operator.getitem:
            continue
        if isinstance(node.target, OpOverload) and node.target.namespace != "onnx_symbolic" and _tensors(node):
            name, place = _name(node.target), node.meta.get(PLACE)
            origin = node.meta.get(_ORIGIN, name)
            places.setdefault(name if origin == name else f"{origin} (needs {name})", []).extend(
                [place] if place else []
            )
    if places:
        lines = []
        for name, found in sorted(places.items()):
            distinct = list(dict.fromkeys(found))
            lines.append("\n  ".join([name + (":" if distinct else ""), *(f"  {p}" for p in distinct[:_LIMIT])]))
            if len(distinct) > _LIMIT:
                lines[-1] += f"\n    and {len(distinct) - _LIMIT} more"
        raise ExportError(
            "ONNX has nothing for these operators:\n  " + "\n  ".join(lines),
            hint="write that part of the model with other operators, or keep its stage on PyTorch",
        )


def _tensors(node: fx.Node) -> bool:
    """Whether the node makes tensors: arithmetic on sizes is torch.onnx's business."""
    return any(isinstance(v, torch.Tensor) for v in pytree.tree_leaves(node.meta.get("val")))


def _name(target: Any) -> str:
    return str(target) if isinstance(target, OpOverload) else getattr(target, "__name__", str(target))


# ---- the exported program ----


def _program(module: fx.GraphModule) -> ExportedProgram:
    """The graph as an exported program, without tracing it again."""
    graph = module.graph
    constants: dict[str, torch.Tensor] = {}
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    specs = [InputSpec(InputKind.USER_INPUT, TensorArgument(name=n.name), None) for n in inputs]
    lifted: dict[str, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "get_attr":
            continue
        name = str(node.target)
        if name not in lifted:
            constants[name] = operator.attrgetter(name)(module)
            with graph.inserting_before(inputs[0] if inputs else next(iter(graph.nodes))):
                lifted[name] = graph.placeholder("constant_" + name.replace(".", "_"))
            lifted[name].meta["val"] = node.meta.get("val", _fake_like(constants[name], inputs))
        node.replace_all_uses_with(lifted[name])
        graph.erase_node(node)
    lifted_specs = [
        InputSpec(InputKind.CONSTANT_TENSOR, TensorArgument(name=node.name), name) for name, node in lifted.items()
    ]
    output = graph.output_node()
    results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    outputs = [
        OutputSpec(
            OutputKind.USER_OUTPUT,
            TensorArgument(name=n.name) if isinstance(n, fx.Node) else ConstantArgument(name="", value=n),
            None,
        )
        for n in results
    ]
    output.args = (tuple(results),)
    _, in_spec = pytree.tree_flatten((tuple(range(len(inputs))), {}))
    _, out_spec = pytree.tree_flatten(tuple(range(len(results))))
    module.recompile()
    signature = ModuleCallSignature(inputs=[], outputs=[], in_spec=in_spec, out_spec=out_spec)
    return ExportedProgram(
        root=module,
        graph=graph,
        graph_signature=ExportGraphSignature(input_specs=[*lifted_specs, *specs], output_specs=outputs),
        state_dict={},
        range_constraints={},
        module_call_graph=[ModuleCallEntry(fqn="", signature=signature)],
        constants=dict(constants),
    )


def _fake_like(constant: torch.Tensor, inputs: Sequence[fx.Node]) -> torch.Tensor:
    for node in inputs:
        mode = getattr(node.meta.get("val"), "fake_mode", None)
        if mode is not None:
            return mode.from_tensor(constant, static_shapes=True)
    return FakeTensorMode().from_tensor(constant, static_shapes=True)


# ---- the model ----


def _to_onnx(
    program: ExportedProgram,
    input_names: Sequence[str],
    output_names: Sequence[str],
    *,
    opset: int,
    optimize: bool,
    dynamic: Mapping[str, Mapping[int, str]] | None = None,
) -> onnx.ModelProto:
    try:
        made = torch.onnx.export(program, dynamo=True, opset_version=opset, optimize=False, verbose=False)
        if made is not None and optimize:
            optimizer.optimize(made.model, num_iterations=1)  # torch's own two find next to nothing more
    except Exception as error:
        raise ExportError(f"PyTorch's ONNX exporter failed: {_cause(error)}") from error
    assert made is not None
    model = made.model
    _name_values(model.graph, input_names, output_names, dynamic or {})
    _strip(model)
    proto = ir.to_proto(model)
    try:
        onnx.checker.check_model(proto, full_check=True)
    except Exception as error:
        raise ExportError(f"the ONNX model is not valid: {error}") from error
    return proto


def _cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else repr(error)


def _name_values(
    graph: ir.Graph,
    input_names: Sequence[str],
    output_names: Sequence[str],
    dynamic: Mapping[str, Mapping[int, str]],
) -> None:
    if len(graph.inputs) != len(input_names) or len(graph.outputs) != len(output_names):
        raise ExportError(
            f"{len(graph.inputs)} inputs and {len(graph.outputs)} outputs, "
            f"but {len(input_names)} and {len(output_names)} names"
        )
    # An output that is an input, a constant, or stands there twice is copied: each name is a value of its own.
    seen: set[int] = set()
    for i, value in enumerate(list(graph.outputs)):
        if value is None or value.dtype is None:
            raise ExportError(f"output {output_names[i]!r} is not a tensor")
        if value.producer() is None or id(value) in seen:
            copy = ir.node("Identity", [value])
            graph.append(copy)
            graph.outputs[i] = copy.outputs[0]
            copy.outputs[0].dtype, copy.outputs[0].shape = value.dtype, value.shape
        seen.add(id(graph.outputs[i]))
    taken = {*input_names, *output_names}
    if len(taken) != len(input_names) + len(output_names):
        raise ExportError("an input or output name occurs twice")
    ends = [*graph.inputs, *graph.outputs]
    used = taken | {value.name for value in _values(graph)}
    number = 0
    for value in _values(graph):
        if value.name in taken and not any(value is end for end in ends):
            while f"{value.name}_{number}" in used:
                number += 1
            value.name = f"{value.name}_{number}"
            used.add(value.name)
    for i, value in enumerate(ends):  # in two steps, or two of them could swap names and meet halfway
        value.name = f"fxpipe_end_{i}"
    for value, name in zip(ends, [*input_names, *output_names], strict=True):
        value.name = name
        for dimension, symbol in dynamic.get(name, {}).items():
            assert value.shape is not None
            value.shape = ir.Shape([symbol if i == dimension else d for i, d in enumerate(value.shape)])


def _values(graph: ir.Graph) -> Iterator[ir.Value]:
    yield from list(graph.initializers.values())
    for node in ir.traversal.RecursiveGraphIterator(graph):
        yield from node.outputs


def _strip(model: ir.Model) -> None:
    """Drop what torch.onnx notes of the machine: stack traces with paths, names of its tracer."""
    model.metadata_props.clear()
    model.graph.metadata_props.clear()
    model.doc_string = model.graph.doc_string = None
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        node.metadata_props.clear()
        node.doc_string = None
        for value in node.outputs:
            value.metadata_props.clear()
    for value in [*model.graph.inputs, *model.graph.initializers.values()]:
        value.metadata_props.clear()


def _check_counts(
    module: fx.GraphModule,
    examples: Sequence[torch.Tensor],
    input_names: Sequence[str],
    output_names: Sequence[str],
) -> None:
    placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
    results = module.graph.output_node().args[0]
    if not isinstance(results, (tuple, list)):
        raise ExportError("the graph's output is not a tuple")
    if len(placeholders) != len(examples) or len(placeholders) != len(input_names):
        raise ExportError(
            f"the graph has {len(placeholders)} inputs; {len(examples)} examples and {len(input_names)} names are given"
        )
    if len(results) != len(output_names):
        raise ExportError(f"the graph has {len(results)} outputs; {len(output_names)} names are given")
    if not results:
        raise ExportError("the graph has no outputs")
    for result, name in zip(results, output_names, strict=True):
        if not isinstance(result, fx.Node):
            raise ExportError(f"output {name!r} is not a tensor, but {result!r}")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without what torch.onnx has to say about itself."""
    loggers = [logging.getLogger(n) for n in ("torch.onnx", "onnxscript", "onnx_ir", "torch.export")]
    loggers += [
        found
        for name, found in logging.root.manager.loggerDict.items()
        if isinstance(found, logging.Logger) and name.startswith(("torch.onnx.", "onnxscript.", "onnx_ir."))
    ]
    levels = [found.level for found in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for found in loggers:
            found.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for found, level in zip(loggers, levels, strict=True):
                found.setLevel(level)

"""The forward in eval mode as one functional graph, exported by torch, without what no output needs."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from fxpipe import user_lines
from fxpipe.errors import ExportError, FxpipeError, first_line
from fxpipe.export.inference.call import Call, distinct, untouched
from fxpipe.ir.aten import is_random
from fxpipe.messages import silenced
from fxpipe.onnx.convert import quiet
from fxpipe.tracing.held_tensors import HeldTensors
from fxpipe.tracing.refusals import DATA_DEPENDENT

aten = torch.ops.aten

BATCH = "batch"  # the open dimension's name


@dataclass(frozen=True)
class EvalGraph:
    """The functional eval graph, without dead nodes."""

    program: ExportedProgram
    calls: tuple[fx.Node, ...]  # in order, including arithmetic on sizes
    inputs: tuple[fx.Node, ...]  # the placeholders of the model's inputs that are read
    used: tuple[int, ...]  # which of the call's tensors these are
    held: Mapping[fx.Node, Tensor]  # the placeholders that are parameters, buffers or constants, with their tensors
    # of every placeholder: the name of the input, parameter, buffer or constant. Tied weights share one
    names: Mapping[fx.Node, str]
    outputs: tuple[tuple[str, fx.Node], ...]  # names and nodes of the outputs
    batch: str | None  # the symbol of the open batch size
    notes: tuple[str, ...]  # what the user must know

    def shape(self, node: fx.Node) -> tuple[int | str, ...]:
        """A tensor's shape; a size that is not fixed is text, `batch` or `4*batch`."""
        return tuple(d if isinstance(d, int) else self.dimension(str(d)) for d in node.meta["val"].shape)

    def dimension(self, text: str) -> str:
        """A dimension as the exporter writes it, with the batch size renamed to `batch`."""
        return text if self.batch is None else re.sub(rf"\b{self.batch}\b", BATCH, text)


def export_graph(held: HeldTensors, call: Call, dynamic: bool) -> EvalGraph:
    """The model's forward, for the recorded call's arguments; `dynamic` leaves the batch size open."""
    program = _exported(held, call, dynamic)
    results = program.graph.output_node().args[0]
    returned = []
    notes = []
    for spec, node in zip(program.graph_signature.output_specs, results, strict=True):
        if spec.kind == OutputKind.USER_OUTPUT:
            returned.append(node)
        else:
            notes.append(f"the forward changes {own_name(str(spec.target))} in eval mode; the exported files do not")
    live = _live(returned)
    calls = tuple(n for n in program.graph.nodes if n in live and n.op != "placeholder")
    for node in calls:
        if draws(node):
            raise ExportError(
                f"the forward draws random numbers in eval mode: {node.target}",
                where=place_of(node),
                hint="draw only if self.training: F.dropout(x, p, training=self.training)",
            )
    inputs, weights, names = _placeholders(program, held, call, live)
    outputs = distinct(call.kept, list(names.values()))
    notes += [f"input {n} is not read by any output: left out" for i, n in enumerate(call.names) if i not in inputs]
    batch = next((str(n.meta["val"].shape[0]) for i, n in inputs.items() if call.batched[i]), None)
    return EvalGraph(
        program=program,
        calls=calls,
        inputs=tuple(inputs.values()),
        used=tuple(inputs),
        held=weights,
        names=names,
        outputs=tuple(zip(outputs, returned, strict=True)),
        batch=None if batch is None or batch.isdigit() else batch,
        notes=tuple(notes),
    )


class _Flat(nn.Module):
    """The model as a function from tensors to tensors, with constant arguments fixed."""

    def __init__(self, model: nn.Module, call: Call) -> None:
        super().__init__()
        self.model = model
        self.call = call
        self.training = False

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.call.make(self.model, tensors))


def _exported(held: HeldTensors, call: Call, dynamic: bool) -> ExportedProgram:
    dim = Dim(BATCH)
    shapes = (tuple({0: dim} if dynamic and batched else None for batched in call.batched),)
    try:
        with untouched(held), quiet(), _silent():
            flat = _Flat(held.model, call)
            program = torch.export.export(flat, call.tensors, dynamic_shapes=shapes, strict=False)
            return program.run_decompositions({})  # functional, and nothing decomposed
    except ExportError:
        raise
    except Exception as error:
        raise _explained(error) from error


def _live(outputs: Sequence[fx.Node]) -> set[fx.Node]:
    """Everything that the outputs need. An input is not needed only because the tracer read the batch size from it."""
    live: set[fx.Node] = set()
    sizes: list[fx.Node] = []
    stack = list(outputs)
    while stack or sizes:
        if not stack:
            size = sizes.pop()
            live_sizes = {str(d) for n in live if n.op == "placeholder" for d in n.meta["val"].shape}
            stack += () if str(size.meta["val"]) in live_sizes else size.all_input_nodes
            continue
        node = stack.pop()
        if node in live:
            continue
        live.add(node)
        if is_size(node) and not all(map(is_size, node.all_input_nodes)):
            sizes.append(node)
        else:
            stack += node.all_input_nodes
    return live


def _placeholders(
    program: ExportedProgram, held: HeldTensors, call: Call, live: set[fx.Node]
) -> tuple[dict[int, fx.Node], dict[fx.Node, Tensor], dict[fx.Node, str]]:
    """The inputs that are read, by their place in the call; what the model holds; and the names of both."""
    nodes = {n.name: n for n in program.graph.nodes}
    first = {name: names[0] for names in held.names for name in names}  # a tied weight has its first name
    inputs: dict[int, fx.Node] = {}
    weights: dict[fx.Node, Tensor] = {}
    names: dict[fx.Node, str] = {}
    count = 0
    for spec in program.graph_signature.input_specs:
        node = nodes[spec.arg.name]
        if spec.kind == InputKind.USER_INPUT:
            if node in live:
                inputs[count] = node
            count += 1
        elif node in live:
            target = str(spec.target)
            value = program.state_dict.get(target, program.constants.get(target))
            if not isinstance(value, Tensor):
                raise ExportError(f"the forward reads {own_name(target)}, which is not a tensor")
            weights[node] = value.detach()
            names[node] = first.get(own_name(target), own_name(target))
    if not inputs:
        raise ExportError("the model's outputs depend on none of its inputs")
    chosen = distinct([call.names[i] for i in inputs], list(names.values()))
    names.update(zip(inputs.values(), chosen, strict=True))
    return inputs, weights, names


def _explained(error: Exception) -> ExportError:
    """Why torch.export failed, with the user's line."""
    message = f"{type(error).__name__}: {error}"
    where = user_lines.user_traceback(error)
    if re.search(DATA_DEPENDENT, message):
        return ExportError(
            "the forward depends on the values of a tensor: one graph cannot hold `if tensor`, .item() or a shape "
            "from data",
            where=where,
            hint="compute both branches and choose with torch.where, or skip the test in eval mode",
        )
    if "Constraints violated" in message:
        return ExportError("the forward treats the batch size as a constant")
    return ExportError(f"the forward cannot be one graph: {in_a_line(error)}", where=where)


def in_a_line(error: Exception) -> str:
    """An error as part of a sentence: fxpipe's own with its place, others with their type."""
    if not isinstance(error, FxpipeError):
        return f"{type(error).__name__}: {first_line(error)}"
    text = error.what.splitlines()[0][:300]
    return f"{text} ({error.where})" if error.where else text


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Silence what torch.export logs and prints about errors: it also raises them, and fxpipe explains them."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with silenced():
            yield
    finally:
        logging.disable(level)


def is_size(node: fx.Node) -> bool:
    """Whether the node is arithmetic on sizes: its value is not a tensor, and every stage computes it itself."""
    return node.op == "call_function" and isinstance(
        node.meta.get("val"), (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)
    )


def draws(node: fx.Node) -> bool:
    """Whether the node's value depends on random numbers."""
    if node.target in (aten.dropout.default, aten.feature_dropout.default, aten.alpha_dropout.default):
        return bool(node.args[1]) and bool(node.args[2])
    if node.target is aten.native_dropout.default:
        return bool(node.args[2])
    # Recurrent layers and attention are tagged random for a dropout that eval mode has turned off.
    names = ("lstm", "gru", "rnn_tanh", "rnn_relu", "multi_head_attention", "rrelu", "batch_norm")
    return is_random(node) and not str(node.target).removeprefix("aten.").startswith(names)


def own_name(target: str) -> str:
    """The model's own name for export's `target`: export sees the model inside a module of ours."""
    return target.removeprefix("model.")


def module_of(node: fx.Node) -> str:
    """The path of the module whose forward made the node."""
    stack = node.meta.get("nn_module_stack") or {}
    path = str(next(reversed(stack.values()), ("",))[0])
    return "" if path == "model" else own_name(path)


def place_of(node: fx.Node) -> str | None:
    """`model.py:12: the line`, of the innermost frame in the user's code; else the module."""
    return user_lines.user_stack(node.meta.get("stack_trace") or "") or module_of(node) or None

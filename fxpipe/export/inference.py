"""The forward in eval mode, without the loss, as a chain of ONNX files: one for each worker, batch size left open.

    model, example ─recorded call─→ torch.export ─placed as the plan cuts─→ a graph each ─convert─→ files ─checked─→

The training graph says where the cuts lie: the eval graph's calls are laid beside its own, by module and operator.
That decides only where a value crosses, never whether the chain is right: any places that rise along the graph's order
make a right chain. The inputs of a stage are exactly the outputs of the one before it, in the same order; a value that
a later stage needs is passed on, as `x.1`, `x.2`, by those between.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import inspect
import io
import json
import logging
import re
import warnings
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import onnx
import onnx.inliner
import onnx_ir as ir
import torch
from torch import fx, nn
from torch.export import Dim, ExportedProgram
from torch.export.exported_program import ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)
from torch.utils import _pytree as pytree

import fxpipe
from fxpipe import origin
from fxpipe.aten import is_cheap, is_getitem, is_random, is_view
from fxpipe.batch import split
from fxpipe.errors import ExportError, FxpipeError
from fxpipe.export.convert import PLACE, convert_exported, quiet
from fxpipe.plan import Plan
from fxpipe.program import info
from fxpipe.refusals import CAUSES
from fxpipe.tracing import Loss, capture
from fxpipe.transform import run_passes

aten = torch.ops.aten
BATCH = "batch"  # the open dimension's name
TOLERANCE = {torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Of the files against eager PyTorch, norm-relative, by the least exact type of weights; 1e-4 for all other types."""
INLINE = 2**31 - 2**26
"""Bytes of weights that fit into a file of protobuf's, with room for the graph."""
SMALL = 1024
"""Elements of a constant that the graph holds itself, where it can be folded."""

PortKind = Literal["input", "activation", "passed", "output"]


@dataclass(frozen=True)
class Port:
    """An input or output of a stage.

    Kinds: the model's own `input` or `output`, an `activation` that the stage before made or this one makes, and what
    is only `passed` on, or was passed on to here. A dimension left open is text, `batch`.
    """

    name: str
    kind: PortKind
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True)
class InferenceStage:
    """One file of the chain.

    Attributes:
        files: names in the folder: the model, and its `.data` where the weights lie beside it.
        nodes: how many ONNX nodes it has.
        weights: the model's own names of its parameters and buffers; large constants are among them.
        weight_bytes: what they take.
    """

    worker: int
    files: tuple[str, ...]
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    nodes: int
    weights: tuple[str, ...] = field(repr=False)
    weight_bytes: int


@dataclass(frozen=True)
class InferenceExport:
    """What was written, and how it was checked.

    Attributes:
        dynamic: whether the batch size is open.
        error: the largest norm-relative difference from eager PyTorch.
        batches: the batch sizes that were compared.
        warnings: what the user must know: a batch size that had to be fixed, inputs and outputs left out.
    """

    stages: tuple[InferenceStage, ...]
    dynamic: bool
    error: float
    batches: tuple[int, ...]
    warnings: tuple[str, ...] = ()


def export_inference(
    model: nn.Module,
    loss: Loss,
    batch: Any,
    folder: Path,
    *,
    plan: Plan | None = None,
    opset: int = 20,
    weights: Literal["initializers", "external"] = "initializers",
    model_file: str | None = None,
) -> InferenceExport:
    """Write `stage_k.inference.onnx` for every worker, run the chain in onnxruntime and compare it with the model.

    Args:
        model: on the CPU, with the weights to export; its modes and buffers are as before afterwards.
        loss, batch: `loss(model, batch)` shows how the model is called; `batch` is one whole minibatch.
        folder: exists and is empty; nothing is left in it where an error is raised.
        plan: of a build of this model: its forward cuts are followed. One file for the whole model where None.
        opset: the version of ONNX's operators.
        weights: 'external' puts them beside each file, as `stage_k.inference.onnx.data`. So does 'initializers' where
            a file would have more than 2 GB.
        model_file: name of the user's file, for the files' metadata.

    Raises:
        ExportError: the loss does not call the model exactly once; the forward cannot be one graph; ONNX has nothing
            for an operator; the plan is not of this model; or the files compute something else than the model.
        CaptureError: the training step, captured to find the plan's cuts, cannot be captured.
    """
    if any(t.device.type != "cpu" for t in (*model.parameters(), *model.buffers())):
        raise ExportError("the model is not on the CPU", hint="export before moving it: model.cpu()")
    modes = {module: module.training for module in model.modules()}
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own; the user's came out when the model was made
        try:
            cuts = _cuts(model, loss, batch, plan)  # first: it traces the model as training finds it
            model.eval()
            with torch.no_grad(), _buffers_kept(model) as restore:
                call = _record(model, loss, batch)
                restore()
                job = _Job(model, call, cuts, folder, opset, weights == "external", model_file, restore)
                if call.size is None:
                    return job.run(dynamic=False)
                try:
                    return job.run(dynamic=True)
                except FxpipeError as error:
                    _clean(folder)
                    first = _first_line(error)
                    made = job.run(dynamic=False)
                    note = f"the batch size is fixed at {call.size}: with an open one, {first}"
                    return dataclasses.replace(made, warnings=(note, *made.warnings))
        except BaseException:
            _clean(folder)
            raise
        finally:
            for module, mode in modes.items():
                module.training = mode


def _clean(folder: Path) -> None:
    for path in folder.glob("stage_*.inference.onnx*"):
        path.unlink()


@dataclass
class _Job:
    """One export, tried with an open batch size and with a fixed one."""

    model: nn.Module
    call: _Call
    cuts: _Cuts
    folder: Path
    opset: int
    external: bool
    model_file: str | None
    restore: Callable[[], None]

    def run(self, dynamic: bool) -> InferenceExport:
        graph, notes = _export(self.model, self.call, dynamic)
        self.restore()
        chain = _chain(graph, self.cuts)
        stages = tuple(self._write(graph, chain, k) for k in range(self.cuts.workers))
        error, batches = self._compare(graph, stages, dynamic)
        return InferenceExport(stages, dynamic, error, batches, (*self.call.notes, *notes))

    def _write(self, graph: _Graph, chain: Sequence[_Link], k: int) -> InferenceStage:
        link = chain[k]
        program, held = _program(graph, link)
        inputs, outputs = link.ports(graph, "in"), link.ports(graph, "out")
        dims = {p.name: {i: d for i, d in enumerate(p.shape) if isinstance(d, str)} for p in (*inputs, *outputs)}
        names = [*held, *(p.name for p in inputs)]
        try:
            proto = convert_exported(program, names, [p.name for p in outputs], opset=self.opset, dynamic=dims)
        except FxpipeError:
            raise
        except Exception as error:
            raise ExportError(f"stage {k} cannot be converted: {_first_line(error)}") from error
        _name_dimensions(proto, graph)
        found = {o.domain: o.version for o in proto.opset_import}.get("")
        if found != self.opset:
            raise ExportError(f"stage {k} came out in opset {found}, not {self.opset}", hint="another --opset")
        if proto.functions:
            proto = onnx.inliner.inline_local_functions(proto)
        self._note(proto, k, len(chain), inputs, outputs)
        count = len(proto.graph.node)
        path = self.folder / f"stage_{k}.inference.onnx"
        files, size = _save(proto, held, path, self.external)
        try:
            onnx.checker.check_model(str(path), full_check=True)
        except Exception as error:
            raise ExportError(f"{path.name} is not valid ONNX: {_first_line(error)}") from error
        return InferenceStage(k, files, inputs, outputs, count, tuple(held), size)

    def _note(
        self, proto: onnx.ModelProto, k: int, count: int, inputs: Sequence[Port], outputs: Sequence[Port]
    ) -> None:
        """Write what the file is into it."""
        body = {
            "version": fxpipe.__version__,
            "phase": "inference",
            "stage": k,
            "workers": count,
            **({"model": self.model_file} if self.model_file else {}),
            "inputs": [{"value": p.name, "kind": p.kind} for p in inputs],
            "outputs": [{"value": p.name, "kind": p.kind} for p in outputs],
        }
        proto.metadata_props.add(key="fxpipe", value=json.dumps(body, ensure_ascii=False))
        proto.producer_name, proto.producer_version = "fxpipe", fxpipe.__version__
        proto.graph.name = f"stage_{k}.inference"
        kinds = {p.name: p.kind for p in (*inputs, *outputs)}
        for value in (*proto.graph.input, *proto.graph.output):
            value.doc_string = kinds.get(value.name, "")

    def _compare(self, graph: _Graph, stages: Sequence[InferenceStage], dynamic: bool) -> tuple[float, tuple[int, ...]]:
        """The largest error of the chain, on the example and, where the batch size is open, on others."""
        sessions = [_session(self.folder / stage.files[0]) for stage in stages]
        size = self.call.size
        others = [s for s in (1, size + 1) if s != size] if dynamic and size is not None else []
        dtypes = {p.dtype for p in self.model.parameters()}
        worst, batches = 0.0, [] if size is None else [size]
        for rows in (None, *others):
            tensors = self.call.tensors if rows is None else self.call.resized(rows)
            try:  # on copies: a model may change its inputs, and give out its buffers
                result = self.call.of(self.model, [t.clone() for t in tensors])
                wanted = [o.value.clone() for o in _outputs(result, self.call) if o.kept]
            except Exception:
                if rows is None:
                    raise
                continue  # the model itself does not take this batch size
            finally:
                self.restore()
            values = [_array(tensors[i]) for i in graph.used]
            for k, session in enumerate(sessions):
                feed = dict(zip([i.name for i in session.get_inputs()], values, strict=True))
                try:
                    values = session.run(None, feed)
                except Exception as error:
                    where = f"{stages[k].files[0]}, batch size {rows or size}"
                    raise ExportError(f"onnxruntime cannot run it: {_first_line(error)}", where=where) from error
            for port, value, right in zip(stages[-1].outputs, values, wanted, strict=True):
                off, limit = _difference(value, right), max(TOLERANCE.get(d, 1e-4) for d in {right.dtype, *dtypes})
                if not off <= limit:
                    raise ExportError(
                        f"output {port.name} of the exported stages differs from the model's own by {off:.1e} "
                        f"(at most {limit:g} is right) at batch size {rows or size}"
                    )
                worst = max(worst, off)
            if rows is not None:
                batches.append(rows)
        return worst, tuple(batches)


# ---- how the model is called ----


@dataclass(frozen=True)
class _Call:
    """The one call that the loss makes: its tensors in order with their names, and how to make it with others.

    Attributes:
        size: of the batch; None if no input of the model has it as dimension 0.
        batched: for each tensor whether its dimension 0 is the batch's.
        loss: what the loss function returned, if that very value is an output of the model.
    """

    names: tuple[str, ...]
    tensors: tuple[torch.Tensor, ...]
    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec
    size: int | None
    batched: tuple[bool, ...]
    loss: str | None
    notes: tuple[str, ...]

    def of(self, model: nn.Module, tensors: Sequence[torch.Tensor]) -> Any:
        given = iter(tensors)
        leaves = [next(given) if isinstance(v, torch.Tensor) else v for v in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return model(*args, **kwargs)

    def resized(self, rows: int) -> list[torch.Tensor]:
        """The tensors with another batch size: the example's rows again from the first."""
        return [
            t[torch.arange(rows) % t.shape[0]] if batched else t
            for t, batched in zip(self.tensors, self.batched, strict=True)
        ]


@dataclass(frozen=True)
class _Output:
    name: str
    value: torch.Tensor
    kept: bool = True


def _record(model: nn.Module, loss: Loss, batch: Any) -> _Call:
    """The arguments of the model's call in `loss(model, batch)`."""
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    results: list[Any] = []
    beside: list[str] = []
    depth = 0

    def enter(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            nonlocal depth
            if depth == 0 and path:
                beside.append(path)
            elif depth == 0:
                calls.append((args, kwargs))
            depth += 1

        return hook

    def leave(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            nonlocal depth
            depth -= 1
            if depth == 0 and not path:
                results.append(output)

        return hook

    hooks = []
    for path, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(enter(path), with_kwargs=True, prepend=True))
        hooks.append(module.register_forward_hook(leave(path), always_call=True))
    try:
        value = loss(model, batch)
    except Exception as error:
        raise ExportError(
            f"loss(model, batch) raised {_first_line(error)} with the model in eval mode",
            where=origin.user_traceback(error),
            hint="how the model is called is found by calling the loss once",
        ) from error
    finally:
        for handle in hooks:
            handle.remove()
    if beside or len(calls) != 1:
        often = "does not call the model" if not calls else f"calls the model {len(calls)} times"
        said = ["calls the model once" if len(calls) == 1 else often]
        said += [f"calls {', '.join(map(repr, dict.fromkeys(beside)))} beside it"] if beside else []
        raise ExportError(
            f"the loss {', and '.join(said)}: what to export is the model's one call, model(…)",
            where=origin.definition(loss),
            hint="put all that makes the prediction into the model's forward, and call that once in the loss",
        )
    (args, kwargs), result = calls[0], results[0]
    return _described(model, args, kwargs, result, value, batch)


def _described(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, value: Any, batch: Any
) -> _Call:
    leaves, spec = pytree.tree_flatten((args, kwargs))
    names = [_named(model, path) for path, _ in pytree.tree_flatten_with_path((args, kwargs))[0]]
    # Copies: an input that stands there twice is two inputs, and no input lies in another's memory.
    tensors = [(n, v.detach().clone()) for n, v in zip(names, leaves, strict=True) if isinstance(v, torch.Tensor)]
    if not tensors:
        raise ExportError("the loss calls the model without any tensor", hint="there is nothing that could be an input")
    sizes = Counter(v.shape[0] for v in pytree.tree_leaves(batch) if isinstance(v, torch.Tensor) and v.dim())
    size = sizes.most_common(1)[0][0] if sizes else None
    batched = tuple(v.dim() > 0 and v.shape[0] == size for _, v in tensors)
    notes: tuple[str, ...] = ()
    if not any(batched):
        size = None
        notes = ("no input of the model has the batch as its first dimension: all sizes are fixed",)
    made = _Call(
        _distinct([n for n, _ in tensors]),
        tuple(v for _, v in tensors),
        tuple(leaves),
        spec,
        size,
        batched,
        next((o.name for o in _outputs(result) if o.value is value), None),
        notes,
    )
    if size == 1:  # torch.export takes a size of 1 for a constant
        made = dataclasses.replace(made, tensors=tuple(made.resized(2)), size=2)
    return made


def _named(model: nn.Module, path: Sequence[Any]) -> str:
    """`input_ids`, `mask[0]`, `extra.bias`: a leaf of the arguments under its name in the model's forward."""
    kind, which, *rest = path
    name = str(getattr(which, "key", ""))
    if kind.idx == 0:
        parameters = list(inspect.signature(model.forward).parameters.values())
        plain = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        several = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "input")
        name = plain[which.idx].name if which.idx < len(plain) else f"{several}[{which.idx - len(plain)}]"
    return name + "".join(_step(key) for key in rest)


def _step(key: Any) -> str:
    if isinstance(key, pytree.SequenceKey):
        return f"[{key.idx}]"
    return f".{key.key if isinstance(key, pytree.MappingKey) else getattr(key, 'name', key)}"


def _distinct(names: Sequence[str], taken: Sequence[str] = ()) -> tuple[str, ...]:
    made: list[str] = []
    for name in names:
        chosen, number = name, 1
        while chosen in made or chosen in taken:
            chosen, number = f"{name}_{number}", number + 1
        made.append(chosen)
    return tuple(made)


def _outputs(result: Any, call: _Call | None = None, left_out: list[str] | None = None) -> list[_Output]:
    """The tensors of what the model returns, under their names; the loss among them is not kept."""
    found: list[tuple[str, torch.Tensor]] = []

    def walk(value: Any, name: str) -> None:
        if isinstance(value, torch.Tensor):
            found.append((name or "output", value))
        elif isinstance(value, Mapping):
            for key, v in value.items():
                walk(v, f"{name}.{key}" if name else str(key))
        elif isinstance(value, tuple) and hasattr(value, "_fields"):
            walk(dict(zip(value._fields, value, strict=True)), name)
        elif isinstance(value, (tuple, list)):
            for i, v in enumerate(value):
                walk(v, f"{name or 'output'}[{i}]")
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            walk({f.name: getattr(value, f.name) for f in dataclasses.fields(value)}, name)
        elif value is not None and left_out is not None:
            left_out.append(f"output {name or 'of the model'} is a {type(value).__name__}, no tensor: left out")

    walk(result, "")
    names = _distinct([name for name, _ in found])
    lost = None if call is None else call.loss
    return [_Output(n, v, kept=n != lost) for n, (_, v) in zip(names, found, strict=True)]


# ---- the graph ----


class _Flat(nn.Module):
    """The model as a function from tensors to tensors, the constants among its arguments fixed."""

    def __init__(self, model: nn.Module, call: _Call, tell: Callable[[list[str], list[str]], None]) -> None:
        super().__init__()
        self.model = model
        self.call = call
        self.tell = tell  # export puts attributes back as they were

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        left_out: list[str] = []
        made = _outputs(self.call.of(self.model, tensors), self.call, left_out)
        self.tell([o.name for o in made if o.kept], left_out)
        return tuple(o.value for o in made if o.kept)


@dataclass(frozen=True)
class _Graph:
    """The functional eval graph, live nodes alone.

    Attributes:
        calls: in order; arithmetic on sizes is among them.
        inputs: the placeholders of the model's inputs, those that are read.
        used: which of the call's tensors they are.
        names: of every placeholder: the input's, parameter's, buffer's or constant's own.
        held: the placeholders that are parameters, buffers or constants, with their tensors.
        outputs: the nodes of the outputs, under their names.
        batch: the symbol of the open batch size.
    """

    program: ExportedProgram
    calls: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    used: tuple[int, ...]
    names: Mapping[fx.Node, str]
    held: Mapping[fx.Node, torch.Tensor]
    outputs: tuple[tuple[str, fx.Node], ...]
    batch: str | None

    def shape(self, node: fx.Node) -> tuple[int | str, ...]:
        return tuple(d if isinstance(d, int) else self.dimension(str(d)) for d in node.meta["val"].shape)

    def dimension(self, text: str) -> str:
        return text if self.batch is None else re.sub(rf"\b{self.batch}\b", BATCH, text)


def _export(model: nn.Module, call: _Call, dynamic: bool) -> tuple[_Graph, list[str]]:
    """The forward as a functional graph, and what the user must know of it."""
    kept: list[str] = []
    left_out: list[str] = []

    def tell(*said: list[str]) -> None:
        kept[:], left_out[:] = said

    flat = _Flat(model, call, tell)
    flat.training = False
    dim = Dim(BATCH)
    shapes = (tuple({0: dim} if dynamic and batched else None for batched in call.batched),)
    try:
        with quiet(), _silent():
            program = torch.export.export(flat, call.tensors, dynamic_shapes=shapes, strict=False)
            program = program.run_decompositions({})  # functional, and nothing decomposed
    except ExportError:
        raise
    except Exception as error:
        raise _explained(error) from error
    notes = list(left_out)
    signature = program.graph_signature
    nodes = {n.name: n for n in program.graph.nodes}
    results = program.graph.output_node().args[0]
    outputs = []
    names = iter(kept)
    for spec, node in zip(signature.output_specs, results, strict=True):
        if spec.kind == OutputKind.USER_OUTPUT:
            outputs.append((next(names), node))
        else:
            notes.append(f"the forward changes {_own_name(str(spec.target))} in eval mode, the exported files do not")
    if not outputs:
        raise ExportError("the model returns no tensor but the loss", hint="return the prediction beside it")
    live = _live([node for _, node in outputs])
    calls = tuple(n for n in program.graph.nodes if n in live and n.op != "placeholder")
    for node in calls:
        node.meta[PLACE] = _place_of(node)
        if _draws(node):
            raise ExportError(
                f"the forward draws random numbers in eval mode: {node.target}",
                where=_place_of(node),
                hint="draw only if self.training: F.dropout(x, p, training=self.training)",
            )
    own, held, inputs, used = _placeholders(program, model, call, live, nodes)
    notes += [f"input {n} is not read by any output: left out" for i, n in enumerate(call.names) if i not in used]
    batch = next((str(n.meta["val"].shape[0]) for n, i in zip(inputs, used, strict=True) if call.batched[i]), None)
    open_size = dynamic and batch is not None and not batch.isdigit()
    return _Graph(program, calls, inputs, used, own, held, tuple(outputs), batch if open_size else None), notes


def _live(outputs: Sequence[fx.Node]) -> set[fx.Node]:
    """All that the outputs need. An input is not needed only because the tracer took the batch size from it."""
    live: set[fx.Node] = set()
    asked: list[fx.Node] = []
    stack = list(outputs)
    while stack or asked:
        if not stack:
            size = asked.pop()
            known = {str(d) for n in live if n.op == "placeholder" for d in n.meta["val"].shape}
            stack += () if str(size.meta["val"]) in known else size.all_input_nodes
            continue
        node = stack.pop()
        if node in live:
            continue
        live.add(node)
        if _is_size(node) and not all(map(_is_size, node.all_input_nodes)):
            asked.append(node)
        else:
            stack += node.all_input_nodes
    return live


def _memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The same for tensors that are one; a tensor without elements is like no other."""
    return (tensor.data_ptr() or id(tensor), tensor.shape, tensor.stride(), tensor.dtype)


def _placeholders(
    program: ExportedProgram, model: nn.Module, call: _Call, live: set[fx.Node], nodes: Mapping[str, fx.Node]
) -> tuple[dict[fx.Node, str], dict[fx.Node, torch.Tensor], tuple[fx.Node, ...], tuple[int, ...]]:
    names: dict[fx.Node, str] = {}
    held: dict[fx.Node, torch.Tensor] = {}
    inputs: list[fx.Node] = []
    used: list[int] = []
    user = 0
    firsts: dict[tuple[Any, ...], str] = {}  # a tied weight goes by its first name
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        firsts.setdefault(_memory(tensor), name)
    for spec in program.graph_signature.input_specs:
        node = nodes[spec.arg.name]
        if spec.kind == InputKind.USER_INPUT:
            if node in live:
                names[node] = call.names[user]
                inputs.append(node)
                used.append(user)
            user += 1
        elif node in live:
            target = str(spec.target)
            value = program.state_dict.get(target, program.constants.get(target))
            if not isinstance(value, torch.Tensor):
                raise ExportError(f"the forward reads {_own_name(target)}, which is not a tensor")
            names[node], held[node] = firsts.get(_memory(value), _own_name(target)), value.detach()
    if not inputs:
        raise ExportError("the model's outputs depend on none of its inputs")
    weights = [names[n] for n in held]
    renamed = _distinct([names[n] for n in inputs], weights)
    names.update(zip(inputs, renamed, strict=True))
    return names, held, tuple(inputs), tuple(used)


def _own_name(target: str) -> str:
    return target.removeprefix("model.")


def _draws(node: fx.Node) -> bool:
    if node.target in (aten.dropout.default, aten.feature_dropout.default, aten.alpha_dropout.default):
        return bool(node.args[1]) and bool(node.args[2])
    if node.target is aten.native_dropout.default:
        return bool(node.args[2])
    # Recurrent layers and attention are tagged random for a dropout that eval mode has turned off.
    names = ("lstm", "gru", "rnn_tanh", "rnn_relu", "multi_head_attention", "rrelu", "batch_norm")
    return is_random(node) and not str(node.target).removeprefix("aten.").startswith(names)


def _module_of(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    path = str(next(reversed(stack.values()), ("",))[0])
    return "" if path == "model" else _own_name(path)


def _place_of(node: fx.Node) -> str | None:
    """`model.py:12: the line`, of the innermost frame of the user's."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    own = [(file, int(line)) for file, line in frames if not file.startswith((*origin._LIBRARY, "<"))]
    if not own:
        return _module_of(node) or None
    file, line = own[-1]
    return f"{origin.short(file)}:{line}: {origin.text(file, line)}"


def _explained(error: Exception) -> ExportError:
    """Why torch.export failed, with the user's line."""
    said = f"{type(error).__name__}: {error}"
    where = origin.user_traceback(error)
    if re.search(CAUSES[1][0], said):
        return ExportError(
            "the forward depends on the values of a tensor: one graph cannot hold `if tensor`, .item() or a shape "
            "from data",
            where=where,
            hint="compute both branches and choose with torch.where, or leave the test out in eval mode",
        )
    if "Constraints violated" in said:
        return ExportError("the forward takes the size of the batch for a constant")
    return ExportError(f"the forward cannot be one graph: {_first_line(error)}", where=where)


def _first_line(error: BaseException) -> str:
    what = error.what if isinstance(error, FxpipeError) else str(error)
    lines = [line.strip() for line in what.splitlines() if line.strip()]
    where = error.where if isinstance(error, FxpipeError) else None
    first = (lines[0] if lines else "no reason given")[:300]
    text = first if isinstance(error, FxpipeError) else f"{type(error).__name__}: {first}"
    return f"{text} ({where})" if where else text


# ---- where it is cut ----


@dataclass(frozen=True)
class _Cuts:
    """Forward calls of the training graph in order, each with module, operator and worker; '' for any operator."""

    workers: int
    keys: tuple[tuple[str, str], ...] = ()
    at: tuple[int, ...] = ()
    operators: bool = True


def _cuts(model: nn.Module, loss: Loss, batch: Any, plan: Plan | None) -> _Cuts:
    if plan is None or plan.workers == 1:
        return _Cuts(1)
    from fxpipe.passes.fold import Fold
    from fxpipe.passes.units import Units

    program = capture(model, loss, split(batch, plan.microbatches)[0], autocast=plan.autocast)
    program = run_passes(program, [Fold(), Units()])
    starts = [*(s.forward_units[0] for s in plan.stages), len(plan.units)]
    if program.units != plan.units:
        if plan.device == program.device:
            raise ExportError(
                "the build is not of this model: its training step has other units",
                hint="compile it again, or give the model file that it was compiled from",
            )
        units = tuple((path, "") for path in plan.units)  # made for another device, whose operators may differ
        return _Cuts(plan.workers, units, tuple(bisect_right(starts, u) - 1 for u in range(len(units))), False)
    nodes = [n for n in program if info(n).phase == "F" and info(n).unit >= 0 and not is_view(n)]
    return _Cuts(
        plan.workers,
        tuple((info(n).module, _operator(n)) for n in nodes),
        tuple(min(bisect_right(starts, info(n).unit), plan.workers) - 1 for n in nodes),
    )


_SAME = {
    "addmm": "linear",
    "mm": "linear",
    "bmm": "matmul",
    "baddbmm": "matmul",
    "convolution": "conv",
    "conv_transpose": "conv",
}


def _operator(node: fx.Node) -> str:
    """One name for what training and eval call differently: `addmm` and `linear`, `convolution` and `conv2d`."""
    name = str(node.target).removeprefix("aten.").split(".")[0].strip("_").removeprefix("native_")
    name = re.sub(r"(_legit.*|_with_indices|[123]d)+$", "", name)
    if name.startswith("scaled_dot_product"):
        return "attention"
    return _SAME.get(name, name)


def _workers(graph: _Graph, cuts: _Cuts) -> dict[fx.Node, int]:
    """The worker of every call: never before those of its inputs."""
    if cuts.workers == 1:
        return dict.fromkeys(graph.calls, 0)
    calls = [n for n in graph.calls if not is_view(n) and not _is_size(n)]
    own = [(_module_of(n), _operator(n) if cuts.operators else "") for n in calls]
    found: dict[fx.Node, int] = {}
    matcher = difflib.SequenceMatcher(None, cuts.keys, own, autojunk=False)
    for there, here, count in matcher.get_matching_blocks():
        found.update((calls[here + i], cuts.at[there + i]) for i in range(count))
    modules: dict[str, int] = {}
    for (module, _), worker in zip(cuts.keys, cuts.at, strict=True):
        modules.setdefault(module, worker)
    limits: list[int] = []  # the worker of the next call that has its like in training
    limit = cuts.workers - 1
    for node in reversed(graph.calls):
        limit = found.get(node, limit)
        limits.append(limit)
    made: dict[fx.Node, int] = {}
    last = 0
    for node, limit in zip(graph.calls, reversed(limits), strict=True):
        last = found.get(node, last)
        worker = found.get(node, min(max(modules.get(_module_of(node), last), last), limit))
        if is_getitem(node):  # a tuple never crosses workers, its elements do
            worker = made[node.all_input_nodes[0]]
        made[node] = max([worker, *(made[n] for n in node.all_input_nodes if n in made and not _is_size(n))])
    return made


def _is_size(node: fx.Node) -> bool:
    """Whether the node is arithmetic on sizes: its value is no tensor, and every stage computes it for itself."""
    return node.op == "call_function" and isinstance(
        node.meta.get("val"), (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)
    )


def _is_source(node: fx.Node, graph: _Graph, sources: set[fx.Node]) -> bool:
    """Whether the node is made cheaply from weights, sizes or nothing: every stage that reads it computes it."""
    if node.op == "get_attr":
        return True
    if _is_size(node) or isinstance(node.meta.get("val"), (tuple, list)) or not is_cheap(node):
        return False
    return all(n in sources or n in graph.held or _is_size(n) for n in node.all_input_nodes)


@dataclass
class _Link:
    """One stage of the chain: what comes in, what it computes, what goes out."""

    worker: int
    count: int
    arrives: list[fx.Node]
    leaves: list[fx.Node]
    calls: list[fx.Node]
    made_at: Mapping[fx.Node, int]
    boundary_names: Mapping[fx.Node, str]
    sizes: dict[fx.Node, tuple[fx.Node, int]] = field(default_factory=dict)

    def ports(self, graph: _Graph, side: Literal["in", "out"]) -> tuple[Port, ...]:
        nodes = self.arrives if side == "in" else self.leaves
        boundary = self.worker + (side == "out")  # boundary k lies before stage k
        made = []
        for i, node in enumerate(nodes):
            kind: PortKind
            if boundary == self.count:
                name, kind = graph.outputs[i][0], "output"
            elif boundary == 0:
                name, kind = graph.names[node], "input"
            else:
                passed = boundary - 1 - self.made_at.get(node, -1)
                name = self.boundary_names[node] + (f".{passed}" if passed else "")
                kind = "passed" if passed else "activation"
            made.append(Port(name, kind, str(node.meta["val"].dtype).removeprefix("torch."), graph.shape(node)))
        return tuple(made)


def _chain(graph: _Graph, cuts: _Cuts) -> list[_Link]:
    """The stages, found from the last one back: what it needs and does not make, the one before must give it."""
    at = _workers(graph, cuts)
    sources: set[fx.Node] = set()
    for node in graph.calls:
        if _is_source(node, graph, sources):
            sources.add(node)
    order = {node: i for i, node in enumerate([*graph.inputs, *graph.calls])}
    ends = [*(graph.names[n] for n in (*graph.inputs, *graph.held)), *(name for name, _ in graph.outputs)]
    crossing = [n for n in graph.calls if not _is_size(n)]
    names = dict(zip(crossing, _distinct([_value_name(n) for n in crossing], ends), strict=True))
    names |= {n: graph.names[n] for n in graph.inputs}
    chain: list[_Link] = []
    wanted = [node for _, node in graph.outputs]
    for k in reversed(range(cuts.workers)):
        arrives: set[fx.Node] = set()
        local: set[fx.Node] = set()
        sizes: set[fx.Node] = set()
        stack = [*wanted, *(n for n in graph.calls if at[n] == k and n not in sources and not _is_size(n))]
        while stack:
            node = stack.pop()
            if node in local or node in arrives or node in graph.held:
                continue
            if _is_size(node):
                sizes.add(node)
            elif node in sources or at.get(node, -1) == k:
                local.add(node)
                stack += node.all_input_nodes
            else:
                arrives.add(node)
        substitutes = _resolve(sizes, local, arrives, graph, k)
        if k == 0:
            arrives |= set(graph.inputs)
        ordered = sorted(arrives, key=order.__getitem__)
        made = [n for n in graph.calls if n in local or (n in sizes and n not in substitutes)]
        chain.append(_Link(k, cuts.workers, ordered, wanted, made, at, names, substitutes))
        wanted = ordered
    return chain[::-1]


def _value_name(node: fx.Node) -> str:
    """`blocks.2/add`: what a value that crosses workers is called."""
    path = _module_of(node)
    return (f"{path}/" if path else "") + str(getattr(node.target, "_opname", node.name))


def _resolve(
    sizes: set[fx.Node], local: set[fx.Node], arrives: set[fx.Node], graph: _Graph, k: int
) -> dict[fx.Node, tuple[fx.Node, int]]:
    """For every size that a stage reads, a tensor of its own to read it from; adds to `sizes` and `arrives`."""
    found: dict[fx.Node, tuple[fx.Node, int]] = {}
    stack = sorted(sizes, key=lambda n: n.name)
    sizes.clear()
    while stack:
        node = stack.pop()
        if node in sizes:
            continue
        sizes.add(node)
        tensors = [n for n in node.all_input_nodes if not _is_size(n)]
        if not tensors:
            stack += node.all_input_nodes
            continue
        if all(n in local or n in graph.held or n in arrives for n in tensors):
            continue
        text = str(node.meta["val"])
        choices = [*sorted(arrives, key=lambda n: n.name), *graph.inputs]
        place = next(((n, i) for n in choices for i, d in enumerate(n.meta["val"].shape) if str(d) == text), None)
        if place is None:
            arrives.update(n for n in tensors if n not in local)
        else:
            found[node] = place
            arrives.add(place[0])
    return found


# ---- a stage as an exported program, and its file ----


def _program(graph: _Graph, link: _Link) -> tuple[ExportedProgram, dict[str, torch.Tensor]]:
    """A stage, with the weights as its first inputs; and these under their own names."""
    new = fx.Graph()
    root = nn.Module()
    mapped: dict[fx.Node, fx.Node] = {}
    read = {n for node in link.calls for n in node.all_input_nodes} | set(link.leaves)
    constants: dict[str, Any] = {}
    held: dict[str, torch.Tensor] = {}
    first: dict[tuple[Any, ...], fx.Node] = {}
    specs: list[InputSpec] = []
    weights = [n for n in graph.held if n in read]
    folded = [n for n in weights if _own_constant(graph, n)]
    for node in [*folded, *(n for n in weights if n not in folded), *link.arrives]:
        tensor = graph.held.get(node)
        if tensor is not None and node not in folded:
            memory = _memory(tensor)
            if memory in first:  # tied
                mapped[node] = mapped[first[memory]]
                continue
            first[memory] = node
        mapped[node] = new.placeholder(re.sub(r"\W", "_", node.name))
        mapped[node].meta = {"val": node.meta["val"]}
        argument = TensorArgument(name=mapped[node].name)
        if node in folded:
            assert tensor is not None
            constants[mapped[node].name] = tensor
            specs.append(InputSpec(InputKind.CONSTANT_TENSOR, argument, mapped[node].name))
            continue
        specs.append(InputSpec(InputKind.USER_INPUT, argument, None))
        if tensor is not None:
            held[graph.names[node]] = tensor
    for node, (tensor_node, dimension) in link.sizes.items():
        mapped[node] = new.call_function(aten.sym_size.int, (mapped[tensor_node], dimension))
        mapped[node].meta = {"val": node.meta["val"]}
    for node in link.calls:
        if node.op == "get_attr":
            setattr(root, str(node.target), getattr(graph.program.graph_module, str(node.target)))
        mapped[node] = new.node_copy(node, mapped.__getitem__)
    results = [mapped[n] for n in link.leaves]
    new.output(tuple(results))
    module = fx.GraphModule(root, new)
    inputs = sum(spec.kind == InputKind.USER_INPUT for spec in specs)
    _, in_spec = pytree.tree_flatten((tuple(range(inputs)), {}))
    _, out_spec = pytree.tree_flatten(tuple(range(len(results))))
    program = ExportedProgram(
        root=module,
        graph=new,
        graph_signature=ExportGraphSignature(
            input_specs=specs,
            output_specs=[OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(name=n.name), None) for n in results],
        ),
        state_dict={},
        range_constraints=dict(graph.program.range_constraints),
        module_call_graph=[ModuleCallEntry("", ModuleCallSignature([], [], in_spec, out_spec))],
        constants=constants,
        verifiers=graph.program.verifiers,
    )
    return program, held


def _own_constant(graph: _Graph, node: fx.Node) -> bool:
    """Whether it is a small constant that export found: no parameter and no buffer."""
    signature = graph.program.graph_signature
    return node.name in signature.inputs_to_lifted_tensor_constants and graph.held[node].numel() <= SMALL


def _name_dimensions(proto: onnx.ModelProto, graph: _Graph) -> None:
    """The open dimension under its name, wherever the exporter wrote its symbol."""
    for value in (*proto.graph.input, *proto.graph.output, *proto.graph.value_info):
        for dimension in value.type.tensor_type.shape.dim:
            if dimension.HasField("dim_param"):
                dimension.dim_param = graph.dimension(dimension.dim_param)


def _save(
    proto: onnx.ModelProto, held: Mapping[str, torch.Tensor], path: Path, external: bool
) -> tuple[tuple[str, ...], int]:
    """Write the model, its first inputs turned into initializers; the names of its files, and the weights' bytes."""
    kept = [value for value in proto.graph.input if value.name not in held]
    del proto.graph.input[:]
    proto.graph.input.extend(kept)
    size = sum(t.numel() * t.element_size() for t in held.values())
    external = bool(held) and (external or size + proto.ByteSize() > INLINE)
    data = path.with_name(path.name + ".data")
    with open(data, "wb") if external else contextlib.nullcontext() as file:
        for name, tensor in held.items():
            made = proto.graph.initializer.add(
                name=name, dims=tensor.shape, data_type=ir.tensor(tensor.new_zeros(())).dtype.value
            )
            raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            if file is None:
                made.raw_data = raw
                continue
            file.write(b"\0" * (-file.tell() % 4096))  # runtimes map the file: pages
            made.data_location = onnx.TensorProto.EXTERNAL
            for key, value in (("location", data.name), ("offset", file.tell()), ("length", len(raw))):
                made.external_data.add(key=key, value=str(value))
            file.write(raw)
    path.write_bytes(proto.SerializeToString())
    return (path.name, data.name) if external else (path.name,), size


# ---- the check ----


def _session(path: Path) -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        raise ExportError(
            "an export is always checked in onnxruntime, which is not installed", hint="pip install onnxruntime"
        ) from error
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = torch.get_num_threads()
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        lacks = "its CPU kernels, with which exports are checked, lack a type: export the model in float32"
        hint = lacks if "NOT_IMPLEMENTED" in str(error) else None
        raise ExportError(f"onnxruntime does not take it: {_first_line(error)}", where=path.name, hint=hint) from error


def _array(tensor: torch.Tensor) -> Any:
    if tensor.dtype != torch.bfloat16:
        return tensor.contiguous().numpy()
    import ml_dtypes

    return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)


def _difference(value: Any, right: torch.Tensor) -> float:
    """The norm of the difference over that of what is right; infinite where infinities or NaN do not coincide."""
    wanted = right.detach().to(torch.complex128 if right.is_complex() else torch.float64)
    got = torch.from_numpy(value.astype("complex128" if right.is_complex() else "float64"))
    if got.shape != wanted.shape:
        return float("inf")
    odd = ~torch.isfinite(wanted)
    if not torch.equal(torch.isfinite(got), ~odd) or not torch.equal(
        got[odd].nan_to_num(nan=0.5), wanted[odd].nan_to_num(nan=0.5)
    ):
        return float("inf")
    got, wanted = got.masked_fill(odd, 0), wanted.masked_fill(odd, 0)
    norm, off = float(wanted.norm()), float((got - wanted).norm())
    return off / norm if norm else off


@contextlib.contextmanager
def _buffers_kept(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Gives a function that puts the model's buffers back; called at the end in any case."""
    kept = [
        (module, name, tensor, tensor.clone())
        for module in model.modules()
        for name, tensor in module._buffers.items()
        if tensor is not None
    ]

    def restore() -> None:
        for module, name, tensor, value in kept:
            module._buffers[name] = tensor
            if not torch.equal(tensor, value):
                tensor.copy_(value)

    try:
        yield restore
    finally:
        restore()


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Without what torch.export logs and prints of errors that are raised to us, and explained, anyway."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(level)

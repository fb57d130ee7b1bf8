"""Reads the traced joint graph into a Program: flat, nodes named after modules, each with its record, and the tables.

torch's descriptors (`meta["desc"]`) say what an input or output is, `partitioner_tag` whether a node is of the forward;
`seq_nr` leads from a backward node to the origin of its forward node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.fx.node import map_aggregate

from fxpipe import user_lines
from fxpipe.device_copies import LACKS_FLOAT64, WITHOUT_FLOAT64, too_wide
from fxpipe.errors import CaptureError, listed
from fxpipe.ir.aten import true_value, viewed
from fxpipe.ir.program import (
    INFO,
    BatchInput,
    Buffer,
    Level,
    NodeInfo,
    Output,
    Parameter,
    Program,
    info,
    value,
)
from fxpipe.plan.spec import Phase
from fxpipe.torch_private import append_copy, operator_name, pytree, rename, with_effects
from fxpipe.tracing import origin
from fxpipe.tracing.held_tensors import HeldTensors, changed_in_place
from fxpipe.tracing.refusals import within_backward

NO_GRADIENT = "gets no gradient"
_CAST = torch.ops.aten._to_copy.default
_EFFECTS = ("ForwardTokenAOTOutput", "BackwardTokenAOTOutput")  # outputs that order side effects


class Traced(NamedTuple):
    """The joint graph, and what became of the tensors the step has replaced.

    `replaced`: their rows, in the order of the outputs after the loss; `lost`: rows whose new value has another shape
    or dtype, or is not a tensor. `metrics`: the names of the outputs after those. `evaluates`: it is an evaluation,
    which has no loss. `own_backward`: as in `Program`. `met`: the lines of tensors that hooks reach, by id.
    """

    graph_module: fx.GraphModule
    replaced: tuple[int, ...]
    lost: tuple[int, ...]
    warnings: tuple[str, ...]
    metrics: tuple[str, ...]
    evaluates: bool = False
    own_backward: str = ""
    met: Mapping[int, str | None] = {}


class Reader:
    """Turns the traced graph into a Program: flat, named after modules, each node with its record."""

    def __init__(
        self, traced: Traced, tensors: HeldTensors, leaves: Sequence[Any], inputs: Sequence[torch.Tensor]
    ) -> None:
        self.traced = traced
        self.tensors = tensors
        self.leaves = leaves
        self.inputs = inputs
        self.graph = fx.Graph()
        self.mapped: dict[fx.Node, fx.Node] = {}
        self.values: dict[str, torch.Tensor] = {}
        self.example: dict[str, torch.Tensor] = {}
        self.constants: list[Buffer] = []
        self.warnings: list[str] = list(traced.warnings)
        if tensors.unsaved and not traced.evaluates:
            names = listed(tensors.unsaved, 4)
            self.warnings.append(f"files of weights leave out {names}, which state_dict() makes anew at each call")
        self.tangents: list[fx.Node] = []
        self.tokens: set[fx.Node] = set()
        self.casts: dict[fx.Node, dict[Any, fx.Node]] = {}  # by a parameter's cast, its copies by module and region

    def program(self, batch_spec: str, device: str, autocast: str | None) -> Program:
        nodes = list(self.traced.graph_module.graph.nodes)
        slots = self._placeholders(nodes)
        forward = {n for n in nodes if n.meta.get("partitioner_tag") != "is_backward"}
        origins = self._forward_origins(nodes, forward)
        cast = {slots[row] for row in self.tensors.cast}
        self.casts = {n: {} for n in nodes if n in forward and n.target is _CAST and n.args[0] in cast and _is_ours(n)}
        for node in nodes:
            if device in WITHOUT_FLOAT64 and too_wide(node.meta.get("val")):
                what = f"the step computes with {LACKS_FLOAT64.format(device.upper())}"
                raise CaptureError(what, where=_line(node), hint="compute in float32", page="devices")
            if node in self.casts or self._is_effect(node):
                continue
            if node.op == "call_function":
                self._call(node, "F" if node in forward else "B", origins)
            elif node.op == "get_attr":
                self._constant(node)
            elif node.op not in ("placeholder", "output"):
                raise CaptureError(f"capture met a {node.op} node, {node}", hint=origin.version_hint())
        count = len(self.tensors.values)
        while self.tangents:
            self._tangent(self.tangents.pop())
        self._cast_others(origins)
        caches = self._caches(slots)
        outputs = self._outputs(nodes[-1], slots)
        parameters, buffers = [], []
        for i, names in enumerate(self.tensors.names):
            placeholder = self.mapped[slots[i]]
            node_name = placeholder.name
            saved = self.tensors.saved[i]
            if i in caches or (i >= self.tensors.registered and not placeholder.users and not saved):
                self.graph.erase_node(placeholder)  # an attribute that the step does not read
                del self.values[node_name]
            elif i >= self.tensors.registered and self.tensors.values[i].is_meta and not self.tensors.hangs(i):
                raise CaptureError(
                    f"the step reads {names[0]}, which was made from a parameter that has no value (--meta)",
                    hint="compute it in forward",
                )
            elif i < self.tensors.parameters:
                trained = any(o.kind == "gradient" and o.target == node_name for o in outputs)
                if self.tensors.values[i].requires_grad and not trained and not self.traced.evaluates:
                    self.warnings.append(f"parameter {names[0]} {NO_GRADIENT}: it keeps its value")
                parameters.append(Parameter(node_name, names, trained, saved, self.tensors.packed.get(i, "")))
            else:
                if i >= self.tensors.registered and self.tensors.values[i].requires_grad:
                    self.warnings.append(f"{names[0]} is a parameter that no module registers: it keeps its value")
                if placeholder.users:
                    self._refuse_view(self.tensors.values[i], names[0], _line(next(iter(slots[i].users))))
                buffers.append(Buffer(node_name, names, saved))
        batch, batch_placeholders = [], iter(slots[count:])
        for leaf in self.leaves:
            if leaf.tensor is None:
                batch.append(BatchInput(None, leaf))
                continue
            node = self.mapped[next(batch_placeholders)]
            batch.append(BatchInput(node.name, replace(leaf, read=bool(node.users))))
        return Program(
            graph=self.graph,
            level=Level.CAPTURED,
            parameters=tuple(parameters),
            buffers=(*buffers, *self.constants),
            batch=tuple(batch),
            outputs=tuple(outputs),
            values=self.values,
            example=self.example,
            batch_spec=batch_spec,
            device=device,
            autocast=autocast,
            params=self.tensors.params,
            warnings=tuple(self.warnings),
            own_backward=self.traced.own_backward,
        )

    def _placeholders(self, nodes: Sequence[fx.Node]) -> list[fx.Node]:
        """The traced placeholders by input index; makes ours, in the order parameters, buffers, batch."""
        by_index: dict[int, fx.Node] = {}
        tangents = []
        for node in nodes:
            if node.op != "placeholder":
                continue
            kind = type(node.meta.get("desc")).__name__
            if kind == "PlainAOTInput":
                by_index[node.meta["desc"].idx] = node
            elif kind == "TangentAOTInput":
                tangents.append(node)
        names = [n[0] for n in self.tensors.names] + [leaf.name for leaf in self.leaves if leaf.tensor]
        missing = [name for i, name in enumerate(names) if i not in by_index]
        if missing:
            raise CaptureError(
                f"{', '.join(missing)} share memory with each other, and the step changes some of it in place",
                hint="give each buffer separate memory: .clone() it before register_buffer",
            )
        slots = [by_index[i] for i in range(len(by_index))]
        for i, (node, name) in enumerate(zip(slots, names, strict=True)):
            placeholder = self.graph.placeholder(origin.identifier(name))
            placeholder.target = placeholder.name  # two names may make one identifier
            placeholder.meta["val"] = node.meta["val"]
            self.mapped[node] = placeholder
            if i < len(self.tensors.values):
                self.values[placeholder.name] = self.tensors.inputs[i].detach()
            else:
                self.example[placeholder.name] = self.inputs[i - len(self.tensors.values)]
        self.tangents = tangents
        return slots

    def _caches(self, slots: Sequence[fx.Node]) -> tuple[int, ...]:
        """The rows that the step replaces by another shape, without reading them: the program leaves them out.

        It is refused if it reads one, or one is saved with the weights.
        """
        what = "metrics(model, batch)" if self.traced.evaluates else "the step"
        for row in self.traced.lost:
            saved = self.tensors.saved[row] and not self.traced.evaluates
            if saved or self.mapped[slots[row]].users:
                raise CaptureError(
                    f"{what} replaces {self.tensors.names[row][0]} by something of another shape or dtype",
                    hint="a build holds one shape: give the tensor its final shape and dtype from the start; if the "
                    "first call fills it, call the model once in model()",
                )
            if row < self.tensors.registered:
                self.warnings.append(
                    f"{what} replaces {self.tensors.names[row][0]} by something of another shape, without reading "
                    f"it: it does so {'for every batch' if self.traced.evaluates else 'in every step'}, and the buffer "
                    "is not kept"
                )
        return self.traced.lost

    def _tangent(self, node: fx.Node) -> None:
        """The gradient of the loss with respect to itself: the constant 1."""
        fake = node.meta["val"]
        call, like = torch.ops.aten.ones.default, {"dtype": fake.dtype, "device": torch.device(fake.device.type)}
        ones = self.graph.create_node("call_function", call, (list(fake.shape),), like, name="d_loss")
        ones.meta["val"] = fake
        ones.meta[INFO] = NodeInfo("B")
        self.mapped[node] = ones

    def _forward_origins(self, nodes: Sequence[fx.Node], forward: set[fx.Node]) -> dict[int, origin.Origin]:
        """Origin by seq_nr, from the last forward node of each autograd node."""
        origins: dict[int, origin.Origin] = {}
        for node in nodes:
            if node in forward and node.op == "call_function" and "seq_nr" in node.meta:
                origins.setdefault(node.meta["seq_nr"], origin.of(node.meta))
        return origins

    def _call(self, node: fx.Node, phase: Phase, origins: dict[int, origin.Origin]) -> None:
        node_origin = origin.Origin()
        if phase == "B" and self.tangents:  # the first of them
            self._cast_others(origins)
            while self.tangents:
                self._tangent(self.tangents.pop())
        if phase == "F":
            node_origin = origin.of(node.meta)
        elif not node.meta.get("is_gradient_acc") and node.meta.get("seq_nr") in origins:
            node_origin = origins[node.meta["seq_nr"]]
        for cast in node.all_input_nodes if phase == "F" else ():
            if cast in self.casts:
                self._cast(cast, node_origin, origins)
        call = append_copy(self.graph, node, self.mapped.__getitem__)
        self._rename(call, phase, node_origin.module)
        _strip_device_index(call)
        source = f"{user_lines.short(node_origin.file)}:{node_origin.line}" if node_origin.file else None
        call.meta = {"val": true_value(call, node.meta.get("val")), "seq_nr": node.meta.get("seq_nr")}
        call.meta[INFO] = NodeInfo(
            phase,
            module=node_origin.module,
            source=source,
            text=user_lines.text(node_origin.file, node_origin.line) if node_origin.file else "",
            region=node_origin.region,
            marks=node_origin.marks,
        )
        if node.meta.get("is_gradient_acc"):
            call.meta["accumulates"] = True
        self.mapped[node] = call

    def _cast(self, cast: fx.Node, reader: origin.Origin, origins: dict[int, origin.Origin]) -> None:
        """Cast a parameter once for each module that computes with it: each may be on another worker."""
        by_reader, key = self.casts[cast], (reader.module, reader.region)
        if key not in by_reader:
            cast.meta["custom"] = {origin.KEY: reader}
            self._call(cast, "F", origins)
            if not by_reader:
                origins[cast.meta.get("seq_nr", -1)] = reader
            by_reader[key] = self.mapped[cast]
        self.mapped[cast] = by_reader[key]

    def _cast_others(self, origins: dict[int, origin.Origin]) -> None:
        """Cast those that no forward node reads, but backward or an output does."""
        for cast in [c for c, by_reader in self.casts.items() if not by_reader and c.users]:
            self._cast(cast, origin.Origin(), origins)

    def _rename(self, node: fx.Node, phase: Phase, module: str) -> None:
        target = node.target
        base = operator_name(target) or str(getattr(target, "__name__", "value"))
        stem = origin.identifier(f"{module}.{base}" if module else base)
        rename(node, ("d_" if phase == "B" else "") + stem)

    def _is_effect(self, node: fx.Node) -> bool:
        """Whether a node only carries or orders side effects, or marks a time: torch threads a token through operators
        that check, and marks for profilers what it runs."""
        if getattr(node.target, "namespace", None) == "profiler":
            return True
        if node.target is with_effects:
            operator = node.args[1]
            if operator is not torch.ops.aten._linalg_check_errors.default:
                raise CaptureError(
                    f"the step calls {operator}, which has side effects", hint="leave it out of the step"
                )
            self.tokens.add(node)
        elif node.op == "call_function" and node.args and node.args[0] in self.tokens:
            self.tokens.add(node)
        return node in self.tokens

    def _constant(self, node: fx.Node) -> None:
        constant: Any = self.traced.graph_module
        for attribute in str(node.target).split("."):
            constant = getattr(constant, attribute)
        if not isinstance(constant, torch.Tensor):
            raise CaptureError(
                f"the step uses {node.target}, a {type(constant).__name__} inside the graph (a higher-order operator)",
                hint="torch.cond, scan, flex_attention and similar operators cannot be cut; use plain attention and "
                "loops",
            )
        if constant.is_meta:
            raise CaptureError(
                f"the step makes a constant of {self._named(constant)}, which has no value (--meta)",
                hint="reach parameters through the model that loss(model, batch) gets",
            )
        where = _line(next(iter(node.users), node))
        if all(user.meta.get("partitioner_tag") == "is_backward" for user in node.users):
            within_backward(self.tensors.parameter_in(constant), where)
        self._refuse_view(constant, "a tensor from outside the model", where)
        before = [n for n in self.graph.nodes if n.op == "placeholder"]  # all come before the calls
        with self.graph.inserting_after(before[-1] if before else None):
            placeholder = self.graph.placeholder(origin.identifier(f"constant_{len(self.constants)}"))
        placeholder.meta["val"] = node.meta.get("val", constant)
        self.values[placeholder.name] = constant.detach()
        self.constants.append(Buffer(placeholder.name, (placeholder.name,), constant=True))
        self.mapped[node] = placeholder

    def _refuse_view(self, tensor: torch.Tensor, name: str, where: str | None) -> None:
        """Refuse a view of a parameter that was made before the step: it would not follow the optimizer."""
        parameter = self.tensors.parameter_in(tensor)
        if parameter is not None:
            raise CaptureError(
                f"{name} shares the memory of parameter {parameter}: capture would freeze its values",
                where=where,
                hint="reach the parameter through the model within the step, and view it there: self.layer.weight.t(), "
                "or .detach() where no gradient should pass",
            )

    def _named(self, tensor: torch.Tensor) -> str:
        """The name of a tensor of the model, if it has one."""
        pairs = zip(self.tensors.names, self.tensors.values, strict=True)
        return next((f"parameter {n[0]}" for n, v in pairs if v is tensor), "a parameter")

    def _outputs(self, node: fx.Node, slots: Sequence[fx.Node]) -> list[Output]:
        outputs: list[Output] = []
        nodes: list[fx.Node] = []
        batch_start = len(self.tensors.values)
        replaced, first = self.traced.replaced, 0 if self.traced.evaluates else 1  # new values come after the loss
        for output_node, desc in zip(pytree.tree_leaves(node.args[0]), node.meta["desc"], strict=True):
            kind = type(desc).__name__
            if output_node is None or not isinstance(output_node, fx.Node) or kind in _EFFECTS:
                continue
            if kind == "PlainAOTOutput" and (place := desc.idx - first) < 0:
                outputs.append(Output("loss"))
            elif kind == "PlainAOTOutput" and place >= len(replaced):
                computed = _without_copies(output_node)
                if viewed(computed).op == "call_function":  # not in a weight's memory
                    output_node = computed
                outputs.append(Output("metric", self.traced.metrics[place - len(replaced)]))
            elif kind == "PlainAOTOutput":
                row = replaced[place]
                if row >= self.tensors.registered and not self.mapped[slots[row]].users:
                    continue  # kept for the user to look at (`self.attention = …`): not state
                output_node = _without_copies(output_node)
                outputs.append(Output("buffer", self.mapped[slots[row]].name))
            elif kind == "GradAOTOutput":
                index = desc.grad_of.idx
                if index >= self.tensors.parameters:
                    continue  # the step itself asked for the gradient of its batch
                if value(output_node).layout != torch.strided:
                    raise CaptureError(
                        f"the gradient of {self.tensors.names[index][0]} is sparse, which a pipeline cannot send",
                        hint="build the embedding with sparse=False",
                        page="tensor-kinds",
                    )
                outputs.append(Output("gradient", self.mapped[slots[index]].name))
            elif kind == "InputMutationAOTOutput":
                index = desc.mutated_input.idx
                if index in replaced:
                    continue  # changed in place, then replaced
                if index >= batch_start:
                    self.warnings.append("the step changes its batch in place; the change stays inside the step")
                    continue
                if index < self.tensors.parameters:
                    raise changed_in_place(self.tensors.names[index][0], _line(output_node))
                outputs.append(Output("buffer", self.mapped[slots[index]].name))
                if not self.traced.evaluates and info(self.mapped[output_node]).region is not None:
                    self.warnings.append(
                        f"buffer {self.tensors.names[index][0]} changes inside a torch.utils.checkpoint region: it is "
                        "updated once a step; eager PyTorch updates it again when it recomputes the region"
                    )
            else:
                raise CaptureError(f"capture met an output of kind {kind}", hint=origin.version_hint())
            nodes.append(self.mapped[output_node])
        result = self.graph.output(tuple(nodes))
        result.meta["val"] = tuple(value(n) for n in nodes)
        return outputs


def frozen_updates(traced: Traced, tensors: HeldTensors) -> set[str]:
    """The names of parameters without gradient that the step changes in place: state that no optimizer trains."""
    (output,) = traced.graph_module.graph.find_nodes(op="output")
    changes = [desc for desc in output.meta["desc"] if type(desc).__name__ == "InputMutationAOTOutput"]
    changed = [desc.mutated_input.idx for desc in changes]
    rows = [row for row in changed if row < tensors.parameters and not tensors.values[row].requires_grad]
    return {name for row in rows for name in tensors.names[row]}


def _is_ours(node: fx.Node) -> bool:
    """Whether a call was made before the user's step began."""
    return origin.of(node.meta) == origin.Origin()


def _line(node: fx.Node) -> str | None:
    """The user's line that computed a node, as text."""
    node_origin = origin.of(node.meta)
    return user_lines.place(node_origin.file, node_origin.line) if node_origin.file else None


def _without_copies(node: fx.Node) -> fx.Node:
    """The computed value that a node copies; a copy at the step's end would tie its beginning to its end."""
    copied = node
    while copied.target in (torch.ops.aten.clone.default, torch.ops.aten.detach.default):
        copied = copied.all_input_nodes[0]
    return copied if copied.op == "call_function" else node


def _strip_device_index(node: fx.Node) -> None:
    """`cuda:0` becomes `cuda`, the worker's current device: the code must run on any of them."""

    def strip(arg: Any) -> Any:
        return torch.device(arg.type) if isinstance(arg, torch.device) else arg

    node.args = map_aggregate(node.args, strip)
    node.kwargs = map_aggregate(node.kwargs, strip)

"""Capture: an ordinary training step becomes one joint graph of forward, loss and backward.

The one file that touches torch's private tracing API, `aot_export_joint_with_descriptors`. It traces the eager module
(never an exported one, which loses the backward of a custom autograd.Function). The model's tensors are handed in as
plain inputs, each storage once: a tied parameter is one input, autograd itself sums its gradients, and a buffer shared
by two modules is updated in order.

When torch changes that API: what is needed of it is a functional ATen graph of `(loss, gradients)` with mutated inputs
as outputs, every input and output told apart (`meta["desc"]`), forward and backward nodes told apart
(`meta["partitioner_tag"]`), a backward node's forward node (`meta["seq_nr"]`), and `current_meta["custom"]` copied
to each node.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch import fx, nn
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch.utils import _pytree as pytree

from fxpipe import origin
from fxpipe.batch import describe, tensor_spec
from fxpipe.errors import CaptureError, FxpipeError
from fxpipe.plan import Phase
from fxpipe.program import (
    INFO,
    BatchInput,
    Buffer,
    Level,
    NodeInfo,
    Output,
    Parameter,
    Program,
    value,
)

Loss = Callable[[nn.Module, Any], torch.Tensor]
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def capture(model: nn.Module, loss: Loss, batch: Any, *, autocast: str | None = None) -> Program:
    """The joint graph of `loss(model, batch)` and its gradients, at level CAPTURED.

    Args:
        model: any module, in train mode (its submodules as the user left them); it is not changed.
        loss: gives a scalar tensor.
        batch: a pytree of tensors and plain constants; its shapes are the build's shapes.
        autocast: 'bf16' to run the step under torch.autocast.

    Raises:
        CaptureError: with the user's line, when the step cannot be one graph.
        BatchError: the batch is not a pytree of tensors.
    """
    if not model.training:
        model.train()
    leaves, batch_values, spec = describe(batch)
    tensors = _Tensors(model)
    if not tensors.trained:
        raise CaptureError("no parameter of the model requires a gradient", hint="there is nothing to train")
    # Each leaf gets memory of its own: labels that alias the inputs must not be traced as one tensor.
    inputs = [v.detach().clone() for v in batch_values if isinstance(v, torch.Tensor)]
    laid_out = iter(inputs)
    leaves = [replace(leaf, tensor=tensor_spec(next(laid_out))) if leaf.tensor else leaf for leaf in leaves]
    device = _one_device([*tensors.values, *inputs])
    traced = _trace(model, loss, spec, batch_values, tensors, inputs, device, autocast)
    return _Reader(traced, tensors, leaves, inputs).program(pytree.treespec_dumps(spec), device, autocast)


class _Tensors:
    """The model's parameters and buffers, each storage once, with all of its names."""

    def __init__(self, model: nn.Module) -> None:
        self.names: list[tuple[str, ...]] = []
        self.values: list[torch.Tensor] = []
        self.parameters = 0
        rows: dict[Any, int] = {}
        for group in (model.named_parameters, model.named_buffers):
            for name, tensor in group(remove_duplicate=False):
                if isinstance(tensor, (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer)):
                    raise CaptureError(
                        f"{name} is lazy: it has no shape yet",
                        hint="run the model once on a batch inside model(), so that its lazy modules are initialised",
                    )
                key = _identity(tensor)
                if key in rows:
                    self.names[rows[key]] += (name,)
                    continue
                rows[key] = len(self.values)
                self.names.append((name,))
                self.values.append(tensor)
            if group == model.named_parameters:
                self.parameters = len(self.values)
        self._refuse_overlaps()
        persistent = set(model.state_dict(keep_vars=True))
        self.persistent = [any(n in persistent for n in names) for names in self.names]

    @property
    def trained(self) -> list[bool]:
        return [v.requires_grad for v in self.values[: self.parameters] if v.requires_grad]

    def _refuse_overlaps(self) -> None:
        owners: dict[int, str] = {}
        for names, tensor in zip(self.names[: self.parameters], self.values, strict=False):
            if tensor.numel() == 0:
                continue
            other = owners.setdefault(tensor.untyped_storage().data_ptr(), names[0])
            if other != names[0]:
                raise CaptureError(
                    f"parameters {other} and {names[0]} are different views of the same memory",
                    hint="tie them as one nn.Parameter, or give each memory of its own",
                )


def _identity(tensor: torch.Tensor) -> Any:
    """Equal for tensors that are the same memory, seen the same way."""
    if tensor.numel() == 0 or tensor.device.type == "meta":
        return id(tensor)
    return (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()))


def _one_device(tensors: Sequence[torch.Tensor]) -> str:
    devices = {t.device.type for t in tensors}
    if len(devices) > 1:
        raise CaptureError(
            f"the model and the batch lie on different devices: {', '.join(sorted(devices))}",
            hint="leave both on the CPU: run moves each worker's share to its device",
        )
    return devices.pop()


class _Bare(nn.Module):
    """A module without parameters around a function, since the tracer wants a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


class _Step(nn.Module):
    """The training step as a module, so that functional_call can reach the model's tensors."""

    def __init__(self, model: nn.Module, loss: Loss, unflatten: Callable[..., Any]) -> None:
        super().__init__()
        self.model = model
        self.loss = loss
        self.unflatten = unflatten

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        with origin.recording(self.model):
            return _scalar(self.loss(self.model, self.unflatten(inputs)), origin.definition(self.loss))


def _scalar(loss: Any, where: str | None) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor):
        raise CaptureError(
            f"loss(model, batch) returned {type(loss).__name__}, not a tensor",
            where=where,
            hint="return one scalar tensor",
        )
    if loss.numel() != 1 or loss.dim() > 0:
        raise CaptureError(
            f"loss(model, batch) returned a tensor of shape {list(loss.shape)}, not a scalar",
            where=where,
            hint="reduce it: .mean() or .sum()",
        )
    if not loss.requires_grad:
        raise CaptureError(
            "the loss does not depend on any parameter that requires a gradient",
            where=where,
            hint="look for .detach(), torch.no_grad() or .item() on the way to the loss",
        )
    return loss


def _trace(
    model: nn.Module,
    loss: Loss,
    spec: pytree.TreeSpec,
    batch_values: Sequence[Any],
    tensors: _Tensors,
    inputs: Sequence[torch.Tensor],
    device: str,
    autocast: str | None,
) -> fx.GraphModule:
    def unflatten(traced: Sequence[torch.Tensor]) -> Any:
        rest = iter(traced)
        return pytree.tree_unflatten([next(rest) if isinstance(v, torch.Tensor) else v for v in batch_values], spec)

    step = _Step(model, loss, unflatten)
    names = ["model." + n[0] for n in tensors.names]

    def function(*args: torch.Tensor) -> Any:
        given = dict(zip(names, args, strict=False))
        with _autocast(device, autocast):
            return torch.func.functional_call(step, given, args[len(names) :], tie_weights=True)

    args = (*tensors.values, *inputs)
    with contextlib.ExitStack() as stack, warnings.catch_warnings(), _tracing():
        warnings.simplefilter("ignore")  # the tracer's own; the user's came out when the model was made
        try:
            traced = aot_export_joint_with_descriptors(stack, _Bare(function), args)
        except FxpipeError:
            raise
        except Exception as error:
            raise _explain(error) from error
        module: fx.GraphModule = traced.graph_module
        return module


@contextlib.contextmanager
def _tracing() -> Iterator[None]:
    session = getattr(torch.compiler, "_compile_session_context", contextlib.nullcontext)
    rng = torch.get_rng_state()
    try:
        # Models ask is_compiling() to leave out data-dependent checks.
        with fx_traceback.preserve_node_meta(), session():
            yield
    finally:
        torch.set_rng_state(rng)


def _autocast(device: str, autocast: str | None) -> contextlib.AbstractContextManager[Any]:
    if autocast is None:
        return contextlib.nullcontext()
    return torch.autocast(device, AUTOCAST[autocast])


CAUSES = (
    (
        r"_local_scalar_dense|DataDependent|data-dependent|Could not guard|Could not extract|\.item\(\)|nonzero",
        "the step depends on the values of a tensor: one graph cannot hold `if tensor`, .item() or a shape from data",
        "compute both branches and choose with torch.where, or move the decision into train_data()",
    ),
    (
        r"numpy|\.numpy\(\)|SymInt.*numpy",
        "the step leaves torch for numpy",
        "use torch functions instead, or do it in train_data()",
    ),
    (
        r"sparse",
        "the step makes sparse gradients, which a pipeline cannot send",
        "build the embedding with sparse=False",
    ),
)


def _explain(error: Exception) -> CaptureError:
    said = f"{type(error).__name__}: {error}"
    where = origin.user_traceback(error)
    for pattern, cause, cure in CAUSES:
        if re.search(pattern, said):
            return CaptureError(cause, where=where, hint=cure)
    first = said.strip().splitlines()[0][:300]
    return CaptureError(
        f"tracing the step failed: {first}",
        where=where,
        hint="if the step runs in eager mode, this is something fxpipe cannot capture yet; " + origin.version_hint(),
    )


class _Reader:
    """Turns the traced graph into a Program: flat, named after modules, each node with its record."""

    def __init__(
        self, traced: fx.GraphModule, tensors: _Tensors, leaves: Sequence[Any], inputs: Sequence[torch.Tensor]
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
        self.warnings: list[str] = []
        self.tangents: list[fx.Node] = []

    def program(self, batch_spec: str, device: str, autocast: str | None) -> Program:
        nodes = list(self.traced.graph.nodes)
        slots = self._placeholders(nodes)
        forward = {n for n in nodes if n.meta.get("partitioner_tag") != "is_backward"}
        origins = self._forward_origins(nodes, forward)
        for node in nodes:
            if node.op == "call_function":
                self._call(node, "F" if node in forward else "B", origins)
            elif node.op == "get_attr":
                self._constant(node)
            elif node.op not in ("placeholder", "output"):
                raise CaptureError(f"capture met a {node.op} node, {node}", hint=origin.version_hint())
        count = len(self.tensors.values)
        outputs = self._outputs(nodes[-1], slots)
        parameters, buffers = [], []
        for i, names in enumerate(self.tensors.names):
            node_name = self.mapped[slots[i]].name
            if i < self.tensors.parameters:
                trained = any(o.kind == "gradient" and o.target == node_name for o in outputs)
                if self.tensors.values[i].requires_grad and not trained:
                    self.warnings.append(f"parameter {names[0]} gets no gradient: it is kept as it is")
                parameters.append(Parameter(node_name, names, trained))
            else:
                buffers.append(Buffer(node_name, names, self.tensors.persistent[i]))
        batch, rest = [], iter(slots[count:])
        for leaf in self.leaves:
            batch.append(BatchInput(self.mapped[next(rest)].name if leaf.tensor else None, leaf))
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
            warnings=tuple(self.warnings),
        )

    def _placeholders(self, nodes: Sequence[fx.Node]) -> list[fx.Node]:
        """The traced placeholders by input index; makes ours, in the order parameters, buffers, batch."""
        by_index: dict[int, fx.Node] = {}
        tangents = []
        for node in nodes:
            if node.op != "placeholder":
                continue
            index = getattr(node.meta.get("desc"), "idx", None)
            if index is None:
                tangents.append(node)
            else:
                by_index[index] = node
        slots = [by_index[i] for i in range(len(by_index))]
        names = [n[0] for n in self.tensors.names] + [leaf.name for leaf in self.leaves if leaf.tensor]
        for i, (node, name) in enumerate(zip(slots, names, strict=True)):
            made = self.graph.placeholder(identifier(name))
            made.meta["val"] = node.meta["val"]
            self.mapped[node] = made
            if i < len(self.tensors.values):
                self.values[made.name] = self.tensors.values[i].detach()
            else:
                self.example[made.name] = self.inputs[i - len(self.tensors.values)]
        self.tangents = tangents
        return slots

    def _tangent(self, node: fx.Node) -> None:
        """The gradient of the loss with respect to itself: the constant 1."""
        fake = node.meta["val"]
        made = self.graph.create_node(
            "call_function",
            torch.ops.aten.ones.default,
            (list(fake.shape),),
            {"dtype": fake.dtype, "device": torch.device(fake.device.type)},
            name="d_loss",
        )
        made.meta["val"] = fake
        made.meta[INFO] = NodeInfo("B")
        self.mapped[node] = made

    def _forward_origins(self, nodes: Sequence[fx.Node], forward: set[fx.Node]) -> dict[int, origin.Origin]:
        """Origin by seq_nr, from the last forward node of each autograd node."""
        found: dict[int, origin.Origin] = {}
        for node in nodes:
            if node in forward and node.op == "call_function" and "seq_nr" in node.meta:
                found.setdefault(node.meta["seq_nr"], origin.of(node.meta))
        return found

    def _call(self, node: fx.Node, phase: Phase, origins: dict[int, origin.Origin]) -> None:
        known = origin.Origin()
        if phase == "B":
            while self.tangents:
                self._tangent(self.tangents.pop())
        if phase == "F":
            known = origin.of(node.meta)
        elif not node.meta.get("is_gradient_acc") and node.meta.get("seq_nr") in origins:
            known = origins[node.meta["seq_nr"]]
        made = self.graph.node_copy(node, lambda n: self.mapped[n])
        self._rename(made, phase, known.module)
        _strip_device_index(made)
        source = f"{origin.short(known.file)}:{known.line}" if known.file else None
        made.meta = {"val": node.meta.get("val"), "seq_nr": node.meta.get("seq_nr")}
        made.meta[INFO] = NodeInfo(
            phase,
            module=known.module,
            source=source,
            text=origin.text(known.file, known.line) if known.file else "",
            region=known.region,
        )
        if node.meta.get("is_gradient_acc"):
            made.meta["accumulates"] = True
        self.mapped[node] = made

    def _rename(self, node: fx.Node, phase: Phase, module: str) -> None:
        target = node.target
        base = str(getattr(target, "_opname", None) or getattr(target, "__name__", "value"))
        stem = identifier(f"{module}.{base}" if module else base)
        node._rename(("d_" if phase == "B" else "") + stem)

    def _constant(self, node: fx.Node) -> None:
        found: Any = self.traced
        for attribute in str(node.target).split("."):
            found = getattr(found, attribute)
        if not isinstance(found, torch.Tensor):
            raise CaptureError(
                f"the step uses {node.target}, a {type(found).__name__} inside the graph (a higher-order operator)",
                hint="torch.cond, scan, flex_attention and their like cannot be cut; use plain attention and loops",
            )
        made = self.graph.placeholder(identifier(f"constant_{len(self.constants)}"))
        made.meta["val"] = node.meta.get("val", found)
        self.values[made.name] = found.detach()
        self.constants.append(Buffer(made.name, (made.name,), persistent=False, constant=True))
        self.mapped[node] = made

    def _outputs(self, node: fx.Node, slots: Sequence[fx.Node]) -> list[Output]:
        outputs: list[Output] = []
        nodes: list[fx.Node] = []
        batch_start = len(self.tensors.values)
        for made, desc in zip(pytree.tree_leaves(node.args[0]), node.meta["desc"], strict=True):
            kind = type(desc).__name__
            if made is None or not isinstance(made, fx.Node):
                continue
            if kind == "PlainAOTOutput":
                outputs.append(Output("loss"))
            elif kind == "GradAOTOutput":
                outputs.append(Output("gradient", self.mapped[slots[desc.grad_of.idx]].name))
            elif kind == "InputMutationAOTOutput":
                index = desc.mutated_input.idx
                if index >= batch_start:
                    self.warnings.append("the step changes its batch in place; the change stays inside the step")
                    continue
                if index < self.tensors.parameters:
                    raise CaptureError(
                        f"the step changes parameter {self.tensors.names[index][0]} in place",
                        hint="only the optimizer may change parameters; keep such a value in a buffer",
                    )
                outputs.append(Output("buffer", self.mapped[slots[index]].name))
            else:
                raise CaptureError(f"capture met an output of kind {kind}", hint=origin.version_hint())
            nodes.append(self.mapped[made])
        result = self.graph.output(tuple(nodes))
        result.meta["val"] = tuple(value(n) for n in nodes)
        return outputs


def _strip_device_index(node: fx.Node) -> None:
    """`cuda:0` becomes `cuda`, the worker's current device: the code must run on any of them."""

    def strip(arg: Any) -> Any:
        return torch.device(arg.type) if isinstance(arg, torch.device) else arg

    node.args = pytree.tree_map(strip, node.args)
    node.kwargs = pytree.tree_map(strip, node.kwargs)


def identifier(name: str) -> str:
    """A Python name for a dotted path: `blocks.3.ln` becomes `blocks_3_ln`."""
    made = re.sub(r"\W+", "_", name).strip("_")
    return made if made and not made[0].isdigit() else f"_{made}"

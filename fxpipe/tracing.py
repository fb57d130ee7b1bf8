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
import random
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.fx.traceback as fx_traceback
from torch import fx, nn
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._higher_order_ops.effects import with_effects
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from fxpipe import origin, recurrent
from fxpipe.aten import true_value
from fxpipe.batch import describe, dump, tensor_spec
from fxpipe.errors import CaptureError, FxpipeError
from fxpipe.held import HeldTensors
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
    info,
    value,
)

_EFFECTS = ("ForwardTokenAOTOutput", "BackwardTokenAOTOutput")  # outputs that order side effects

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
    tensors = HeldTensors(model)
    if not tensors.trained:
        raise CaptureError("no parameter of the model requires a gradient", hint="there is nothing to train")
    # Each leaf gets memory of its own: labels that alias the inputs must not be traced as one tensor.
    inputs = [v.detach().clone() for v in batch_values if isinstance(v, torch.Tensor)]
    laid_out = iter(inputs)
    leaves = [replace(leaf, tensor=tensor_spec(next(laid_out))) if leaf.tensor else leaf for leaf in leaves]
    device = _one_device([*tensors.values[: tensors.registered], *inputs])
    traced = _trace(model, loss, spec, batch_values, tensors, inputs, device, autocast)
    return _Reader(traced, tensors, leaves, inputs).program(dump(spec), device, autocast)


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
    tensors: HeldTensors,
    inputs: Sequence[torch.Tensor],
    device: str,
    autocast: str | None,
) -> _Traced:
    count = len(tensors.values)
    replaced: list[int] = []
    lost: list[int] = []

    def step(*args: torch.Tensor) -> list[torch.Tensor]:
        """The loss, and the new values of tensors that the step has replaced."""
        held, rest = args[:count], iter(args[count:])
        batch = pytree.tree_unflatten([next(rest) if isinstance(v, torch.Tensor) else v for v in batch_values], spec)
        with tensors.replaced(held):
            tensors.hook(held)
            with _autocast(device, autocast), origin.recording(model):
                value = _scalar(loss(model, batch), origin.definition(loss))
            new = tensors.rebound(held)
        fits = {row for row, v in new.items() if _same_type(v, tensors.values[row])}
        lost[:] = [row for row in new if row not in fits]
        replaced[:] = [row for row in new if row in fits]
        if any(value is a for a in args):
            value = value.clone()  # a loss that is a parameter
        return [value, *(new[row].detach().clone() for row in replaced)]

    # Tensors from elsewhere (a teacher's weights, class weights) are constants of the graph.
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    args = [fake.from_tensor(t) for t in (*tensors.inputs, *inputs)]
    with contextlib.ExitStack() as stack, warnings.catch_warnings(), _tracing() as drew:
        warnings.simplefilter("ignore")  # the tracer's own; the user's came out when the model was made
        try:
            traced = aot_export_joint_with_descriptors(stack, _Bare(step), tuple(args))
        except FxpipeError:
            raise
        except Exception as error:
            raise _explain(error) from error
    notes = []
    if drew():
        notes.append(
            "the step draws random numbers from Python or numpy: those drawn at capture are used in every step; "
            "draw with torch, or in train_data()"
        )
    if tensors.hooked:
        notes.append(f"gradient hooks see one microbatch's gradient at a time: those of {', '.join(tensors.hooked)}")
    for change in tensors.changed:
        notes.append(f"the step changes the attribute {change}: every step sees the value from before capture")
    return _Traced(traced.graph_module, tuple(replaced), tuple(lost), tuple(notes))


def _same_type(new: Any, old: torch.Tensor) -> bool:
    return isinstance(new, torch.Tensor) and new.shape == old.shape and new.dtype == old.dtype


@contextlib.contextmanager
def _tracing() -> Iterator[Callable[[], bool]]:
    """Tells afterwards whether Python's or numpy's random generator was used; leaves all of them as they were."""
    session = getattr(torch.compiler, "_compile_session_context", contextlib.nullcontext)
    rng, others = torch.get_rng_state(), _other_generators()
    drew = False
    try:
        # Models ask is_compiling() to leave out data-dependent checks. What the user compiled runs as plain code.
        with (
            fx_traceback.preserve_node_meta(),
            session(),
            torch.compiler.set_stance("force_eager"),
            recurrent.trainable(),
        ):
            yield lambda: drew
    finally:
        torch.set_rng_state(rng)
        drew = _restore_generators(others)


def _other_generators() -> tuple[Any, Any]:
    numpy = sys.modules.get("numpy")
    return random.getstate(), numpy.random.get_state() if numpy else None


def _restore_generators(before: tuple[Any, Any]) -> bool:
    """Whether they had been used."""
    now = _other_generators()
    drew = now[0] != before[0]
    random.setstate(before[0])
    if before[1] is not None:
        drew |= repr(now[1][2:]) != repr(before[1][2:]) or bool((now[1][1] != before[1][1]).any())
        sys.modules["numpy"].random.set_state(before[1])
    return drew


def _autocast(device: str, autocast: str | None) -> contextlib.AbstractContextManager[Any]:
    if autocast is None:
        return contextlib.nullcontext()
    return torch.autocast(device, AUTOCAST[autocast])


CAUSES = (
    (
        r"_local_scalar_dense|DataDependent|data-dependent|Could not guard|Could not extract|\.item\(\)|nonzero"
        r"|DynamicOutputShape",
        "the step depends on the values of a tensor: one graph cannot hold `if tensor`, .item() or a shape from data",
        "compute both branches and choose with torch.where, or move the decision into train_data()",
    ),
    (
        r"numpy|\.numpy\(\)|SymInt.*numpy",
        "the step leaves torch for numpy",
        "use torch functions instead, or do it in train_data()",
    ),
    (
        r"mutating a non-functional tensor|expected to have an entirely functional graph",
        "the step changes a tensor in place that is no part of the model",
        "keep it in a buffer of the model (register_buffer)",
    ),
    (
        r"view input mutations",
        "two buffers share memory, and the step changes one of them in place",
        "give each buffer memory of its own: .clone() it before register_buffer",
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


class _Traced(NamedTuple):
    """The joint graph, and what became of the tensors the step has replaced.

    `replaced`: their rows, in the order of the outputs behind the loss; `lost`: rows whose new value has another shape
    or dtype, or is no tensor.
    """

    graph_module: fx.GraphModule
    replaced: tuple[int, ...]
    lost: tuple[int, ...]
    warnings: tuple[str, ...]


class _Reader:
    """Turns the traced graph into a Program: flat, named after modules, each node with its record."""

    def __init__(
        self, traced: _Traced, tensors: HeldTensors, leaves: Sequence[Any], inputs: Sequence[torch.Tensor]
    ) -> None:
        self.traced = traced.graph_module
        self.replaced = traced.replaced
        self.lost = traced.lost
        self.tensors = tensors
        self.leaves = leaves
        self.inputs = inputs
        self.graph = fx.Graph()
        self.mapped: dict[fx.Node, fx.Node] = {}
        self.values: dict[str, torch.Tensor] = {}
        self.example: dict[str, torch.Tensor] = {}
        self.constants: list[Buffer] = []
        self.warnings: list[str] = list(traced.warnings)
        self.tangents: list[fx.Node] = []
        self.tokens: set[fx.Node] = set()

    def program(self, batch_spec: str, device: str, autocast: str | None) -> Program:
        nodes = list(self.traced.graph.nodes)
        slots = self._placeholders(nodes)
        forward = {n for n in nodes if n.meta.get("partitioner_tag") != "is_backward"}
        origins = self._forward_origins(nodes, forward)
        for node in nodes:
            if self._is_effect(node):
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
        self._refuse_lost(slots)
        outputs = self._outputs(nodes[-1], slots)
        parameters, buffers = [], []
        for i, names in enumerate(self.tensors.names):
            placeholder = self.mapped[slots[i]]
            node_name = placeholder.name
            if i >= self.tensors.registered and not placeholder.users:
                self.graph.erase_node(placeholder)  # an attribute that the step does not read
                del self.values[node_name]
            elif i < self.tensors.parameters:
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
                hint="give each buffer memory of its own: .clone() it before register_buffer",
            )
        slots = [by_index[i] for i in range(len(by_index))]
        for i, (node, name) in enumerate(zip(slots, names, strict=True)):
            made = self.graph.placeholder(identifier(name))
            made.target = made.name  # two names may make one identifier
            made.meta["val"] = node.meta["val"]
            self.mapped[node] = made
            if i < len(self.tensors.values):
                self.values[made.name] = self.tensors.values[i].detach()
            else:
                self.example[made.name] = self.inputs[i - len(self.tensors.values)]
        self.tangents = tangents
        return slots

    def _refuse_lost(self, slots: Sequence[fx.Node]) -> None:
        for row in self.lost:
            if row < self.tensors.registered or self.mapped[slots[row]].users:
                raise CaptureError(
                    f"the step replaces {self.tensors.names[row][0]} by something of another shape or dtype",
                    hint="a build holds one shape: give the tensor its final shape and dtype from the start",
                )

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
        made.meta = {"val": true_value(made, node.meta.get("val")), "seq_nr": node.meta.get("seq_nr")}
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

    def _is_effect(self, node: fx.Node) -> bool:
        """Whether a node only carries or orders side effects: torch threads a token through operators that check."""
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
            if made is None or not isinstance(made, fx.Node) or kind in _EFFECTS:
                continue
            if kind == "PlainAOTOutput" and desc.idx == 0:
                outputs.append(Output("loss"))
            elif kind == "PlainAOTOutput":
                row = self.replaced[desc.idx - 1]
                if row >= self.tensors.registered and not self.mapped[slots[row]].users:
                    continue  # kept for the user to look at (`self.attention = …`): no state
                outputs.append(Output("buffer", self.mapped[slots[row]].name))
            elif kind == "GradAOTOutput":
                index = desc.grad_of.idx
                if index >= self.tensors.parameters:
                    continue  # the step itself asked for the gradient of its batch
                if value(made).layout != torch.strided:
                    raise CaptureError(
                        f"the gradient of {self.tensors.names[index][0]} is sparse, which a pipeline cannot send",
                        hint="build the embedding with sparse=False",
                    )
                outputs.append(Output("gradient", self.mapped[slots[index]].name))
            elif kind == "InputMutationAOTOutput":
                index = desc.mutated_input.idx
                if index in self.replaced:
                    continue  # changed in place, then replaced
                if index >= batch_start:
                    self.warnings.append("the step changes its batch in place; the change stays inside the step")
                    continue
                if index < self.tensors.parameters:
                    raise CaptureError(
                        f"the step changes parameter {self.tensors.names[index][0]} in place",
                        hint="only the optimizer may change parameters; keep such a value in a buffer",
                    )
                outputs.append(Output("buffer", self.mapped[slots[index]].name))
                if info(self.mapped[made]).region is not None:
                    self.warnings.append(
                        f"buffer {self.tensors.names[index][0]} changes inside a torch.utils.checkpoint region: it is "
                        "updated once a step; eager PyTorch updates it again when it recomputes the region"
                    )
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

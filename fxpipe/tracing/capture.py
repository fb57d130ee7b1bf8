"""Capture: an ordinary training step becomes one joint graph of forward, loss and backward.

This file, with `joint` (which reads what comes out), is all that depends on torch's private tracing API,
`aot_export_joint_with_descriptors`. It traces the eager module (never an exported one, which loses the backward of a
custom autograd.Function). The model's tensors are handed in as plain inputs, each storage once: a tied parameter is one
input whose gradients autograd itself sums, and a buffer shared by two modules is updated in order.

When torch changes that API: this file needs a functional ATen graph of `(loss, gradients)` with mutated inputs as
outputs, the kind of every input and output (`meta["desc"]`), the phase of every node (`meta["partitioner_tag"]`), a
backward node's forward node (`meta["seq_nr"]`), and `current_meta["custom"]` copied to each node.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch import fx, nn

from fxpipe import user_lines
from fxpipe.errors import CaptureError, FxpipeError, listed
from fxpipe.ir.program import Program, info
from fxpipe.ir.transform import rarely_collected
from fxpipe.messages import silenced
from fxpipe.plan.spec import LeafSpec
from fxpipe.plan.user_files import WatchedSpec
from fxpipe.random_state import drew_without_torch, random_state, set_random_state
from fxpipe.task.batch import Batch, as_scalar, tensor_spec
from fxpipe.task.hooks import Loss, loss_and_metrics
from fxpipe.task.parameter_attributes import attributes_of
from fxpipe.torch_private import DisableTorchFunction, FakeTensorMode, compiling, pytree, run_backward
from fxpipe.torch_private.aot import aot_export_joint_with_descriptors
from fxpipe.tracing import custom_operators as operators
from fxpipe.tracing import kernels, origin, recurrent
from fxpipe.tracing.batch_reads import BatchReads, of_what_is_read
from fxpipe.tracing.fake_strides import KernelStrides
from fxpipe.tracing.held_tensors import HeldTensors
from fxpipe.tracing.hook_state import NO_HOOKS, Hooks
from fxpipe.tracing.joint import Reader, Traced, frozen_updates
from fxpipe.tracing.known_values import KnownValues
from fxpipe.tracing.lasting_state import Unknown, noteworthy, still_changing
from fxpipe.tracing.refusals import dense, explain, own_functions, own_gradients, scalar
from fxpipe.tracing.step_calls import StepCalls
from fxpipe.tracing.step_metrics import forget_numbers, metric_tensors
from fxpipe.tracing.unseen import without_checks

OF_HOOKS = "gradient hooks see one microbatch's gradient at a time"
"""Begins a warning that matters only with several microbatches."""

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


_one = threading.RLock()


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Inside, no other thread of this process captures a step: tracing changes torch for all of them."""
    with _one:
        yield


@one_at_a_time()
@rarely_collected()
def capture(
    model: nn.Module,
    loss: Loss,
    batch: Any,
    *,
    autocast: str | None = None,
    params: str | None = None,
    constant_batch: Sequence[str] = (),
    state_notes: bool = True,
    hooks: Hooks = NO_HOOKS,
) -> Program:
    """The joint graph of `loss(model, batch)` and its gradients, at level CAPTURED.

    Args:
        model: any module; put in train mode if it is not (its submodules stay as the user left them). If its parameters
            have no values (`fxpipe.task.meta`), they count as on the batch's device.
        loss: returns a scalar tensor, or that and a dictionary of metrics: scalar tensors and numbers.
        batch: a pytree of tensors and plain constants; its shapes are the build's shapes.
        autocast: 'bf16' or 'fp16' to run the step under torch.autocast; nothing scales the loss yet.
        params: 'bf16' to compute as `model.to(torch.bfloat16)` would, with casts of float32 parameters.
        constant_batch: names (`batch['grid']`) or keys of the tensors in the batch whose values the step may read, as
            numbers, shapes and branches. Every later batch must have the same values.
        state_notes: whether to find out if Python state that the step changes matters to its later calls.
        hooks: the functions that a run calls between steps: `Program.watched` says what the step reads of what they can
            reach.

    Raises:
        CaptureError: with the user's line, when the step cannot be one graph.
        BatchError: the batch is not a pytree of tensors, or has no such constants.
    """
    if not model.training:
        model.train()
    example, attributes = Batch.of(batch, constant_batch), attributes_of(model)
    example.check_constants()
    program, places = of_what_is_read(
        example, lambda b, reads: _captured(model, loss, Example.of(b, reads), autocast, params, state_notes, hooks)
    )
    read = tuple(replace(b, where=places.get(b.leaf.name)) for b in program.batch)
    return replace(program, batch=read, attributes=attributes)


def _captured(
    model: nn.Module,
    loss: Loss,
    example: Example,
    autocast: str | None,
    params: str | None,
    state_notes: bool,
    hooks: Hooks,
) -> Program:
    hold = partial(HeldTensors, model, functions=(loss,), params=params, hooks=hooks)
    tensors = hold()
    if not tensors.trained:
        raise CaptureError("no parameter of the model requires a gradient", hint="there is nothing to train")
    dense(tensors)
    device = one_device([*tensors.values[: tensors.registered], *example.inputs])
    traced = _trace(model, loss, example, tensors, device, autocast)
    if updated := frozen_updates(traced, tensors):  # a momentum encoder, a teacher that follows
        tensors = hold(updated)
        traced = _trace(model, loss, example, tensors, device, autocast)
    if outside := tensors.outside(traced.met):
        with contextlib.suppress(CaptureError):  # it reads their values: a run can only look if they change
            followed = hold(updated, outside=outside)
            tensors, traced = followed, _trace(model, loss, example, followed, device, autocast)
    tree = pytree.treespec_dumps(example.batch.tree)
    program = Reader(traced, tensors, example.leaves, example.inputs).program(tree, device, autocast)
    nodes = 0 if tensors.changes else len(program.graph.nodes)
    notes = _state_notes(model, loss, example, tensors, device, autocast, nodes) if state_notes else []
    rounded = {tensors.names[row][0] for row in tensors.rounded}
    if buffers := [b.names[0] for b in program.buffers if b.names[0] in rounded]:
        notes.append(
            f"--params bf16 rounds {listed(buffers, 4)}, also what the step makes of them, as model.to(torch.bfloat16) "
            "does; a model that has bfloat16 parameters already keeps the types of its buffers"
        )
    return replace(program, warnings=(*program.warnings, *notes), watched=watched(program, tensors, traced))


def watched(program: Program, tensors: HeldTensors, traced: Traced) -> tuple[WatchedSpec, ...]:
    """What the program has read of state that hooks reach."""
    lines, buffers = dict(traced.met), {}
    rows = {row.names[0]: program.placeholders[row.node] for row in program.buffers}
    for key, name in tensors.named.items():
        if name in rows and (users := list(rows[name].users)):
            first = info(users[0])
            buffers[key], lines[key] = name, f"{first.source}: {first.text}" if first.source else None
    return tensors.shared.watched(buffers, lines)


@dataclass(frozen=True)
class Example:
    """A batch for capture: its leaves with the layouts of their tensors, and the tensors that are traced.

    Every tensor has its own memory.
    """

    batch: Batch
    leaves: list[LeafSpec]
    inputs: list[torch.Tensor]
    reads: BatchReads

    @staticmethod
    def of(batch: Batch, reads: BatchReads) -> Example:
        device = next(iter(batch.tensors.values())).device.type
        # Labels that share memory with the inputs must not become one tensor with them.
        inputs = [
            v.detach().clone() if isinstance(v, torch.Tensor) else as_scalar(v, device)
            for leaf, v in zip(batch.leaves, batch.values, strict=True)
            if leaf.tensor
        ]
        laid_out = iter(inputs)
        specs = [tensor_spec(next(laid_out)) if leaf.tensor else None for leaf in batch.leaves]
        leaves = [  # of a number, the same on every device
            replace(leaf, tensor=spec) if isinstance(value, torch.Tensor) and spec else leaf
            for leaf, spec, value in zip(batch.leaves, specs, batch.values, strict=True)
        ]
        return Example(batch, leaves, inputs, reads)

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> tuple[Any, KnownValues]:
        """The user's batch with other tensors in place of those that are traced, and its constants."""
        traced_tensors, known_values, values = iter(tensors), KnownValues(), []
        for leaf, value in zip(self.leaves, self.batch.values, strict=True):
            if leaf.tensor:
                traced = next(traced_tensors)
                values.append(traced if isinstance(value, torch.Tensor) else self.reads.number(leaf.name, traced))
            elif isinstance(value, torch.Tensor):
                values.append(known_values.copy(value))
            else:
                values.append(value if leaf.read else self.reads.text(leaf.name, value))
        return pytree.tree_unflatten(values, self.batch.tree), known_values


def one_device(tensors: Sequence[torch.Tensor]) -> str:
    """The devices of the tensors, except those without values on the meta device."""
    devices = {t.device.type for t in tensors if not t.is_meta}
    if len(devices) > 1:
        raise CaptureError(
            f"the model and the batch are on different devices: {', '.join(sorted(devices))}",
            hint="move both to one device; `fxpipe compile --device` does",
        )
    return devices.pop()


def _fake(mode: FakeTensorMode, tensor: torch.Tensor, device: str) -> torch.Tensor:
    """A stand-in for a tensor; on `device` if the tensor has no value and so no place."""
    if not tensor.is_meta:
        return mode.from_tensor(tensor)
    with mode:
        empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


class _Bare(nn.Module):
    """A module without parameters around a function, because the tracer needs a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def _trace(
    model: nn.Module, loss: Loss, example: Example, tensors: HeldTensors, device: str, autocast: str | None
) -> Traced:
    count = len(tensors.values)
    replaced, lost = list[int](), list[int]()
    named, functions = dict[str, torch.Tensor](), list[str]()
    place = user_lines.definition(loss)
    watch = tensors.traced_step()

    def step(*args: torch.Tensor) -> list[torch.Tensor]:
        """The loss, the new values of tensors that the step has replaced, and the metrics."""
        held, (batch, known_values) = args[:count], example.with_tensors(args[count:])
        with tensors.replaced(held):
            tensors.hook()
            with (
                autocasting(device, autocast),
                origin.recording(model, watch, args, tensors.stand_ins, known_values, example.reads),
            ):
                returned, metrics = loss_and_metrics(loss(model, batch))
                value = scalar(returned, place)
                named.clear()
                named.update(metric_tensors(metrics, device, place))
            own_gradients(value, watch, tensors)
            functions[:] = own_functions(value)
            new = tensors.rebound()
        replaced[:], lost[:] = by_type(new, tensors.inputs)
        if any(value is a for a in args):
            value = value.clone()  # a loss that is a parameter
        return [value, *(new[row].detach().clone() for row in replaced), *named.values()]

    # Undone: changes of the backward, draws of the forward.
    with tensors.python.preserved(), tensors.shared.reading():
        before = tensors.python.snapshot()
        graph_module, notes = exported(step, [*tensors.inputs, *example.inputs], watch)
        tensors.changes += tensors.python.changes(before)
    if tensors.hooked:
        notes.append(f"{OF_HOOKS}: {', '.join(tensors.hooked)}")
    if named:
        forget_numbers(graph_module.graph, len(named))
    backwards = [f"the backward of {name}" for name in functions]
    if (line := watch.operators.get("register_hook")) is not None:
        backwards.append(f"a gradient hook ({watch.where(line)})")
    text = listed(backwards, 4) if backwards else ""
    return Traced(graph_module, tuple(replaced), tuple(lost), tuple(notes), tuple(named), False, text, watch.met)


def _state_notes(
    model: nn.Module, loss: Loss, example: Example, tensors: HeldTensors, device: str, autocast: str | None, nodes: int
) -> list[str]:
    """Notes for the user on the Python state that the step changes; refused if its later calls depend on it."""
    changes = tensors.changes
    fake = KernelStrides(allow_non_fake_inputs=True)
    fakes = [_fake(fake, t, device) for t in (*tensors.inputs, *example.inputs)]
    held, batch_tensors = fakes[: len(tensors.values)], fakes[len(tensors.values) :]
    trained = tuple(t for t in held if t.requires_grad)
    watch = origin.TracedStep()
    watch.calls = calls = StepCalls(every=False)
    calls.know_constants(fake)

    def run() -> None:
        batch, known_values = example.with_tensors(batch_tensors)
        with origin.recording(model, watch, fakes, tensors.stand_ins, known_values, example.reads):
            with autocasting(device, autocast):
                value, _ = loss_and_metrics(loss(model, batch))
            calls.backward()
            hooked = calls.hooks or tensors.hooked or own_functions(value)
            gradients = _gradients(value, trained) if hooked else ()
            calls.returned([value, *tensors.rebound().values()], gradients)
        tensors.put_back()

    with contextlib.ExitStack() as stack:
        for context in (silenced(), warnings.catch_warnings(action="ignore"), _tracing(), without_checks()):
            stack.enter_context(context)
        stack.enter_context(tensors.python.preserved())
        stack.enter_context(tensors.replaced(held))
        tensors.hook()
        stack.enter_context(fake)
        with contextlib.suppress(Unknown):
            last = noteworthy(still_changing(run, watch, tensors.python, nodes))
            places = {change.place for change in last}
            changes = [change for change in changes if change.place in places]
            met = {change.place for change in changes}
            changes += [change for change in last if change.place not in met]  # in what the first call has made
    names = list(dict.fromkeys(str(change) for change in noteworthy(changes)))
    if not names:
        return []
    return [
        f"the step changes {listed(names, 4)}: every step of a run sees the value from before capture, which "
        "is harmless where no step reads it, such as a list of losses"
    ]


def _gradients(loss: torch.Tensor, parameters: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor | None, ...]:
    """torch.autograd.grad, whose own call, seen by a recorder, would hide from it what hooks call."""
    with DisableTorchFunction():
        one = torch.ones_like(loss)
    gradients: tuple[torch.Tensor | None, ...] = run_backward(
        (loss,), (one,), False, False, parameters, allow_unreachable=True, accumulate_grad=False
    )
    return gradients


def exported(
    function: Callable[..., list[torch.Tensor]], args: Sequence[torch.Tensor], watch: origin.TracedStep
) -> tuple[fx.GraphModule, list[str]]:
    """The traced graph (joint if an argument requires a gradient), and what the user should know about it."""
    # Tensors from elsewhere (a teacher's weights, class weights) are constants of the graph.
    fake = KernelStrides(allow_non_fake_inputs=True)
    device = one_device(args)
    fakes = tuple(_fake(fake, t, device) for t in args)
    try:
        with (
            contextlib.ExitStack() as stack,
            warnings.catch_warnings(),
            _tracing() as drew,
            without_checks() as unchecked,
        ):
            warnings.simplefilter("ignore")  # the tracer's own; the user's appeared when the model was made
            warnings.filterwarnings("error", message=".*autograd kernel was not registered")  # a gradient would be lost
            traced = aot_export_joint_with_descriptors(stack, _Bare(function), fakes)
    except FxpipeError:
        if watch.calls.settle():
            return exported(function, args, watch)
        raise
    except Exception as error:
        raise explain(error, watch) from error
    operators.check(traced.graph_module.graph, device, watch)
    drawn = (
        "the step draws random numbers from Python or numpy: those drawn at capture are used in every step; "
        "draw with torch, or in train_data()"
    )
    return traced.graph_module, [*([drawn] if drew() else []), *unchecked]


def by_type(new: Mapping[int, Any], old: Sequence[torch.Tensor]) -> tuple[list[int], list[int]]:
    """The rows whose new value has the shape and type of the old one, and those whose new value has not."""
    rows: tuple[list[int], list[int]] = ([], [])
    for row, tensor in new.items():
        fits = isinstance(tensor, torch.Tensor) and (tensor.shape, tensor.dtype) == (old[row].shape, old[row].dtype)
        rows[not fits].append(row)
    return rows


@contextlib.contextmanager
def _tracing() -> Iterator[Callable[[], bool]]:
    """Yields a function that says if Python's or numpy's random generator was used; restores all generators."""
    log = logging.getLogger(FakeTensorMode.__module__)  # it would report errors that we explain anyway
    level = log.level
    log.setLevel(logging.CRITICAL)
    before = random_state()
    drew = False
    try:
        # Models ask is_compiling() to leave out data-dependent checks. What the user compiled runs as plain code.
        with (
            compiling(),
            fx_traceback.preserve_node_meta(),
            torch.compiler.set_stance("force_eager"),
            recurrent.trainable(),
            kernels.traced(),
        ):
            yield lambda: drew
    finally:
        log.setLevel(level)
        drew = drew_without_torch(before)
        set_random_state(before)


def autocasting(device: str, autocast: str | None) -> contextlib.AbstractContextManager[Any]:
    """The context in which a step runs: torch.autocast, or none."""
    if autocast is None:
        return contextlib.nullcontext()
    return torch.autocast(device, AUTOCAST[autocast])

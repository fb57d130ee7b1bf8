"""Capture: an ordinary training step becomes one joint graph of forward, loss and backward; metrics, a forward.

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
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch import fx, nn

from fxpipe.errors import CaptureError, FxpipeError, listed
from fxpipe.ir.garbage import rarely_collected
from fxpipe.ir.program import Program
from fxpipe.messages import silenced
from fxpipe.plan.spec import LeafSpec, TensorSpec
from fxpipe.random_state import drew_without_torch, random_state, set_random_state
from fxpipe.task.batch import Batch, as_scalar, dump, tensor_spec
from fxpipe.task.hooks import Loss, Metrics
from fxpipe.task.metrics import loss_and_metrics
from fxpipe.torch_private import DisableTorchFunction, FakeTensorMode, compiling, pytree, run_backward
from fxpipe.torch_private.aot import aot_export_joint_with_descriptors
from fxpipe.tracing import autograd_graph, kernels, origin, recurrent, user_lines
from fxpipe.tracing import custom_operators as operators
from fxpipe.tracing import value_checks as checks
from fxpipe.tracing.batch_reads import BatchReads, of_what_is_read
from fxpipe.tracing.eval_mode import eval_mode
from fxpipe.tracing.fake_strides import KernelStrides
from fxpipe.tracing.held_tensors import HeldTensors
from fxpipe.tracing.joint import Reader, Traced, frozen_updates
from fxpipe.tracing.known_values import KnownValues
from fxpipe.tracing.lasting_state import Unknown, noteworthy, still_changing
from fxpipe.tracing.refusals import dense, evaluated, explain, own_gradients, scalar
from fxpipe.tracing.step_calls import StepCalls
from fxpipe.tracing.step_metrics import forget_numbers, metric_tensors

OF_HOOKS = "gradient hooks see one microbatch's gradient at a time"
"""Begins a warning that matters only with several microbatches."""

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


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

    Raises:
        CaptureError: with the user's line, when the step cannot be one graph.
        BatchError: the batch is not a pytree of tensors, or has no such constants.
    """
    if not model.training:
        model.train()
    given = Batch.of(batch, constant_batch)
    given.check_constants()
    program, places = of_what_is_read(
        given, lambda b, reads: _captured(model, loss, _Example.of(b, reads), autocast, params, state_notes)
    )
    return replace(program, batch=tuple(replace(b, where=places.get(b.leaf.name)) for b in program.batch))


def _captured(
    model: nn.Module, loss: Loss, example: _Example, autocast: str | None, params: str | None, state_notes: bool
) -> Program:
    tensors = HeldTensors(model, functions=(loss,), params=params)
    if not tensors.trained:
        raise CaptureError("no parameter of the model requires a gradient", hint="there is nothing to train")
    dense(tensors)
    device = _one_device([*tensors.values[: tensors.registered], *example.inputs])
    traced = _trace(model, loss, example, tensors, device, autocast)
    if updated := frozen_updates(traced, tensors):  # a momentum encoder, a teacher that follows
        tensors = HeldTensors(model, updated, (loss,), params)
        traced = _trace(model, loss, example, tensors, device, autocast)
    tree = dump(example.batch.tree)
    program = Reader(traced, tensors, example.leaves, example.inputs).program(tree, device, autocast)
    nodes = 0 if tensors.changes else len(program.graph.nodes)
    notes = _state_notes(model, loss, example, tensors, device, autocast, nodes) if state_notes else []
    rounded = {tensors.names[row][0] for row in tensors.rounded}
    if buffers := [b.names[0] for b in program.buffers if b.names[0] in rounded]:
        notes.append(
            f"--params bf16 rounds {listed(buffers, 4)}, also what the step makes of them, as model.to(torch.bfloat16) "
            "does; a model that has bfloat16 parameters already keeps the types of its buffers"
        )
    return replace(program, warnings=(*program.warnings, *notes))


@dataclass(frozen=True)
class CapturedEvaluation:
    """`metrics(model, batch)` as a program whose outputs are the computed metrics, and new values of buffers.

    Attributes:
        metrics: all their names, in the order of the user's dictionary.
        constants: those that are plain numbers.
        gathered: those that have dimensions, if they are gathered.
    """

    program: Program
    metrics: tuple[str, ...]
    constants: dict[str, float]
    gathered: dict[str, TensorSpec]


@rarely_collected()
def capture_evaluation(
    model: nn.Module, metrics: Metrics, batch: Any, *, gathers: bool = False, params: str | None = None
) -> CapturedEvaluation:
    """The graph of `metrics(model, batch)` in eval mode, without gradients, at level CAPTURED.

    Args:
        model: any module; it is put in eval mode, and afterwards every submodule back into its own mode.
        metrics: returns a dictionary of numbers and tensors of one element.
        gathers: it may return tensors with dimensions, too, which runs gather.
        params: as in `capture`.
        batch: a pytree of tensors and plain constants, or a `Batch`, which also says which are constants.

    Raises:
        CaptureError: with the user's line, when it cannot be one graph; or eval mode changes the weights.
        BatchError: the batch is not a pytree of tensors.
    """
    found, _ = of_what_is_read(
        Batch.of(batch), lambda b, reads: _evaluation(model, metrics, _Example.of(b, reads), gathers, params)
    )
    return found


def _evaluation(
    model: nn.Module, metrics: Metrics, example: _Example, gathers: bool, params: str | None
) -> CapturedEvaluation:
    tensors = HeldTensors(model, functions=(metrics,), params=params)
    device = _one_device([*tensors.values[: tensors.registered], *example.inputs])
    count = len(tensors.values)
    place = user_lines.definition(metrics)
    found: dict[str, Any] = {}
    replaced: list[int] = []
    lost: list[int] = []
    watch = origin.TracedStep()

    def evaluate(*args: torch.Tensor) -> list[torch.Tensor]:
        held, (given, known) = args[:count], example.with_tensors(args[count:])
        with tensors.replaced(held), torch.no_grad():
            with origin.recording(model, watch, args, tensors.stand_ins, known, example.reads):
                values = evaluated(metrics(model, given), place, gathers)
            new = tensors.rebound()
        fits = {row for row, v in new.items() if _same_type(v, tensors.inputs[row])}
        lost[:] = [row for row in new if row not in fits]
        replaced[:] = [row for row in new if row in fits]
        found.clear()
        found.update(values)
        # Copies: a metric may be a parameter, or have two names.
        made = [v for v in values.values() if isinstance(v, torch.Tensor)]
        return [v.detach().clone() for v in (*(new[row] for row in replaced), *made)]

    with eval_mode(model), tensors.python.preserved():
        graph_module, notes = _export(evaluate, [*(v.detach() for v in tensors.inputs), *example.inputs], watch)
    computed = tuple(name for name, v in found.items() if isinstance(v, torch.Tensor))
    notes += [f"it changes {change}: the change is not kept" for change in noteworthy(tensors.changes)]
    traced = Traced(graph_module, tuple(replaced), tuple(lost), tuple(notes), computed, evaluates=True)
    program = Reader(traced, tensors, example.leaves, example.inputs).program(dump(example.batch.tree), device, None)
    constants = {name: float(v) for name, v in found.items() if name not in computed}
    tensors_of_all = {name: tensor_spec(found[name]) for name in computed if gathers and found[name].dim()}
    return CapturedEvaluation(program, tuple(found), constants, tensors_of_all)


@dataclass(frozen=True)
class _Example:
    """A batch for capture: its leaves with the layouts of their tensors, and the tensors that are traced.

    Every tensor has its own memory.
    """

    batch: Batch
    leaves: list[LeafSpec]
    inputs: list[torch.Tensor]
    reads: BatchReads

    @staticmethod
    def of(batch: Batch, reads: BatchReads) -> _Example:
        device = next(iter(batch.tensors.values())).device.type
        # Labels that share memory with the inputs must not become one tensor with them.
        inputs = [
            v.detach().clone() if isinstance(v, torch.Tensor) else as_scalar(v, device)
            for leaf, v in zip(batch.leaves, batch.values, strict=True)
            if leaf.tensor
        ]
        laid_out = iter(inputs)
        leaves = [replace(leaf, tensor=tensor_spec(next(laid_out))) if leaf.tensor else leaf for leaf in batch.leaves]
        return _Example(batch, leaves, inputs, reads)

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> tuple[Any, KnownValues]:
        """The user's batch with other tensors in place of those that are traced, and its constants."""
        rest, known, values = iter(tensors), KnownValues(), []
        for leaf, value in zip(self.leaves, self.batch.values, strict=True):
            if leaf.tensor:
                traced = next(rest)
                values.append(traced if isinstance(value, torch.Tensor) else self.reads.number(leaf.name, traced))
            elif isinstance(value, torch.Tensor):
                values.append(known.copy(value))
            else:
                values.append(value if leaf.read else self.reads.text(leaf.name, value))
        return pytree.tree_unflatten(values, self.batch.tree), known


def _one_device(tensors: Sequence[torch.Tensor]) -> str:
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
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


class _Bare(nn.Module):
    """A module without parameters around a function, because the tracer needs a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def _trace(
    model: nn.Module,
    loss: Loss,
    example: _Example,
    tensors: HeldTensors,
    device: str,
    autocast: str | None,
) -> Traced:
    count = len(tensors.values)
    replaced: list[int] = []
    lost: list[int] = []
    named: dict[str, torch.Tensor] = {}
    functions: list[str] = []
    place = user_lines.definition(loss)
    watch = origin.TracedStep()

    def step(*args: torch.Tensor) -> list[torch.Tensor]:
        """The loss, the new values of tensors that the step has replaced, and the metrics."""
        held, (batch, known) = args[:count], example.with_tensors(args[count:])
        with tensors.replaced(held):
            tensors.hook()
            with (
                autocasting(device, autocast),
                origin.recording(model, watch, args, tensors.stand_ins, known, example.reads),
            ):
                returned, metrics = loss_and_metrics(loss(model, batch))
                value = scalar(returned, place)
                named.clear()
                named.update(metric_tensors(metrics, device, place))
            own_gradients(value, watch, tensors)
            functions[:] = autograd_graph.functions(value)
            new = tensors.rebound()
        fits = {row for row, v in new.items() if _same_type(v, tensors.inputs[row])}
        lost[:] = [row for row in new if row not in fits]
        replaced[:] = [row for row in new if row in fits]
        if any(value is a for a in args):
            value = value.clone()  # a loss that is a parameter
        return [value, *(new[row].detach().clone() for row in replaced), *named.values()]

    with tensors.python.preserved():  # undoes changes of the backward, draws of the forward
        before = tensors.python.snapshot()
        graph_module, notes = _export(step, [*tensors.inputs, *example.inputs], watch)
        tensors.changes += tensors.python.changes(before)
    if tensors.hooked:
        notes.append(f"{OF_HOOKS}: {', '.join(tensors.hooked)}")
    if named:
        forget_numbers(graph_module.graph, len(named))
    own = [f"the backward of {name}" for name in functions]
    if (line := watch.operators.get("register_hook")) is not None:
        own.append(f"a gradient hook ({watch.where(line)})")
    said = listed(own, 4) if own else ""
    return Traced(graph_module, tuple(replaced), tuple(lost), tuple(notes), tuple(named), own_backward=said)


def _state_notes(
    model: nn.Module, loss: Loss, example: _Example, tensors: HeldTensors, device: str, autocast: str | None, nodes: int
) -> list[str]:
    """Notes for the user on the Python state that the step changes.

    Raises:
        CaptureError: the changed state changes what its later calls compute.
    """
    changes = tensors.changes
    fake = KernelStrides(allow_non_fake_inputs=True)
    made = [_fake(fake, t, device) for t in (*tensors.inputs, *example.inputs)]
    held, given = made[: len(tensors.values)], made[len(tensors.values) :]
    trained = tuple(t for t in held if t.requires_grad)
    watch = origin.TracedStep()
    watch.calls = calls = StepCalls(every=False)
    calls.know_constants(fake)

    def run() -> None:
        batch, known = example.with_tensors(given)
        with origin.recording(model, watch, made, tensors.stand_ins, known, example.reads):
            with autocasting(device, autocast):
                value, _ = loss_and_metrics(loss(model, batch))
            calls.backward()
            hooked = calls.hooks or tensors.hooked or autograd_graph.functions(value)
            gradients = _gradients(value, trained) if hooked else ()
            calls.returned([value, *tensors.rebound().values()], gradients)
        tensors.put_back()

    with contextlib.ExitStack() as stack:
        for context in (silenced(), warnings.catch_warnings(action="ignore"), _tracing(), checks.left_out()):
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
    found: tuple[torch.Tensor | None, ...] = run_backward(
        (loss,), (one,), False, False, parameters, allow_unreachable=True, accumulate_grad=False
    )
    return found


def _export(
    function: Callable[..., list[torch.Tensor]], args: Sequence[torch.Tensor], watch: origin.TracedStep
) -> tuple[fx.GraphModule, list[str]]:
    """The traced graph (joint if an argument requires a gradient), and what the user should know about it."""
    # Tensors from elsewhere (a teacher's weights, class weights) are constants of the graph.
    fake = KernelStrides(allow_non_fake_inputs=True)
    device = _one_device(args)
    made = tuple(_fake(fake, t, device) for t in args)
    try:
        with (
            contextlib.ExitStack() as stack,
            warnings.catch_warnings(),
            _tracing() as drew,
            checks.left_out() as unchecked,
        ):
            warnings.simplefilter("ignore")  # the tracer's own; the user's appeared when the model was made
            warnings.filterwarnings("error", message=".*autograd kernel was not registered")  # a gradient would be lost
            traced = aot_export_joint_with_descriptors(stack, _Bare(function), made)
    except FxpipeError:
        if watch.calls.settle():
            return _export(function, args, watch)
        raise
    except Exception as error:
        raise explain(error, watch) from error
    operators.check(traced.graph_module.graph, device, watch)
    drawn = (
        "the step draws random numbers from Python or numpy: those drawn at capture are used in every step; "
        "draw with torch, or in train_data()"
    )
    return traced.graph_module, [*([drawn] if drew() else []), *unchecked]


def _same_type(new: Any, old: torch.Tensor) -> bool:
    return isinstance(new, torch.Tensor) and new.shape == old.shape and new.dtype == old.dtype


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

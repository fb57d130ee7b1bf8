"""Capture: an ordinary training step becomes one joint graph of forward, loss and backward.

This file, with `joint` (which reads what comes out), is all that touches torch's private tracing API,
`aot_export_joint_with_descriptors`. It traces the eager module
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
import logging
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch import nn
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from fxpipe import origin, recurrent
from fxpipe.batch import describe, dump, tensor_spec
from fxpipe.errors import CaptureError, FxpipeError
from fxpipe.held import HeldTensors
from fxpipe.joint import Reader, Traced
from fxpipe.program import Program
from fxpipe.refusals import explain, scalar

Loss = Callable[[nn.Module, Any], torch.Tensor]
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def capture(model: nn.Module, loss: Loss, batch: Any, *, autocast: str | None = None) -> Program:
    """The joint graph of `loss(model, batch)` and its gradients, at level CAPTURED.

    Args:
        model: any module; put in train mode if it is not (its submodules stay as the user left them).
        loss: gives a scalar tensor.
        batch: a pytree of tensors and plain constants; its shapes are the build's shapes.
        autocast: 'bf16' to run the step under torch.autocast ('fp16' too, but nothing scales the loss).

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
    return Reader(traced, tensors, leaves, inputs).program(dump(spec), device, autocast)


def _one_device(tensors: Sequence[torch.Tensor]) -> str:
    devices = {t.device.type for t in tensors}
    if len(devices) > 1:
        raise CaptureError(
            f"the model and the batch lie on different devices: {', '.join(sorted(devices))}",
            hint="move both to one device; `fxpipe compile --device` does",
        )
    return devices.pop()


class _Bare(nn.Module):
    """A module without parameters around a function, since the tracer wants a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def _trace(
    model: nn.Module,
    loss: Loss,
    spec: pytree.TreeSpec,
    batch_values: Sequence[Any],
    tensors: HeldTensors,
    inputs: Sequence[torch.Tensor],
    device: str,
    autocast: str | None,
) -> Traced:
    count = len(tensors.values)
    replaced: list[int] = []
    lost: list[int] = []

    def step(*args: torch.Tensor) -> list[torch.Tensor]:
        """The loss, and the new values of tensors that the step has replaced."""
        held, rest = args[:count], iter(args[count:])
        batch = pytree.tree_unflatten([next(rest) if isinstance(v, torch.Tensor) else v for v in batch_values], spec)
        with tensors.replaced(held):
            tensors.hook(held)
            with autocasting(device, autocast), origin.recording(model):
                value = scalar(loss(model, batch), origin.definition(loss))
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
            raise explain(error) from error
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
    return Traced(traced.graph_module, tuple(replaced), tuple(lost), tuple(notes))


def _same_type(new: Any, old: torch.Tensor) -> bool:
    return isinstance(new, torch.Tensor) and new.shape == old.shape and new.dtype == old.dtype


@contextlib.contextmanager
def _tracing() -> Iterator[Callable[[], bool]]:
    """Tells afterwards whether Python's or numpy's random generator was used; leaves all of them as they were."""
    log = logging.getLogger("torch._subclasses.fake_tensor")  # reports what is raised to us, and explained, anyway
    level = log.level
    log.setLevel(logging.CRITICAL)
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
        log.setLevel(level)
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


def autocasting(device: str, autocast: str | None) -> contextlib.AbstractContextManager[Any]:
    """The context a step runs in: torch.autocast, or none."""
    if autocast is None:
        return contextlib.nullcontext()
    return torch.autocast(device, AUTOCAST[autocast])

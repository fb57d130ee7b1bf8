"""Why a step cannot be captured, in the user's terms: torch's error becomes a cause, a place and a cure."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.autograd.function import BackwardCFunction

from fxpipe import user_lines
from fxpipe.errors import CaptureError
from fxpipe.task.batch import unusual
from fxpipe.torch_private import BackwardHookFunction, NormBase, written_as
from fxpipe.tracing import custom_operators as operators
from fxpipe.tracing import origin
from fxpipe.tracing.held_tensors import HeldTensors
from fxpipe.tracing.recurrent import Layer
from fxpipe.tracing.step_calls import is_outside

_NUMBERS = ("item", "tolist", "__float__", "__int__", "__index__", "__complex__")
"""Calls that turn a tensor into a number; a branch calls bool(), for which torch calls the first."""


_IN_NESTED = re.compile(r"[/\\]torch[/\\]nested[/\\]")
DATA_DEPENDENT = (
    r"_local_scalar_dense|DataDependent|data-dependent|Could not guard|Could not extract|\.item\(\)|nonzero"
    r"|DynamicOutputShape"
)


class Refusal(NamedTuple):
    """A cause in one sentence, its cure in another, and the page of `docs/errors` that shows both.

    Attributes:
        pattern: what torch's error says then; '' if that is not enough to know it by.
    """

    text: str
    cure: str
    page: str | None = None
    pattern: str = ""


BRANCH = Refusal(
    "the step depends on the values of a tensor: it branches on one (if, while, assert), and a graph holds only one "
    "branch",
    "compute both branches and choose with torch.where, or decide in train_data() and put the result into the batch",
    "data-dependent",
)
CAUSAL = Refusal(
    "the step depends on the values of a tensor: torch checks whether an attention mask is causal, and branches on "
    "that",
    "pass is_causal=True with the mask, or is_causal=False if it is not causal; nn.TransformerDecoder and "
    "nn.Transformer call it tgt_is_causal, the latter has src_is_causal, too",
    "data-dependent",
)
VARIANCE = Refusal(
    "the step depends on the values of a tensor: F.gaussian_nll_loss checks whether a variance is negative, and "
    "branches on that",
    "write it out, with var clamped to a minimum: 0.5 * (var.log() + (mean - target) ** 2 / var)",
    "data-dependent",
)
NUMBER = Refusal(
    "the step depends on the values of a tensor: it turns a tensor into a Python number (.item(), float(), "
    ".tolist(), a format), and a graph would keep that number forever",
    "keep it a tensor, which works wherever the number did, or compute the number in train_data()",
    "item",
)
SHAPE = Refusal(
    "the step depends on the values of a tensor: it makes a tensor whose shape depends on values, and a graph holds "
    "only one shape",
    "keep the full shape and mask, torch.where(mask, x, 0) for x[mask], or make the tensor in train_data()",
    "data-shapes",
)
CTC = Refusal(
    "the step depends on the values of a tensor: F.ctc_loss keeps for its backward a tensor whose shape depends on "
    "values, the lengths, even where they are constants",
    "use the function on the page, which computes the same with plain operators",
    "data-shapes",
)
NUMPY = Refusal(
    "the step leaves torch for numpy",
    "use torch functions instead, or do it in train_data()",
    "numpy",
    pattern=r"[Nn]umpy",
)
MEMORY = Refusal(
    "the step hands the memory of a tensor to code that torch cannot look into (an extension, a kernel, ctypes)",
    "wrap that code with torch.library.custom_op, with register_fake and register_autograd",
    operators.PAGE,
    pattern=r"data is not allocated|data pointer|data_ptr",
)
HIGHER = Refusal(
    "the step uses an operator that contains graphs (torch.cond, while_loop, scan, flex_attention)",
    "use plain operators: torch.where, a Python loop of fixed length, scaled_dot_product_attention",
    "higher-order",
)

AVERAGE = Refusal(
    "the step depends on the values of a tensor: a batch norm with momentum=None averages over all steps so far, and "
    "turns their count into a Python number",
    "give it a momentum: nn.BatchNorm1d(features, momentum=0.1)",
    "item",
)
NESTED = Refusal(
    "the step makes a nested tensor (jagged ones are), whose shape depends on values",
    "pad the sequences to one length in train_data(), and mask what was added, in the model and in the loss",
    "tensor-kinds",
    pattern=r"_nested_tensor|NestedTensor",
)
CAUSES = (
    Refusal(
        "the step calls backward() itself",
        "return the loss: the backward pass is captured with it",
        "backward",
        pattern=r"mirrored meta",
    ),
    Refusal(
        "the step makes an optimizer",
        "define optimizer(named_parameters) next to loss(): each worker updates the parameters it owns",
        "backward",
        pattern=r"can't optimize a non-leaf Tensor",
    ),
    Refusal(
        "the step switches the gradient of a parameter on or off, which a graph holds for the whole step",
        "for a part without gradients, call it with detached weights: torch.func.functional_call(part, "
        "{name: p.detach() for name, p in part.named_parameters()}, x)",
        pattern=r"requires_grad flags of leaf",
    ),
    Refusal(
        "the step copies a module or a parameter (copy.deepcopy), which no graph can hold",
        "make the copy in model() and keep it as a module, with requires_grad_(False) if it is not trained",
        "kept-tensors",
        pattern=r"support the deepcopy protocol",
    ),
    NUMPY,
    Refusal(
        "the backward of the traced step fails: a tensor whose value it needs was changed in place",
        "compute a new tensor instead: y = y * 2 for y.mul_(2) or y *= 2",
        pattern=r"modified by an inplace operation",
    ),
    Refusal(
        "the step changes a tensor in place that is not part of the model",
        "keep it in a buffer of the model (register_buffer)",
        "kept-tensors",
        pattern=r"mutating a non-functional tensor|expected to have an entirely functional graph",
    ),
    Refusal(
        "two buffers share memory, and the step changes one of them in place",
        "give each buffer memory of its own: .clone() it before register_buffer",
        pattern=r"view input mutations",
    ),
    Refusal(
        "the step calls a TorchScript function, which cannot be traced",
        "call the Python function itself: fxpipe compiles the step, scripting gains nothing",
        pattern=r"TorchScript|torch\.jit",
    ),
    NESTED,
    Refusal(
        "the step uses a quantized operator, which has no gradient",
        "train the model before it is quantized, and quantize the result",
        "tensor-kinds",
        pattern=r"[Qq]uantized",
    ),
    Refusal(
        "the step makes sparse gradients, which a pipeline cannot send",
        "use dense tensors; build an embedding with sparse=False",
        "tensor-kinds",
        pattern=r"[Ss]parse",
    ),
    Refusal(
        "the step moves a tensor to CUDA, which this machine does not have",
        "write .to(x.device) with a tensor x that is on the right device, or compile on a machine with CUDA",
        "devices",
        pattern=r"not compiled with CUDA|no NVIDIA driver",
    ),
    Refusal(
        "the step computes with tensors on different devices",
        "make new tensors where the others are (device=x.device), and keep the model's in buffers",
        "devices",
        pattern=r"on the same device|two different devices|DeviceMismatch",
    ),
    MEMORY,
)


def explain(error: Exception, watch: origin.TracedStep | None = None) -> CaptureError:
    """The error that a failed trace becomes, with the user's line."""
    watch = watch or origin.TracedStep()
    operator = operators.lacking(error, watch)
    if operator is not None:
        return operator
    message = f"{type(error).__name__}: {error}"
    where = user_lines.user_traceback(error)
    cause = _cause(error, message, watch.raised_by(error))
    if cause is HIGHER:
        where = where or watch.where(watch.higher)
    if (changing := re.search(r"target=torch\.ops\.aten\.(\w+)\.", message)) is not None:
        where = where or watch.where(watch.operators.get(changing[1], ("", 0)))
    if cause is not None:
        cure = cause.cure
        if cause in (BRANCH, NUMBER, SHAPE) and user_lines.is_library(where):
            cure = f"that line is in a library: look for an option that avoids it; in your own code, {cure}"
        return CaptureError(cause.text, where=where, hint=cure, page=cause.page)
    first = message.strip().splitlines()[0][:300]
    raised = isinstance(error, (AttributeError, KeyError, IndexError, NameError, TypeError))
    return CaptureError(
        f"the step raised {first}" if raised else f"tracing the step failed: {first}",
        where=where,
        hint="run loss(model(), batch) alone, with a batch of train_data(): if it raises the same, fix that first; if "
        f"not, fxpipe cannot capture it yet ({origin.version_hint()})",
    )


def _cause(error: Exception, message: str, call: str) -> Refusal | None:
    """The refusal for an error's text, the torch function that raised it, and the frames it came through."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    codes = [frame.f_code for frame in frames]
    if "DynamicOutputShape" in message:
        return CTC if "_ctc_loss" in message else SHAPE
    if any(code.co_name == "_detect_is_causal_mask" for code in codes):
        return CAUSAL
    if any(code.co_name == "gaussian_nll_loss" for code in codes):
        return VARIANCE
    if any(_IN_NESTED.search(code.co_filename) for code in codes):
        return NESTED
    if any(map(_counts_steps, frames)):
        return AVERAGE
    if "__format__" in message or (call == "tensor" and "not allocated" in message):  # torch.tensor([x[0], x[1]])
        return NUMBER
    if call in ("numpy", "__array__"):
        return NUMPY
    if any("_higher_order_ops" in c.co_filename.split(os.sep) or "flex_attention" in c.co_filename for c in codes):
        return HIGHER
    if re.search(DATA_DEPENDENT, message):
        branches = call not in _NUMBERS or any(code.co_name == "__bool__" for code in codes)
        return BRANCH if branches else NUMBER
    return next((cause for cause in CAUSES if re.search(cause.pattern, message)), None)


def _counts_steps(frame: FrameType) -> bool:
    """Whether a call is of a batch norm that averages over all steps."""
    module = frame.f_locals.get("self")
    return isinstance(module, NormBase) and module.momentum is None


def dense(tensors: HeldTensors) -> None:
    """Refuse a tensor of the model that is not a dense block of values."""
    for names, tensor in zip(tensors.names, tensors.values, strict=True):
        if kind := unusual(tensor):
            raise CaptureError(
                f"{names[0]} is {kind}, which cannot be cut into stages",
                hint="use dense tensors (.to_dense()), or the model before it was quantized or wrapped",
                page="tensor-kinds",
            )


def within_backward(parameter: str | None, where: str | None) -> None:
    """Refuse a parameter as a constant of the backward: what a Function computes with it would bypass the graph."""
    if parameter is not None:
        raise CaptureError(
            f"the backward of an autograd.Function computes with parameter {parameter} again, as reversible blocks do: "
            "its gradient would bypass the graph",
            where=where,
            hint="call the blocks as ordinary modules, without the Function; torch.utils.checkpoint.checkpoint around "
            "each of them saves the memory, too",
            page="backward",
        )


def own_gradients(loss: torch.Tensor, watch: origin.TracedStep, tensors: HeldTensors) -> None:
    """Refuse a gradient with respect to a tensor that is no parameter of the model: for capture it is a constant."""
    outside = watch.calls.outside
    for node in _behind(loss) if outside else ():
        leaf = id(getattr(node, "variable", None))
        if leaf in outside or (hasattr(node, "variable") and is_outside(node.variable)):
            tensor, where = outside.get(leaf) or next(iter(outside.values()))
            name = tensors.python.name_of(tensor) or f"a tensor of shape {list(tensor.shape)}"
            raise CaptureError(
                f"{name} requires a gradient of the loss and is not in the model: it would never be trained",
                where=where,
                hint="make it part of the model, so that the optimizer gets it: model.criterion = criterion, "
                "self.scale = nn.Parameter(...), nn.ModuleList for a list; if it is not to be trained, call "
                "requires_grad_(False) on it",
                page="outside-parameters",
            )


def own_functions(loss: torch.Tensor) -> list[str]:
    """The names of the user's autograd.Functions behind the loss, such as `Written`."""
    kinds: dict[Any, None] = dict.fromkeys(type(node) for node in _behind(loss) if isinstance(node, BackwardCFunction))
    ours = (BackwardHookFunction, Layer)
    return [written_as(kind).__qualname__ for kind in kinds if written_as(kind) not in ours]


def _behind(tensor: torch.Tensor) -> Iterator[Any]:
    """All nodes of autograd's graph behind a tensor, each once."""
    waiting: list[Any] = [tensor.grad_fn]
    seen = {None, *waiting}
    while waiting:
        node = waiting.pop()
        if node is not None:
            yield node
        next_nodes = {function for function, _ in getattr(node, "next_functions", ())} - seen
        seen |= next_nodes
        waiting.extend(next_nodes)


def scalar(loss: Any, where: str | None) -> torch.Tensor:
    """The loss, checked to be one that can be trained on: a scalar tensor that depends on a parameter."""
    if not isinstance(loss, torch.Tensor):
        raise CaptureError(
            f"loss(model, batch) returned {type(loss).__name__}, not a tensor",
            where=where,
            hint="return one scalar tensor: of a model's output that holds one, `return output.loss`",
            page="cache-outputs",
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

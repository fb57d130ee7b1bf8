"""Why a step cannot be captured, in the user's terms: what torch says, turned into a cause, a place and a cure."""

from __future__ import annotations

import re
from typing import Any

import torch

from fxpipe import origin
from fxpipe.errors import CaptureError

_USER_ERRORS = (AttributeError, KeyError, IndexError, NameError, TypeError)

DATA_DEPENDENT = (
    r"_local_scalar_dense|DataDependent|data-dependent|Could not guard|Could not extract|\.item\(\)|nonzero"
    r"|DynamicOutputShape"
)

CAUSES = (
    (
        r"mirrored meta",
        "the step calls backward() itself",
        "return the loss: the backward pass is captured with it",
    ),
    (
        DATA_DEPENDENT,
        "the step depends on the values of a tensor: one graph cannot hold `if tensor`, .item() or a shape from data",
        "compute both branches and choose with torch.where, or move the decision into train_data(); if the line only "
        "calls a module, the test is inside it: attention masks need is_causal=True beside the mask",
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


def explain(error: Exception) -> CaptureError:
    """The error that a failed trace becomes, with the user's line."""
    said = f"{type(error).__name__}: {error}"
    where = origin.user_traceback(error)
    for pattern, cause, cure in CAUSES:
        if re.search(pattern, said):
            return CaptureError(cause, where=where, hint=cure)
    first = said.strip().splitlines()[0][:300]
    if isinstance(error, _USER_ERRORS):
        return CaptureError(f"the step raised {first}", where=where)
    return CaptureError(
        f"tracing the step failed: {first}",
        where=where,
        hint="if the step fails in eager mode too, mend that first; if not, fxpipe cannot capture it yet ("
        + origin.version_hint()
        + ")",
    )


def scalar(loss: Any, where: str | None) -> torch.Tensor:
    """The loss, if it is one that can be trained on.

    Raises:
        CaptureError: it is no tensor, no scalar, or depends on no parameter.
    """
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

"""Gradients that a step itself computes, for a gradient penalty or a force: the backward of other operators."""

from __future__ import annotations

from typing import Any

from fxpipe.passes.analysis.share import Known, Rows
from fxpipe.passes.analysis.share_rules.call import (
    MEAN,
    SUM,
    OperatorCall,
    Rule,
    by_elements,
    common_rows,
    unknown,
)


def _placed(call: OperatorCall) -> Known:
    """The gradient of a select or a slice, placed into zeros."""
    share: Known = call.known(call.get("grad_output"))
    if not isinstance(share, Rows):
        return share if share in (SUM, MEAN) else unknown(call)
    dim = call.get("dim") % len(call.shape())
    if call.name == "select_backward":
        return Rows(share.dim + (dim <= share.dim), share.outer)
    return share if dim != share.dim else call.lost("takes some samples of the batch")


def _loss(call: OperatorCall) -> Known:
    """An element-wise loss: a mean over one microbatch divides by a number that is not the whole batch's."""
    if call.get("reduction") == 1:
        return call.lost("divides by the size of one microbatch")
    return common_rows(call, call.tensors, call.shape()) or unknown(call)


def _likelihood(call: OperatorCall) -> Known:
    rows = call.known(call.get("self"))
    others = [call.get(name) for name in ("grad_output", "target")]
    fits = isinstance(rows, Rows) and rows.dim == 0 and all(call.known(n) == rows or call.whole(n) for n in others)
    if call.get("reduction") == 1 or not fits:
        return call.lost("divides by the size of one microbatch, or has targets that are not rows of the batch")
    return rows


def _layer(call: OperatorCall) -> Any:
    """A layer whose first dimension is the batch: the gradients of its weights are sums over it."""
    rows = {call.known(n) for n in call.tensors if isinstance(call.known(n), Rows)}
    if rows != {Rows(0)} or not all(isinstance(call.known(n), Rows) or call.whole(n) for n in call.tensors):
        return unknown(call)
    return (Rows(0), SUM, SUM)


def _table(call: OperatorCall) -> Known:
    grad, indices = call.known(call.get("grad_output")), call.known(call.get("indices"))
    if isinstance(grad, Rows) and grad == indices and not call.get("scale_grad_by_freq"):
        return SUM
    return unknown(call)


RULES: tuple[tuple[Rule, str], ...] = (
    (by_elements, "elu_backward leaky_relu_backward hardtanh_backward softplus_backward mish_backward"),
    (
        by_elements,
        "log_sigmoid_backward hardsigmoid_backward hardswish_backward hardshrink_backward softshrink_backward",
    ),
    (_placed, "select_backward slice_backward"),
    (_loss, "mse_loss_backward smooth_l1_loss_backward huber_loss_backward soft_margin_loss_backward"),
    (_loss, "binary_cross_entropy_backward"),
    (_likelihood, "nll_loss_backward nll_loss2d_backward"),
    (_layer, "native_layer_norm_backward convolution_backward native_group_norm_backward"),
    (_table, "embedding_dense_backward"),
)

"""Sums, means and what is computed from them: the rules that make a loss."""

from __future__ import annotations

from math import isclose
from typing import Any

import torch
from torch import fx

from fxpipe.ir.aten import is_getitem
from fxpipe.ir.program import is_call_of, value
from fxpipe.passes.analysis.share import Known, Lost, Rows, Share
from fxpipe.passes.analysis.share_rules.call import (
    MEAN,
    SAME,
    SUM,
    UNIFORM,
    OperatorCall,
    Rule,
    by_elements,
    common_rows,
    made_of_totals,
    new_places,
    not_linear,
    operator_of,
    reduced_dims,
    without_rows,
)
from fxpipe.passes.analysis.whole_call import arguments_of, changed_arguments
from fxpipe.torch_private import schema_of


def _drawn(call: OperatorCall) -> Known:
    """Filled, or drawn, in the shape of an argument; `same_of` handles what is made from nothing."""
    return next((k for n in call.tensors if isinstance(k := call.known(n), Rows)), UNIFORM)


def _filled(call: OperatorCall) -> Known:
    """Filled in a shape of its own."""
    return UNIFORM


def _filled_with(call: OperatorCall) -> Known:
    """Filled in the shape of an argument, with a number or with another tensor's one element."""
    filler, rows = call.get("value"), call.known(call.get("self"))
    if not isinstance(filler, fx.Node) or call.whole(filler):
        return rows if isinstance(rows, Rows) else UNIFORM
    share: Known = call.known(filler)
    return share if share in (SUM, MEAN) else call.lost("is filled with one sample")


def _linear(call: OperatorCall) -> Known:
    """A call that is linear in its last tensor, and works element by element.

    The last one is the only one, except for `copy`, whose first is overwritten.
    """
    source = call.tensors[-1]
    share = call.known(source)
    return share if share in (SUM, MEAN) and _keeps(call, source) else by_elements(call)


def _complex(call: OperatorCall) -> Known:
    """Complex numbers as pairs of real ones, in one more dimension behind the others, or back."""
    share: Known = call.known(call.tensors[0])
    if not isinstance(share, Rows):
        return without_rows(call) or share
    return share if share.dim < len(call.shape()) else call.lost("divides the batch")


def _keeps(call: OperatorCall, source: fx.Node) -> bool:
    """Whether numbers keep their values in the result's dtype: no fraction is lost, no count becomes a flag."""
    result = value(call.node)
    return result.is_floating_point() or not (value(source).is_floating_point() or result.dtype == torch.bool)


def _add(call: OperatorCall) -> Known:
    shares = {call.known(n) for n in call.tensors}
    if any(isinstance(s, Rows) for s in shares):
        return by_elements(call)
    scalars = len(call.tensors) == 1 and not isinstance(call.get("other"), fx.Node)
    if shares == {SUM} and not scalars:
        return SUM
    if SUM not in shares and MEAN in shares:
        return MEAN  # what is the same in every microbatch is its own mean
    if (same := without_rows(call)) is not None:
        return same
    divided = [_divisible(call, n) for n in call.tensors if call.known(n) is not SUM]
    if (scalars and not call.facts.parts) or not value(call.node).is_floating_point() or None in divided:
        return call.lost("adds a sum over the batch to something else")
    if scalars:
        number: Any = changed_arguments(call.node).get(1, call.node.args[1])
        call.facts.numbers[call.node] = {1: number / call.facts.parts}
    call.facts.divided[call.node] = [pair for pairs in divided if pairs for pair in pairs]
    return SUM


def _divisible(call: OperatorCall, node: fx.Node) -> list[tuple[fx.Node, fx.Node]] | None:
    """The values that must be divided for an argument to be divided, each with the call that reads it.

    None if one's gradient cannot be separated from others': it is read elsewhere, too, or is itself a parameter.
    """
    if isinstance(call.known(node), Lost) or node.op != "call_function":
        return None
    if node not in call.facts.backward.depends:
        return [(node, call.node)]
    readers = [u for u in node.users if is_call_of(u, "F")]
    if [u for u in readers if u not in call.facts.passed_over] != [call.node]:
        return None
    if operator_of(node) in ("add", "sub") and len(node.all_input_nodes) == 2:
        inner = OperatorCall(call.facts, node)
        parts = [_divisible(inner, n) for n in node.all_input_nodes]
        return None if None in parts else [pair for pairs in parts if pairs for pair in pairs]
    return [(node, call.node)] if call.facts.backward.alone(node) else None


def _mul(call: OperatorCall) -> Known:
    tensors = call.tensors
    shares = [call.known(n) for n in tensors]
    if any(isinstance(s, Rows) for s in shares):
        return by_elements(call)
    if len(tensors) == 1:
        return _by_number(call, tensors[0]) or _linear(call)
    for linear, factor in (tensors, tensors[::-1]):
        if call.known(linear) in (SUM, MEAN) and linear not in call.facts.alone and call.whole(factor):
            return _scaled(call, linear, factor)
    return without_rows(call) or call.lost("multiplies sums over the batch")


def _div(call: OperatorCall) -> Known:
    over, by = call.get("self"), call.get("other")
    share = call.known(over)
    if share not in (SUM, MEAN):
        return by_elements(call)
    rounding = "rounding_mode" in {a.name for a in schema_of(call.node.target).arguments} and call.get("rounding_mode")
    if not rounding and not isinstance(by, fx.Node):
        return _by_number(call, over) or share
    if not rounding and over not in call.facts.alone and call.whole(by):
        return _scaled(call, over, by)
    return without_rows(call) or call.lost("divides by a sum over the batch that depends on the weights")


def _scaled(call: OperatorCall, linear: fx.Node, factor: fx.Node) -> Known:
    """A sum or a mean, times or over a value that is the same in every microbatch."""
    if call.known(linear) is SUM and made_of_totals(call.facts, factor):
        call.facts.factors[call.node] = factor
        return MEAN
    return call.known(linear)


def _by_number(call: OperatorCall, over: fx.Node) -> Known | None:
    """A sum times or over a number: a mean if the number depends on how many samples there are; None for others."""
    place, number = next((p, a) for p, a in arguments_of(call.node).items() if isinstance(a, (int, float)))
    divides = call.name == "div"
    if call.known(over) is not SUM:
        return None
    if not call.facts.parts:
        return MEAN if divides and _counts(call, over, number) else None
    whole = changed_arguments(call.node).get(place)
    if not whole:
        return None
    if number and isclose(whole / number if divides else number / whole, call.facts.parts):
        call.facts.kept.add(call.node)
    else:
        call.facts.numbers[call.node] = {place: whole / call.facts.parts if divides else whole * call.facts.parts}
    return MEAN


def _counts(call: OperatorCall, node: fx.Node, number: Any) -> bool:
    """Whether a number could be how many samples, or their elements, were added up: `x.sum() / 8` does not show it."""
    while node.op == "call_function" and not isinstance(call.known(node.all_input_nodes[0]), Rows):
        node = node.all_input_nodes[0]
    if node.op != "call_function":
        return False
    added = value(node.all_input_nodes[0]).numel()
    return float(number).is_integer() and number > 0 and number % call.facts.batch == 0 and added % number == 0


def _reduction(over_batch: Share | None) -> Rule:
    """A reduction over dimensions; over the batch it is `over_batch`, or lost."""

    def rule(call: OperatorCall) -> Known:
        source = call.tensors[0]
        share = call.known(source)
        if not isinstance(share, Rows):
            if share in (SUM, MEAN) and over_batch is not None and _keeps(call, source):
                return share
            return without_rows(call) or not_linear(call)
        if share.dim in reduced_dims(call, len(call.shape(source))):
            if over_batch is None:
                return call.lost("is not a sum or a mean, and goes over the samples of the batch")
            return over_batch
        at = new_places(call)[share.dim]
        assert at is not None
        return Rows(at, share.outer)

    return rule


def _count(call: OperatorCall) -> Known:
    """How many are not 0: a sum for samples, unknown for sums."""
    rows = isinstance(call.known(call.tensors[0]), Rows)
    return _reduction(SUM if rows else None)(call)


def _loss(call: OperatorCall) -> Known:
    """An element-wise loss with a `reduction`: 0 none, 1 mean, 2 sum."""
    rows = common_rows(call, call.tensors, torch.broadcast_shapes(*(call.shape(n) for n in call.tensors)))
    if not isinstance(rows, Rows):
        return rows or without_rows(call) or not_linear(call)
    return (rows, MEAN, SUM)[call.get("reduction")]


def _nll(call: OperatorCall) -> Any:
    """The negative log-likelihood; its mean is over the targets' weights, which the whole minibatch must give."""
    scores, target, weight = (call.get(name) for name in ("self", "target", "weight"))
    rows, of_target, reduction = call.known(scores), call.known(target), call.get("reduction")
    if not isinstance(rows, Rows) or rows.dim != 0 or of_target not in (rows, UNIFORM):
        return without_rows(call) or call.lost("has targets that are not rows of the batch")
    if weight is not None and not (weight in call.facts.alone and call.whole(weight)):
        return call.lost("weights classes by values that are not constant")
    if reduction == 1 and target in call.facts.alone:
        call.facts.likelihoods.append(call.node)
    elif reduction == 1 and (weight is not None or not _is_class(target) or call.get("ignore_index") >= 0):
        return call.lost("has targets that depend on the weights, and may ignore some of them")
    return ((rows, SAME), (MEAN, SAME), (SUM, SUM))[reduction]


def _margins(call: OperatorCall) -> Any:
    """Margins between a sample's scores: the scores of the classes, or of the one class, that its targets name."""
    scores, target = call.known(call.get("self")), call.known(call.get("target"))
    weighed = all(call.whole(n) for n in call.tensors[2:])
    if scores != Rows(0) or target != scores or not weighed or len(call.shape(call.get("self"))) != 2:
        return without_rows(call) or call.lost("has targets that are not rows of the batch")
    share = (scores, MEAN, SUM)[call.get("reduction")]
    return (share, scores) if call.name == "multilabel_margin_loss_forward" else share


def _is_class(target: fx.Node) -> bool:
    """Whether targets are positions of largest scores, so that none is negative."""
    while target.op == "call_function" and operator_of(target) in _VIEWS:
        target = target.all_input_nodes[0]
    if is_getitem(target):
        return bool(target.args[1] == 1) and operator_of(target.all_input_nodes[0]) in ("max", "topk", "sort")
    return target.op == "call_function" and operator_of(target) == "argmax"


_VIEWS = ["view", "_unsafe_view", "transpose", "permute", "t", "select", "squeeze", "unsqueeze", "clone", "detach"]

RULES: tuple[tuple[Rule, str], ...] = (
    (_drawn, "ones_like zeros_like full_like empty_like rand_like randn_like randint_like"),
    (_filled_with, "fill"),
    (_filled, "new_ones new_zeros new_full new_empty"),
    (_linear, "neg clone _to_copy alias detach lift_fresh_copy copy"),
    (_complex, "view_as_real view_as_complex"),
    (_add, "add sub rsub"),
    (_mul, "mul"),
    (_div, "div"),
    (_reduction(SUM), "sum"),
    (_count, "count_nonzero"),
    (_reduction(MEAN), "mean"),
    (
        _reduction(None),
        "amax amin max min argmax argmin any all prod logsumexp norm linalg_vector_norm var std var_mean",
    ),
    (_reduction(None), "std_mean median nanmedian mode aminmax kthvalue"),
    (_loss, "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits"),
    (_loss, "soft_margin_loss kl_div"),
    (_margins, "multi_margin_loss multilabel_margin_loss_forward"),
    (_nll, "nll_loss_forward nll_loss2d_forward"),
    (by_elements, "bernoulli normal native_dropout where masked_fill clamp pow poisson binomial _standard_gamma"),
    (by_elements, "hardswish log_sigmoid_forward _prelu_kernel floor_divide special_i0"),
    (by_elements, "polar complex real imag _conj conj_physical"),
    (by_elements, "rrelu_with_noise rrelu_with_noise_functional"),
)

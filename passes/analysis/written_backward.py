"""What the user's own code makes of gradients: hooks, and the backward of an autograd.Function.

Autograd's formulas need no rule: they are derivatives of forward calls, whose shares are derived. The user's code may
be anything. The gradient that it gets in a microbatch is as many times too large as there are microbatches, if the loss
is a mean, so what it makes of it must be linear, and the same for each sample.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fxpipe.passes.analysis.share import Lost, Microbatches, Rows, Share, fits
from fxpipe.passes.analysis.share_rules import OperatorCall, is_same, operator_of, rule_of, same_of
from fxpipe.passes.analysis.whole_call import changed_arguments, computes_nothing, shapes_of, whole_shape
from torch import fx

from fxpipe.ir.aten import is_getitem
from fxpipe.ir.program import WRITTEN, info, value

WHY = "the backward that a hook or an autograd.Function has"


def of_written_backward(found: Microbatches) -> Lost | None:
    """Why the user's backward code is not known to give the whole batch's gradient; None if it is, or there is none.

    Args:
        found: what is known of forward values.
    """
    if (constant := _constant_gradient(found)) is not None:
        return constant
    written = [n for n in found.program if WRITTEN in n.meta]
    if not written:
        return None
    # In backward, nothing can be made a total any more.
    derivation = _Derivation(replace(found, known=dict(found.known), alone=set(), totals=dict(found.totals)))
    return next((lost for node in written if (lost := derivation.lost(node)) is not None), None)


def _constant_gradient(found: Microbatches) -> Lost | None:
    """What gives a gradient without the loss's: a backward may return what its forward has saved, and call nothing."""
    program, begin = found.program, [n for n in found.program if n.name == "d_loss"]
    depends = set(begin)
    for node in program:
        if not depends.isdisjoint(node.all_input_nodes):
            depends.add(node)
            added = node.all_input_nodes if node.meta.get("accumulates") and WRITTEN not in node.meta else ()
            if any(n not in depends and not _is_zeros(n) for n in added):
                return Lost(f"{WHY}: gives a gradient that does not depend on the loss, added to others", node.name)
    for output, node in zip(program.outputs, program.output_nodes, strict=True):
        if begin and output.kind == "gradient" and node not in depends and not _is_zeros(node):
            return Lost(f"{WHY}: gives {output.target} a gradient that does not depend on the loss", node.name)
    return None


def _is_zeros(node: fx.Node) -> bool:
    while node.op == "call_function" and computes_nothing(node):
        node = node.all_input_nodes[0]
    return operator_of(node) in ("zeros", "new_zeros", "zeros_like")


class _Derivation:
    """What is known of backward values, from call to call.

    Attributes:
        found: with what is known of forward values.
        gradients: the values that are computed from gradients.
    """

    def __init__(self, found: Microbatches) -> None:
        self.found = found
        self.gradients: set[fx.Node] = set()
        self.constants = {b.node for b in found.program.buffers if b.constant}

    def lost(self, node: fx.Node) -> Lost | None:
        """Derive what a call makes, or say why it cannot be."""
        for given in node.all_input_nodes:
            if given not in self.found.known:
                self.found.known[given] = self._incoming(given)
                self.gradients.add(given)
        known = self._known(node)
        shares = known if isinstance(known, tuple) else (known,)
        lost = next((share for share in shares if isinstance(share, Lost)), None)
        outside = any(WRITTEN not in user.meta for user in node.users)
        if lost is None and outside and node not in self.gradients:
            lost = Lost("gives a gradient that does not depend on the one it gets", node.name)
        self.found.known[node] = known
        return None if lost is None else Lost(f"{WHY} ({node.meta[WRITTEN]}): {lost.why}", node.name)

    def _incoming(self, node: fx.Node) -> Any:
        """A gradient that autograd computed: the shapes say of what."""
        own, whole = tuple(value(node).shape), whole_shape(node)
        if own == whole:
            return Share.SUM
        rows = [Rows(d) for d in range(len(own)) if whole and fits(Rows(d), own, whole, self.found.parts)]
        if not rows:
            return Lost("gets a gradient that the whole batch has none like", node.name)
        number = node.meta.get("seq_nr")
        forward = (n for n in self.found.program if info(n).phase == "F" and n.meta.get("seq_nr") == number)
        alike = (k for n in forward if isinstance(k := self.found.known[n], Rows) and tuple(value(n).shape) == own)
        return next((k for k in alike if k.dim == rows[0].dim), rows[0])

    def _known(self, node: fx.Node) -> Any:
        inputs, known = node.all_input_nodes, self.found.known
        gradients = [n for n in inputs if n in self.gradients and not _only_shape(node)]
        if gradients:
            self.gradients.add(node)
        if is_getitem(node):
            several = known[inputs[0]]
            return several[node.args[1]] if isinstance(several, tuple) else several  # type: ignore[index]
        lost = next((known[n] for n in inputs if isinstance(known[n], Lost)), None)
        if lost is not None or computes_nothing(node):
            return lost or known[inputs[-1]]
        call = OperatorCall(self.found, node)
        if any(not isinstance(a, (list, tuple)) for a in changed_arguments(node).values()):
            return Lost("takes a number that depends on how many samples there are", node.name)
        if gradients and not self._is_linear(call):
            return Lost(f"{call.name} is not known to be linear in the gradient", node.name)
        made = same_of(call) if all(is_same(known[n]) for n in inputs) else rule_of(node)(call)
        if gradients and made is Share.MEAN:
            return Lost(f"{call.name} is a mean over gradients", node.name)
        shares = made if isinstance(made, tuple) else (made,)
        whole = whole_shape(node)
        own = shapes_of(value(node))[0] or ()
        if whole is None or not fits(shares[0], own, whole, self.found.parts):
            return Lost(f"{call.name} makes other shapes on the whole batch", node.name)
        return made

    def _is_linear(self, call: OperatorCall) -> bool:
        """Whether a call is linear in the gradients among its arguments."""
        given = [n in self.gradients for n in call.tensors]
        first = given[0] and not any(given[1:])
        if call.name in ("add", "sub", "cat", "stack"):
            linear = all(n in self.gradients or self._is_zero(n) for n in call.tensors)
            return linear and (call.name not in ("add", "sub") or len(given) == 2)
        if call.name == "where":
            return not given[0] and all(n in self.gradients or self._is_zero(n) for n in call.tensors[1:])
        if call.name == "masked_fill":
            return first and self._is_zero(call.get("value"))
        if call.name == "index_put":
            return first and self._is_zero(call.get("values")) and not call.get("accumulate")
        if call.name in ("mul", "mm", "bmm", "mv", "dot"):
            return sum(given) == 1
        if call.name == "convolution" and call.get("bias") is not None:
            return False
        return first and (call.name in _LINEAR or call.name.endswith("_backward"))

    def _is_zero(self, given: Any) -> bool:
        if not isinstance(given, fx.Node):
            return bool(given == 0)
        while given.op == "call_function" and computes_nothing(given):
            given = given.all_input_nodes[0]
        if given.op != "call_function":
            return given.name in self.constants and not self.found.program.values[given.name].any()
        place = _FILLED.get(operator_of(given), -1)
        return place is None or (place >= 0 and given.args[place] == 0)


_FILLED = {"zeros_like": None, "new_zeros": None, "zeros": None, "full": 1, "full_like": 1, "new_full": 2}
"""What fills a tensor with 0, or with which of its arguments."""


def _only_shape(node: fx.Node) -> bool:
    """Whether it takes a tensor's shape and not its values."""
    name = operator_of(node)
    return name.endswith("_like") or name.startswith("new_")


_LINEAR = {
    "neg", "div", "clone", "_to_copy", "alias", "detach", "view", "_unsafe_view", "expand", "permute", "transpose", "t",
    "squeeze", "unsqueeze", "select", "slice", "unbind", "split", "split_with_sizes", "sum", "mean", "repeat", "flip",
    "roll", "cumsum", "index_select", "index", "gather", "tril", "triu", "convolution", "as_strided", "lift_fresh_copy",
}  # fmt: skip

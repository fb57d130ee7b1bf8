"""fold: drop what computes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from fxpipe.ir.aten import is_random, is_view, repeats
from fxpipe.ir.program import INFO, Level, Program, info, size_of, value
from fxpipe.ir.transform import Pass
from fxpipe.torch_private import schema_of

aten = torch.ops.aten

# A lazy conjugation or negation is a mark on a tensor, which is lost when the tensor travels. Repeating it would then
# set the mark instead of removing it, and some operators, such as view_as_real, refuse marked tensors.
_COMPUTED = {aten._conj.default: aten.conj_physical.default, aten._neg_view.default: aten.neg.default}

_ATTENTIONS = {
    aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
    aten._scaled_dot_product_cudnn_attention_backward.default,
}


@dataclass(frozen=True)
class Fold(Pass):
    """Remove no-ops and dead nodes.

    Before:                                     After:
        d = aten.detach.default(x)                  y = aten.relu.default(x)
        y = aten.relu.default(d)                    g = aten.mm.default(dy, w)
        wt = aten.t.default(w)
        g = aten.mm.default(dy, aten.t.default(wt))

    The transposed transpose matters: autograd reads the forward's view of a weight in backward, and a backward must
    derive everything from the weights that its policy gives it. A conjugation that undoes another, past a view, is
    computed.
    """

    name: ClassVar[str] = "fold"
    requires: ClassVar[Level] = Level.CAPTURED
    provides: ClassVar[Level] = Level.FOLDED

    def __call__(self, program: Program) -> Program:
        program = program.copy(level=self.provides)
        for node in list(program):
            same = repeats(node)
            if same is not None:
                node.replace_all_uses_with(same)
                program.graph.erase_node(node)
            elif node.target is aten.as_strided.default:
                _stride_over_base(node)
            elif node.target is aten.native_batch_norm_backward.default:
                _forget_running_statistics(node)
            elif node.target in _ATTENTIONS:
                _forget_seeds(node)
            elif node.target in _COMPUTED and not (value(node).is_conj() or value(node).is_neg()):
                node.target = _COMPUTED[node.target]
        remove_dead(program.graph)
        return program


def _stride_over_base(node: fx.Node) -> None:
    """as_strided indexes its input's memory: let it read all of it, not a slice that may travel as a copy."""
    base = node.args[0]
    assert isinstance(base, fx.Node)
    offset = node.args[3] if len(node.args) > 3 else node.kwargs.get("storage_offset")
    if offset is None:
        offset = value(base).storage_offset()
    while base.op == "call_function" and is_view(base):
        base = base.all_input_nodes[0]
    if isinstance(value(base), torch.Tensor):
        node.args = (base, *node.args[1:3], offset)
        node.kwargs = {}


def _forget_running_statistics(node: fx.Node) -> None:
    """In train mode the backward of batch norm takes the running statistics and does not read them."""
    train = node.args[7]
    if train:
        node.args = (*node.args[:3], None, None, *node.args[5:])


def _forget_seeds(node: fx.Node) -> None:
    """Without dropout the backward of attention takes the forward's random seed and does not read it."""
    places = {argument.name: i for i, argument in enumerate(schema_of(node.target).arguments)}
    if node.args[places["dropout_p"]] != 0:
        return
    for name in ("philox_seed", "philox_offset"):
        seed = node.args[places[name]]
        assert isinstance(seed, fx.Node)
        shown = value(seed)
        options = {"dtype": shown.dtype, "device": torch.device(shown.device.type)}
        with node.graph.inserting_before(node):
            zeros = node.graph.call_function(aten.zeros.default, (list(shown.shape),), options)
        zeros.meta = {**node.meta, "val": shown.new_zeros(shown.shape), INFO: info(node).copy()}
        zeros.meta[INFO].bytes = size_of(shown)
        node.update_arg(places[name], zeros)


def remove_dead(graph: fx.Graph) -> None:
    """Erase every call whose value nothing reads, except random draws: without one, the next draw would differ."""
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and not is_random(node):
            graph.erase_node(node)

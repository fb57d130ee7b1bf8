"""How values are laid out in memory, and whether a kernel gives its result the strides that fake tensors predict."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from fxpipe.ir.aten import is_getitem, is_view
from fxpipe.torch_private import OpOverload, is_non_overlapping_and_dense_or_false, pytree
from fxpipe.tracing.fake_strides import is_corrected

aten = torch.ops.aten

# Whatever the layout of their inputs. zoo/test_layouts.py compares all of them with their kernels on the CPU.
_UNSURE = frozenset({  # elementwise, but with other strides than predicted
    aten.copysign.Tensor, aten.div.Tensor_mode, aten.heaviside.default, aten.ldexp.Tensor, aten.logaddexp.default,
    aten.logaddexp2.default, aten.logical_and.default, aten.logical_or.default, aten.logical_xor.default,
    aten.logit_backward.default, aten.pow.Scalar, aten.special_xlog1py.default, aten.xlogy.Tensor,
})  # fmt: skip
PRODUCTS = frozenset({aten.addmm.default, aten.baddbmm.default, aten.bmm.default, aten.mm.default})
ON_CPU = frozenset({
    # networks
    aten._adaptive_avg_pool2d.default, aten._adaptive_avg_pool2d_backward.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    aten.avg_pool2d.default, aten.avg_pool2d_backward.default,
    aten.convolution.default, aten.convolution_backward.default,
    aten.embedding.default, aten.embedding_dense_backward.default,
    aten.max_pool2d_with_indices.default, aten.max_pool2d_with_indices_backward.default,
    aten.native_layer_norm.default,
    # reductions and operators along a dimension
    aten._log_softmax.default, aten._softmax.default, aten._softmax_backward_data.default,
    aten.amax.default, aten.cumsum.default, aten.linalg_vector_norm.default, aten.logsumexp.default,
    aten.mean.dim, aten.sum.dim_IntList,
    # copies and parts of them
    aten._to_copy.default, aten.cat.default, aten.constant_pad_nd.default, aten.copy.default, aten.flip.default,
    aten.index_add.default, aten.index_select.default, aten.new_zeros.default, aten.repeat.default,
    aten.scatter_add.default, aten.select_backward.default, aten.slice_backward.default, aten.slice_scatter.default,
    aten.stack.default,
})  # fmt: skip


def is_predicted(node: fx.Node) -> bool:
    """Whether a value certainly has the predicted strides, if the inputs of its call have theirs."""
    call = node.all_input_nodes[0] if is_getitem(node) else node
    if not isinstance(call.target, OpOverload) or is_view(call):
        return True
    return predicts(call.target, (v for n in call.all_input_nodes for v in pytree.tree_leaves(n.meta.get("val"))))


def predicts(operator: OpOverload, inputs: Iterable[object]) -> bool:
    """Whether fake tensors predict the kernel's strides for the result of an operator on these inputs.

    They do if torch computes elementwise, if kernels were compared, or if all inputs are contiguous, which torch's own
    tests cover. The fake implementations of other libraries seldom predict more than a guess.
    """
    if operator.namespace not in ("aten", "prims"):
        return False
    if operator in PRODUCTS or (torch.Tag.pointwise in operator.tags and operator not in _UNSURE):
        return True
    tensors = [v for v in inputs if isinstance(v, torch.Tensor)]
    device = tensors[0].device.type if tensors else "cpu"
    if is_corrected(operator, device) or (device == "cpu" and operator in ON_CPU):
        return True
    return all(v.layout != torch.strided or v.is_contiguous() for v in tensors)


def is_block(tensor: object) -> bool:
    """Whether it fills one block of memory, without gaps or overlaps, in any order of its dimensions."""
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
        return False
    return sum(size > 1 for size in tensor.shape) > 1 and is_non_overlapping_and_dense_or_false(tensor)


def order_in_memory(tensor: torch.Tensor) -> list[int]:
    """The dimensions of a block, outermost first."""
    stride = tensor.stride()
    return sorted(range(tensor.dim()), key=lambda d: (-stride[d], tensor.shape[d] == 1, d))


def same_strides(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one shape have the same strides, in all dimensions where strides matter."""
    return all(x == y for x, y, size in zip(a.stride(), b.stride(), a.shape, strict=True) if size > 1)

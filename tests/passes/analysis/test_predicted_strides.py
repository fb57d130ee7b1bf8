"""Which layouts are certain: what torch computes element by element is predicted as its kernels give it."""

from __future__ import annotations

import logging

import pytest
import torch
from relaid_calls import mispredicted, pointwise_calls
from torch import Tensor
from wrong_layouts import packed

from fxpipe.passes.analysis.predicted_strides import is_block, order_in_memory, predicts, same_strides
from fxpipe.tracing.fake_strides import KernelStrides

aten = torch.ops.aten
TRANSPOSED = torch.rand(2, 4, 3).transpose(1, 2)


@pytest.mark.slow
def test_pointwise_operators_are_foretold_as_their_kernels_give_them() -> None:
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    mode = KernelStrides()
    count, wrong = 0, []
    for call in pointwise_calls():
        count += 1
        wrong += mispredicted(call, mode, lambda c: predicts(c.operator, c.tensors))
    assert count > 150
    assert not wrong, "\n".join(wrong[:40])


@pytest.mark.parametrize(
    ("operator", "tensor", "certain"),
    [
        (aten.tanh.default, TRANSPOSED, True),
        (aten.mm.default, TRANSPOSED[0], True),
        (aten.native_group_norm.default, TRANSPOSED, True),
        (aten.native_group_norm.default, TRANSPOSED.to("meta"), False),
        (aten.native_group_norm.default, TRANSPOSED.contiguous(), True),
        (aten.index.Tensor, TRANSPOSED, False),
        (aten.native_batch_norm_backward.default, TRANSPOSED, True),
        (aten._native_batch_norm_legit.no_stats, TRANSPOSED, True),
        (aten._native_batch_norm_legit.no_stats, TRANSPOSED.to("meta"), False),
        (aten.sum.dim_IntList, TRANSPOSED, True),
        (aten.sum.dim_IntList, TRANSPOSED.to("meta"), False),
        (torch.ops.fxpipe_test.packed.default, TRANSPOSED.contiguous(), False),
        (aten.ones.default, None, True),
    ],
)
def test_what_is_certain(operator: torch._ops.OpOverload, tensor: Tensor | None, certain: bool) -> None:
    assert packed is not None  # its import defines the operator
    assert predicts(operator, [tensor]) == certain


@pytest.mark.parametrize(
    ("tensor", "order"),
    [
        (torch.rand(2, 3, 4), [0, 1, 2]),
        (TRANSPOSED, [0, 2, 1]),
        (torch.rand(2, 1, 4, 5).contiguous(memory_format=torch.channels_last), [0, 1, 2, 3]),
        (torch.empty(2, 1, 4, 5, memory_format=torch.channels_last), [0, 2, 3, 1]),
        (torch.empty(2, 3, 1, 1, memory_format=torch.channels_last), [0, 2, 3, 1]),
        (torch.empty(2, 3, 1, 1), [0, 1, 2, 3]),
    ],
)
def test_the_order_makes_the_strides(tensor: Tensor, order: list[int]) -> None:
    assert is_block(tensor)
    assert order_in_memory(tensor) == order
    shape = [tensor.shape[d] for d in order]
    back = [order.index(d) for d in range(tensor.dim())]
    assert torch.empty(shape).permute(back).stride() == tensor.stride()


def test_blocks_have_no_gaps_and_more_than_one_order() -> None:
    assert not is_block(torch.rand(4, 6)[:, ::2])
    assert not is_block(torch.rand(1, 6).expand(4, 6))
    assert not is_block(torch.rand(1, 6, 1))
    assert same_strides(torch.empty_strided((2, 1), (1, 7)), torch.empty(2, 1))
    assert not same_strides(TRANSPOSED, TRANSPOSED.contiguous())

"""Fake tensors have the strides that kernels give; a step whose gradients arrive transposed is captured rightly."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import fxpipe
from fxpipe.lowering.compare_with_eager import compare_with_eager
from fxpipe.torch_private import suggest_memory_format
from fxpipe.tracing.fake_strides import KernelStrides

aten = torch.ops.aten
BACKWARD = {
    aten.softplus_backward.default: (1.0, 20.0),
    aten.hardswish_backward.default: (),
    aten.hardsigmoid_backward.default: (),
    aten.hardtanh_backward.default: (-1.0, 1.0),
    aten.elu_backward.default: None,
    aten.gelu_backward.default: (),
    aten.silu_backward.default: (),
    aten.mish_backward.default: (),
    aten.threshold_backward.default: (0.0,),
    aten.sigmoid_backward.default: (),
    aten.tanh_backward.default: (),
    aten.leaky_relu_backward.default: (0.1, False),
    aten.softshrink_backward.default: (0.5,),
    aten.atan2.default: (),
    aten._softmax_backward_data.default: (-1, torch.float32),
    aten._log_softmax_backward_data.default: (-1, torch.float32),
}
ON = pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
        ),
    ],
)
THREE = {
    aten.mse_loss_backward.default: (1,),
}


def arguments(operator: Any, tensors: tuple[Tensor, ...]) -> tuple[Any, ...]:
    if operator is aten.elu_backward.default:
        return (tensors[0], 1.0, 1.0, 1.0, False, tensors[1])
    return (*tensors, *(BACKWARD.get(operator) or THREE.get(operator) or ()))


def laid_out() -> list[Callable[[], Tensor]]:
    """Ways in which a tensor of one shape can lie in memory."""
    return [
        lambda: torch.rand(2, 3, 4, 5),
        lambda: torch.rand(2, 4, 3, 5).transpose(1, 2),
        lambda: torch.rand(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        lambda: torch.rand(2, 1, 4, 1).expand(2, 3, 4, 5),
    ]


def of_one_sample() -> list[Callable[[], Tensor]]:
    """The same of a batch of one, whose own stride kernels look at."""
    return [
        lambda: torch.rand(1, 3, 4, 5),
        lambda: torch.rand(1, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        lambda: torch.rand(1, 20, 3).transpose(1, 2).view(1, 3, 4, 5),
    ]


@ON
@pytest.mark.parametrize("operator", [*BACKWARD, *THREE], ids=str)
def test_strides_are_foretold_as_the_kernel_gives_them(operator: Any, device: str) -> None:
    mode = KernelStrides()
    ways = (laid_out(), laid_out())
    if operator in THREE:
        ways = ([*laid_out(), lambda: torch.rand(())], laid_out(), laid_out()[:2])
    for make in itertools.product(*ways):
        with torch.device(device):
            given = arguments(operator, tuple(m() for m in make))
        computed = operator(*given)
        with mode:
            predicted = operator(*pytree.tree_map_only(torch.Tensor, mode.from_tensor, given))
        assert predicted.stride() == computed.stride(), [m().stride() for m in make]


def _as(tensor: Tensor, like: Tensor) -> Tensor:
    """In the memory format in which autograd hands a tensor to a group norm."""
    on_cpu = tensor.device.type == "cpu"
    return tensor.contiguous(memory_format=suggest_memory_format(like) if on_cpu else torch.contiguous_format)


OTHERS: dict[Any, Callable[[Tensor, Tensor], tuple[Any, ...]]] = {
    aten.native_dropout_backward.default: lambda a, b: (a, b > 0.5, 2.0),
    aten.roll.default: lambda a, b: (a, [1], [1]),
    aten.native_group_norm.default: lambda a, b: (_as(a, a), None, None, len(a), 3, 20, 1, 1e-5),
    aten.native_group_norm_backward.default: lambda a, b: (
        *(_as(b, a), _as(a, a), torch.rand(len(a), 1), torch.rand(len(a), 1), torch.rand(3)),
        *(len(a), 3, 20, 1, [True, True, True]),
    ),
    aten.zeros_like.default: lambda a, b: (a,),
    aten.hardtanh.default: lambda a, b: (a,),
    aten._prelu_kernel.default: lambda a, b: (a, b),
    aten.rsub.Scalar: lambda a, b: (a, 1),
    aten.flip.default: lambda a, b: (a, [3]),
    aten.view.default: lambda a, b: (a, [len(a), 1, 3, 4, 5]),
    aten.native_batch_norm_backward.default: lambda a, b: (
        *(b, a, *torch.rand(5, 3)),
        *(True, 1e-5, [True, True, True]),
    ),
}


@ON
@pytest.mark.parametrize("operator", OTHERS, ids=str)
def test_other_strides_are_foretold_as_the_kernel_gives_them(operator: Any, device: str) -> None:
    mode = KernelStrides()
    ways = [*itertools.product(laid_out(), repeat=2), *itertools.product(of_one_sample(), repeat=2)]
    for a, b in ways:
        with torch.device(device):
            given = OTHERS[operator](a(), b())
        computed = pytree.tree_leaves(operator(*given))
        with mode:
            predicted = pytree.tree_leaves(operator(*pytree.tree_map_only(torch.Tensor, mode.from_tensor, given)))
        assert [t.stride() for t in predicted] == [t.stride() for t in computed]


class Gated(nn.Module):
    """Softplus between a linear layer and a transposed product, as in gated delta networks."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 8)
        self.weight = nn.Parameter(torch.randn(2, 4, 5))

    def forward(self, x: Tensor) -> Tensor:
        gates = F.softplus(self.inner(x).view(2, 5, 4, 2)[..., 0])  # [sample, time, head]
        return (gates.transpose(1, 2) * self.weight).cumsum(-1)


def test_a_transposed_gradient_of_softplus_is_computed_as_in_eager() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), Gated())
    batch = torch.randn(2, 5, 6)

    def loss(module: nn.Module, x: Tensor) -> Tensor:
        return module(x).square().mean()

    build = fxpipe.compile(model, loss, batch, cost="analytic", cuts="same")
    assert compare_with_eager(build, model, loss, batch).largest < 1e-6


def test_seeds_of_an_attention_are_foretold_where_the_kernel_has_them() -> None:
    """tests/gpu/test_nccl.py trains with such an attention whose forward and backward are on two workers."""
    with KernelStrides():
        q = torch.empty(2, 3, 8, 16, device="cuda")
        made = aten._scaled_dot_product_efficient_attention.default(q, q, q, None, True, 0.1)
    assert [value.device.type for value in made] == ["cuda", "cuda", "cpu", "cpu"]

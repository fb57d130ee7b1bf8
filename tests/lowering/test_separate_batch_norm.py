"""Batch norm takes microbatches apart in a batch, as eager PyTorch would meet them one after the other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fxpipe.lowering.separate_batch_norm import SeparateBatchNorm


def normed(**options: object) -> nn.BatchNorm1d:
    return nn.BatchNorm1d(3, **options).double()


CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "functional": lambda x: F.batch_norm(x, None, None, training=True),
    "by name": lambda x: torch.batch_norm(
        input=x,
        weight=None,
        bias=None,
        running_mean=None,
        running_var=None,
        training=True,
        momentum=0.1,
        eps=1e-5,
        cudnn_enabled=False,
    ),
    "module": normed(track_running_stats=False),
}


@pytest.mark.parametrize("name", CALLS)
def test_each_microbatch_is_normalised_by_itself(name: str) -> None:
    x = torch.randn(6, 3, 5, dtype=torch.float64)
    with SeparateBatchNorm(3):
        found = CALLS[name](x)
    torch.testing.assert_close(found, torch.cat([CALLS[name](part) for part in x.chunk(3)]))
    assert not torch.allclose(found, CALLS[name](x))


def test_running_statistics_are_updated_in_turn() -> None:
    x, one, other = torch.randn(6, 3, dtype=torch.float64), normed(), normed()
    with SeparateBatchNorm(2):
        one(x)
    for part in x.chunk(2):
        other(part)
    torch.testing.assert_close(one.running_mean, other.running_mean)
    torch.testing.assert_close(one.running_var, other.running_var)


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_backward_computes_again_is_taken_apart_too(reentrant: bool) -> None:
    x, target = torch.randn(6, 3, dtype=torch.float64, requires_grad=True), torch.randn(6, 3, dtype=torch.float64)
    layer, builtin = nn.Sequential(normed(), nn.Tanh()), torch.batch_norm
    with SeparateBatchNorm(2):
        (checkpoint(layer, x, use_reentrant=reentrant) * target).sum().backward()
    found, x.grad = x.grad, None
    assert torch.batch_norm is builtin
    sum((layer(part) * other).sum() for part, other in zip(x.chunk(2), target.chunk(2), strict=True)).backward()
    torch.testing.assert_close(found, x.grad)


@pytest.mark.parametrize("module", [normed().eval(), nn.InstanceNorm1d(3, affine=True).double(), nn.GroupNorm(3, 3)])
def test_all_else_sees_the_whole_batch(module: nn.Module) -> None:
    x = torch.randn(6, 3, 5, dtype=torch.float64)
    module = module.double()
    with SeparateBatchNorm(2):
        found = module(x)
    torch.testing.assert_close(found, module(x), rtol=0, atol=0)

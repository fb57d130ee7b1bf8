"""Corrects the strides of torch's fake tensors for operators whose kernels use another memory layout.

Fake tensors compute the results of these operators by Python decompositions, which combine the arguments in another
order than the kernel does. If the arguments have different layouts, the fake result has the layout of one of them and
the real result that of another (torch 2.11 to 2.15). A graph traced this way contains views that the real values do not
allow. When torch has fixed this, these corrections change nothing and can go.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

aten = torch.ops.aten
Layout = Callable[..., torch.Tensor]  # from an operator's arguments, a tensor with the layout of its (first) result


def _in_order(*places: int) -> Layout:
    """The layout of a kernel that works element by element: that of its first argument that has a layout."""
    return lambda *args: functools.reduce(torch.mul, [args[i] for i in places])


def _contiguous(*args: Any) -> torch.Tensor:
    return torch.empty(args[1].shape)  # the gradient of a loss may be one number


def _like(place: int) -> Layout:
    return lambda *args: torch.empty_like(args[place])


def _channels_last_like(place: int) -> Layout:
    """Channels last if that argument is, else contiguous."""

    def layout(*args: Any) -> torch.Tensor:
        given = args[place]
        last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(given.dim())
        if last is None or torch._prims_common.suggest_memory_format(given) != last:
            last = torch.contiguous_format
        return torch.empty_like(given, memory_format=last)

    return layout


def _rrelu_backward(*args: Any) -> torch.Tensor:
    """A product with the noise; without noise the backward of a leaky relu."""
    _, _, _, lower, upper, train, *_ = args
    return (_in_order(2, 0) if train and upper - lower > 1e-6 else _in_order(1, 0))(*args)


_LAYOUTS: dict[Any, Layout] = {
    aten._log_softmax_backward_data.default: _contiguous,
    aten.binary_cross_entropy_backward.default: _like(1),
    aten.copysign.Tensor: _in_order(0, 1),
    aten.div.Tensor_mode: _in_order(0, 1),
    aten.elu_backward.default: _in_order(0, 5),
    aten.floor_divide.default: _in_order(0, 1),
    aten.hardsigmoid_backward.default: _in_order(0, 1),
    aten.hardswish_backward.default: _in_order(0, 1),
    aten.hardtanh_backward.default: _in_order(0, 1),
    aten.heaviside.default: _in_order(0, 1),
    aten.huber_loss_backward.default: _contiguous,
    aten.leaky_relu_backward.default: _in_order(1, 0),
    aten.logaddexp.default: _in_order(0, 1),
    aten.logaddexp2.default: _in_order(0, 1),
    aten.logical_and.default: _in_order(0, 1),
    aten.logical_or.default: _in_order(0, 1),
    aten.logical_xor.default: _in_order(0, 1),
    aten.logit_backward.default: _in_order(0, 1),
    aten.mse_loss_backward.default: _contiguous,
    aten.native_batch_norm_backward.default: _channels_last_like(1),
    aten.native_layer_norm_backward.default: _contiguous,
    aten.rrelu_with_noise_backward.default: _rrelu_backward,
    aten.smooth_l1_loss_backward.default: _contiguous,
    aten.soft_margin_loss_backward.default: _like(2),
    aten.softplus_backward.default: _in_order(0, 1),
    aten.special_xlog1py.default: _in_order(0, 1),
    aten.threshold_backward.default: _in_order(1, 0),
    aten.xlogy.Tensor: _in_order(0, 1),
}
_CPU_LAYOUTS: dict[Any, Layout] = {
    aten._native_batch_norm_legit.no_stats: _channels_last_like(0),
    aten._native_batch_norm_legit_functional.default: _channels_last_like(0),
    aten._native_batch_norm_legit_no_training.default: _channels_last_like(0),
    aten.native_dropout_backward.default: _in_order(0, 1),
    aten.roll.default: _channels_last_like(0),
}


def is_corrected(operator: Any, device: str) -> bool:
    """Whether the strides of what an operator makes on a device are corrected here."""
    return operator in _LAYOUTS or (device == "cpu" and operator in _CPU_LAYOUTS)


class KernelStrides(FakeTensorMode):
    """Inside, fake tensors have the strides that the kernels give their results."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made: Any = super().__torch_dispatch__(func, types, args, kwargs)
        layout = _LAYOUTS.get(func) or _CPU_LAYOUTS.get(func)
        if layout is None or not is_corrected(func, args[0].device.type):
            return made
        with self:
            if isinstance(made, tuple):
                return (_laid_out(made[0], layout(*args)), *made[1:])
            return _laid_out(made, layout(*args))


def _laid_out(made: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor | None:
    if made is None or made.stride() == like.stride():
        return made
    return torch.empty_strided(made.shape, like.stride(), dtype=made.dtype, device=made.device)

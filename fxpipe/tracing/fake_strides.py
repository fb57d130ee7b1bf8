"""Corrects strides of torch's fake tensors, and in one case the device, where kernels give others.

Fake tensors compute the results of these operators by Python decompositions, which combine the arguments in another
order than the kernel does. If the arguments have different layouts, the fake result may have the layout of one and
the real result the layout of another (torch 2.11 to 2.15). A graph traced this way contains views that the real values
do not allow. Margin losses of a single sample have a dimension more in torch's fakes than in its kernels, which is
corrected here as well. When torch has fixed this, these corrections change nothing and can go.

These are the operators that networks are made of. The result of another one is copied into the traced layout where
the real one may differ (`fxpipe/passes/keep_layouts.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from fxpipe.torch_private import FakeTensorMode, suggest_memory_format

aten = torch.ops.aten
Layout = Callable[..., torch.Tensor]  # from an operator's arguments, a tensor with the layout of its (first) result


def _in_order(*places: int) -> Layout:
    """The layout of an elementwise kernel's result: the layout of the first argument that has one."""
    return lambda *args: functools.reduce(torch.mul, [args[i] for i in places])


def _contiguous(*args: Any) -> torch.Tensor:
    return torch.empty(args[1].shape)  # the gradient of a loss may be one number


def _channels_last_like(place: int) -> Layout:
    """Channels last if that argument is, else contiguous."""

    def layout(*args: Any) -> torch.Tensor:
        given = args[place]
        last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(given.dim())
        if last is None or suggest_memory_format(given) != last:
            last = torch.contiguous_format
        return torch.empty_like(given, memory_format=last)

    return layout


def _margin_loss(place: int, dims: int) -> Layout:
    """The shape of a margin loss: without reduction a number for every sample, or a scalar if there is no batch.

    Args:
        place: where the argument `reduction` is; the default is the mean.
        dims: how many dimensions the targets of a batch have.
    """

    def layout(*args: Any) -> torch.Tensor:
        target = args[1]
        reduced = len(args) <= place or args[place] != 0
        return torch.empty(() if reduced or target.dim() < dims else target.shape[:1])

    return layout


_LAYOUTS: dict[Any, Layout] = {
    aten._log_softmax_backward_data.default: _contiguous,
    aten.copysign.Tensor: _in_order(0, 1),
    aten.div.Tensor_mode: _in_order(0, 1),
    aten.elu_backward.default: _in_order(0, 5),
    aten.floor_divide.default: _in_order(0, 1),
    aten.hardsigmoid_backward.default: _in_order(0, 1),
    aten.hardswish_backward.default: _in_order(0, 1),
    aten.hardtanh_backward.default: _in_order(0, 1),
    aten.huber_loss_backward.default: _contiguous,
    aten.leaky_relu_backward.default: _in_order(1, 0),
    aten.mse_loss_backward.default: _contiguous,
    aten.multi_margin_loss.default: _margin_loss(5, dims=1),
    aten.multilabel_margin_loss_forward.default: _margin_loss(2, dims=2),
    aten.native_batch_norm_backward.default: _channels_last_like(1),
    aten.native_layer_norm_backward.default: _contiguous,
    aten.smooth_l1_loss_backward.default: _contiguous,
    aten.softplus_backward.default: _in_order(0, 1),
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

# The place of the targets. Kernels take uint8 targets, torch's fakes do not (torch 2.13).
_LIKELIHOODS = {aten.nll_loss_forward.default: 1, aten.nll_loss_backward.default: 2}


def is_corrected(operator: Any, device: str) -> bool:
    """Whether the strides of what an operator makes on a device are corrected here."""
    return operator in _LAYOUTS or (device == "cpu" and operator in _CPU_LAYOUTS)


# Its seed and offset are in the CPU's memory, outside of a CUDA graph: its backward reads them there (torch 2.13).
_SEEDED_ON_CPU = aten._scaled_dot_product_efficient_attention.default


class KernelStrides(FakeTensorMode):
    """Inside, fake tensors have the strides, and the device, that the kernels give their results."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _LIKELIHOODS and args[_LIKELIHOODS[func]].dtype == torch.uint8:
            place = _LIKELIHOODS[func]
            args = (*args[:place], args[place].long(), *args[place + 1 :])
        made: Any = super().__torch_dispatch__(func, types, args, kwargs)
        if func is _SEEDED_ON_CPU:
            with self:
                return (*made[:2], *(torch.empty_like(seed, device="cpu") for seed in made[2:]))
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
    return torch.empty_strided(like.shape, like.stride(), dtype=made.dtype, device=made.device)

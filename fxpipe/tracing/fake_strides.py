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

from fxpipe.torch_private import (
    FakeTensorMode,
    is_non_overlapping_and_dense_or_false,
    no_python_dispatcher,
    suggest_memory_format,
)

aten = torch.ops.aten
Layout = Callable[..., torch.Tensor | None]
"""From an operator's arguments, a tensor with the layout of its (first) result; None where it is predicted."""


def _in_order(*places: int) -> Layout:
    """The layout of an elementwise kernel's result: the layout of the first argument that has one."""
    return lambda *args: functools.reduce(torch.mul, [args[i] for i in places])


def _contiguous(*args: Any) -> torch.Tensor:
    return torch.empty(args[1].shape)  # the gradient of a loss may be one number


def _channels_last_like(place: int, *memory: int) -> Layout:
    """Channels last if that argument is, else contiguous.

    Args:
        memory: where all these arguments are contiguous in one order or the other, and in the same by the strides of
            dimensions of size 1, the kernel decides without those strides.
    """

    def layout(*args: Any) -> torch.Tensor:
        source, read = args[place], [args[i] for i in memory]
        last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(source.dim(), torch.contiguous_format)
        is_last = suggest_memory_format(source) == last
        blocks = all(t.is_contiguous() or t.is_contiguous(memory_format=last) for t in read)
        if read and blocks and len({suggest_memory_format(t) for t in read}) == 1:
            is_last = not source.is_contiguous()
        return torch.empty_like(source, memory_format=last if is_last else torch.contiguous_format)

    return layout


def _as_given(*args: Any) -> torch.Tensor | None:
    """The strides of the first argument, also of dimensions of size 1, if it fills its memory; else as predicted."""
    first = args[0]
    return first if is_non_overlapping_and_dense_or_false(first) else None


def _margin_loss(place: int, dims: int) -> Layout:
    """The shape of a margin loss: without reduction a number for every sample, or a scalar if there is no batch.

    `place` is that of the argument `reduction`, `dims` how many dimensions the targets of a batch have.
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
    aten.native_batch_norm_backward.default: _channels_last_like(1, 0, 1),
    aten.native_layer_norm_backward.default: _contiguous,
    aten.smooth_l1_loss_backward.default: _contiguous,
    aten.softplus_backward.default: _in_order(0, 1),
    aten.threshold_backward.default: _in_order(1, 0),
    aten.xlogy.Tensor: _in_order(0, 1),
    **dict.fromkeys(
        (
            *(aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default),
            *(aten.rand_like.default, aten.randn_like.default, aten.flip.default, aten.rsub.Scalar),
            *(aten.hardtanh.default, aten._prelu_kernel.default, aten.nan_to_num.default, aten.remainder.Scalar),
            aten.fill.Scalar,
        ),
        _as_given,
    ),
}
_CPU_LAYOUTS: dict[Any, Layout] = {
    aten._native_batch_norm_legit.no_stats: _channels_last_like(0, 0),
    aten._native_batch_norm_legit_functional.default: _channels_last_like(0, 0),
    aten._native_batch_norm_legit_no_training.default: _channels_last_like(0, 0),
    aten.native_dropout_backward.default: _in_order(0, 1),
    aten.native_group_norm.default: _channels_last_like(0),
    aten.native_group_norm_backward.default: _channels_last_like(1),
    aten.roll.default: _channels_last_like(0),
}

# The place of the targets. Kernels take uint8 targets, torch's fakes do not (torch 2.13).
_LIKELIHOODS = {aten.nll_loss_forward.default: 1, aten.nll_loss_backward.default: 2}

# Torch's fakes give dimensions of size 1 other strides than the kernels, and `F.group_norm` chooses a layout by these.
_VIEWS = (aten.view.default, aten._unsafe_view.default)


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
        result: Any = super().__torch_dispatch__(func, types, args, kwargs)
        if func in _VIEWS and 1 in (*args[0].shape, *result.shape):
            with no_python_dispatcher():
                bare = torch.empty_strided(args[0].shape, args[0].stride(), device="meta")
                strides = func(bare, *args[1:]).stride()
            with self:
                return result if result.stride() == strides else result.as_strided(result.shape, strides)
        if func is _SEEDED_ON_CPU:
            with self:
                return (*result[:2], *(torch.empty_like(seed, device="cpu") for seed in result[2:]))
        layout = _LAYOUTS.get(func) or _CPU_LAYOUTS.get(func)
        chosen = kwargs and kwargs.get("memory_format") is not None
        if layout is None or chosen or not is_corrected(func, args[0].device.type):
            return result
        with self:
            if isinstance(result, tuple):
                return (_laid_out(result[0], layout(*args)), *result[1:])
            return _laid_out(result, layout(*args))


def _laid_out(result: torch.Tensor | None, like: torch.Tensor | None) -> torch.Tensor | None:
    if result is None or like is None or result.stride() == like.stride():
        return result
    return torch.empty_strided(like.shape, like.stride(), dtype=result.dtype, device=result.device)

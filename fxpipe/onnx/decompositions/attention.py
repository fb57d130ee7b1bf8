"""Attention kernels as matrix products: forward with the logarithm of the sums, backward from it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxpipe.torch_private import Decompositions

aten = torch.ops.aten


def _scores(q: Tensor, k: Tensor, bias: Tensor | None, causal: bool, scale: float | None) -> Tensor:
    factor = scale if scale is not None else q.shape[-1] ** -0.5
    scores = (q * factor) @ k.transpose(-1, -2)
    if bias is not None:
        scores = scores + bias
    if causal:
        # An additive constant is cheaper than Where: it is folded, and Add runs on whole vectors.
        allowed = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
        scores = scores + torch.where(allowed, 0.0, float("-inf")).to(q.dtype)
    return scores


def _refuse_dropout(p: float) -> None:
    if p:
        raise NotImplementedError("dropout within an attention kernel")


def _forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    k, v = _for_each_head(k, q), _for_each_head(v, q)
    scores = _scores(q, k, bias, causal, scale)
    # Softmax is one kernel; the sums' logarithm comes from its largest entry: p_max = exp(s_max - logsumexp).
    p = torch.softmax(scores, -1)
    if bias is None:
        return p @ v, scores.amax(-1) - p.amax(-1).log()
    # A row that masks every key gives zeros, as the kernels do; the NaN of its softmax stays within the row.
    top = scores.amax(-1, keepdim=True)
    empty = top == float("-inf")
    lse = torch.where(empty, 0.0, top - p.amax(-1, keepdim=True).log())
    return torch.where(empty, 0.0, p @ v), lse.squeeze(-1)


def _for_each_head(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values once for each head of the queries that shares them."""
    if x.shape[-3] == q.shape[-3]:
        return x
    return x.repeat_interleave(q.shape[-3] // x.shape[-3], -3)


def _of_shared_heads(grad: Tensor, x: Tensor) -> Tensor:
    """The backward of `_for_each_head`."""
    if x.shape[-3] == grad.shape[-3]:
        return grad
    return grad.reshape(*x.shape[:-2], -1, *x.shape[-2:]).sum(-3)


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    bias: Tensor | None,
    causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    factor = scale if scale is not None else q.shape[-1] ** -0.5
    own_k, own_v = k, v
    k, v = _for_each_head(k, q), _for_each_head(v, q)
    p = torch.exp(_scores(q, k, bias, causal, scale) - logsumexp.unsqueeze(-1)).to(q.dtype)
    dv = p.transpose(-1, -2) @ grad
    delta = (grad * out).sum(-1, keepdim=True)
    ds = p * (grad @ v.transpose(-1, -2) - delta)
    dk = ds.transpose(-1, -2) @ (q * factor)
    return (ds @ k) * factor, _of_shared_heads(dk, own_k), _of_shared_heads(dv, own_v), ds


def _flash_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    _refuse_dropout(dropout_p)
    out, logsumexp = _forward(q, k, v, attn_mask, is_causal, scale)
    return out, logsumexp.to(torch.promote_types(q.dtype, torch.float32))


def _flash_cpu_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    _refuse_dropout(dropout_p)
    return _backward(grad_out, q, k, v, out, logsumexp, attn_mask, is_causal, scale)[:3]


def _philox(q: Tensor) -> Tensor:
    """The state of a random generator that nothing reads without dropout."""
    return torch.zeros(2, dtype=torch.int64, device=q.device)


def _flash_cuda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    _refuse_dropout(dropout_p)
    out, logsumexp = _forward(q, k, v, None, is_causal, scale)
    nothing = q.new_zeros(0)
    return out, logsumexp.float(), None, None, q.shape[-2], k.shape[-2], _philox(q), _philox(q)[0], nothing


def _flash_cuda_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    _refuse_dropout(dropout_p)
    return _backward(grad_out, q, k, v, out, logsumexp.to(q.dtype), None, is_causal, scale)[:3]


def _efficient(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    _refuse_dropout(dropout_p)
    out, logsumexp = _forward(q, k, v, attn_bias, is_causal, scale)
    if compute_log_sumexp:  # the kernel pads it to whole blocks of rows
        rows = -(-q.shape[-2] // 32) * 32
        logsumexp = torch.constant_pad_nd(logsumexp.float(), [0, rows - q.shape[-2]], float("inf"))
    else:
        logsumexp = logsumexp.new_zeros((*logsumexp.shape[:2], 0), dtype=torch.float32)
    return out, logsumexp, _philox(q)[0], _philox(q)[0]


def _efficient_backward(
    grad_out_: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_bias: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor,
    philox_offset: Tensor,
    dropout_p: float,
    grad_input_mask: list[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor | None, ...]:
    _refuse_dropout(dropout_p)
    lse = logsumexp[..., : q.shape[-2]].to(q.dtype)
    *grads, ds = _backward(grad_out_, q, k, v, out, lse, attn_bias, is_causal, scale)
    if grad_input_mask[3] and attn_bias is not None:
        grads.append(ds.sum_to_size(attn_bias.shape))
    else:
        grads.append(q.new_zeros(0))
    return tuple(g if wanted else q.new_zeros(0) for g, wanted in zip(grads, grad_input_mask, strict=True))


def _cudnn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    _refuse_dropout(dropout_p)
    out, logsumexp = _forward(q, k, v, attn_bias, is_causal, scale)
    logsumexp = logsumexp.float().unsqueeze(-1)
    return out, logsumexp, None, None, q.shape[-2], k.shape[-2], _philox(q)[0], _philox(q)[0], q.new_zeros(0)


def _cudnn_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor,
    philox_offset: Tensor,
    attn_bias: Tensor | None,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    _refuse_dropout(dropout_p)
    lse = logsumexp.reshape(q.shape[:-1]).to(q.dtype)
    return _backward(grad_out, q, k, v, out, lse, attn_bias, is_causal, scale)[:3]


TABLE: Decompositions = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: _flash_cpu,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _flash_cpu_backward,
    aten._scaled_dot_product_flash_attention.default: _flash_cuda,
    aten._scaled_dot_product_flash_attention_backward.default: _flash_cuda_backward,
    aten._scaled_dot_product_efficient_attention.default: _efficient,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    aten._scaled_dot_product_cudnn_attention.default: _cudnn,
    aten._scaled_dot_product_cudnn_attention_backward.default: _cudnn_backward,
}

"""Attention kernels as matrix products: forward with the logarithm of the sums, backward from it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fxpipe.torch_private import Decompositions, OpOverload, schema_of

aten = torch.ops.aten


class _AttentionCall:
    """One call of a kernel."""

    def __init__(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arguments = schema_of(op).arguments
        names = [argument.name for argument in arguments]
        # its arguments by the names that its schema has for them
        self.arguments: dict[str, Any] = {a.name: a.default_value for a in arguments}
        self.arguments |= dict(zip(names, args, strict=False)) | kwargs
        if self.arguments["dropout_p"]:
            raise NotImplementedError("dropout within an attention kernel")
        self.q, self.k, self.v = (self.arguments[name] for name in ("query", "key", "value"))
        # what is added to the scores; None if nothing is
        self.bias: Tensor | None = self.arguments.get("attn_mask", self.arguments.get("attn_bias"))
        scale = self.arguments["scale"]
        # what the queries are multiplied by
        self.factor: float = scale if scale is not None else self.q.shape[-1] ** -0.5

    def scores(self, k: Tensor) -> Tensor:
        """The scores of keys for each head."""
        scores = (self.q * self.factor) @ k.transpose(-1, -2)
        if self.bias is not None:
            scores = scores + self.bias
        if self.arguments["is_causal"]:
            # An additive constant is cheaper than Where: it is folded, and Add runs on whole vectors.
            allowed = torch.ones(self.q.shape[-2], k.shape[-2], dtype=torch.bool, device=self.q.device).tril()
            scores = scores + torch.where(allowed, 0.0, float("-inf")).to(self.q.dtype)
        return scores

    def forward(self) -> tuple[Tensor, Tensor]:
        """The result, and the logarithm of the sums of each row."""
        k, v = _for_each_head(self.k, self.q), _for_each_head(self.v, self.q)
        scores = self.scores(k)
        # Softmax is one kernel; the sums' logarithm comes from its largest entry: p_max = exp(s_max - logsumexp).
        p = torch.softmax(scores, -1)
        if self.bias is None:
            return p @ v, scores.amax(-1) - p.amax(-1).log()
        # A row that masks every key gives zeros, as the kernels do; the NaN of its softmax stays within the row.
        top = scores.amax(-1, keepdim=True)
        empty = top == float("-inf")
        lse = torch.where(empty, 0.0, top - p.amax(-1, keepdim=True).log())
        return torch.where(empty, 0.0, p @ v), lse.squeeze(-1)

    def backward(self, grad: Tensor, logsumexp: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The gradients of queries, keys, values and scores."""
        k, v = _for_each_head(self.k, self.q), _for_each_head(self.v, self.q)
        p = torch.exp(self.scores(k) - logsumexp.unsqueeze(-1)).to(self.q.dtype)
        dv = p.transpose(-1, -2) @ grad
        delta = (grad * self.arguments["out"]).sum(-1, keepdim=True)
        ds = p * (grad @ v.transpose(-1, -2) - delta)
        dk = ds.transpose(-1, -2) @ (self.q * self.factor)
        return (ds @ k) * self.factor, _of_shared_heads(dk, self.k), _of_shared_heads(dv, self.v), ds

    def philox(self) -> Tensor:
        """The state of a random generator that nothing reads without dropout."""
        return torch.zeros(2, dtype=torch.int64, device=self.q.device)


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


def _flash_cpu(call: _AttentionCall) -> tuple[Tensor, ...]:
    out, logsumexp = call.forward()
    return out, logsumexp.to(torch.promote_types(call.q.dtype, torch.float32))


def _flash_cpu_backward(call: _AttentionCall) -> tuple[Tensor, ...]:
    return call.backward(call.arguments["grad_out"], call.arguments["logsumexp"])[:3]


def _flash_cuda(call: _AttentionCall) -> tuple[Any, ...]:
    out, logsumexp = call.forward()
    nothing, rows, keys = call.q.new_zeros(0), call.q.shape[-2], call.k.shape[-2]
    return out, logsumexp.float(), None, None, rows, keys, call.philox(), call.philox()[0], nothing


def _flash_cuda_backward(call: _AttentionCall) -> tuple[Tensor, ...]:
    return call.backward(call.arguments["grad_out"], call.arguments["logsumexp"].to(call.q.dtype))[:3]


def _efficient(call: _AttentionCall) -> tuple[Tensor, ...]:
    out, logsumexp = call.forward()
    if call.arguments["compute_log_sumexp"]:  # the kernel pads it to whole blocks of rows
        rows = -(-call.q.shape[-2] // 32) * 32
        logsumexp = torch.constant_pad_nd(logsumexp.float(), [0, rows - call.q.shape[-2]], float("inf"))
    else:
        logsumexp = logsumexp.new_zeros((*logsumexp.shape[:2], 0), dtype=torch.float32)
    return out, logsumexp, call.philox()[0], call.philox()[0]


def _efficient_backward(call: _AttentionCall) -> tuple[Tensor, ...]:
    lse = call.arguments["logsumexp"][..., : call.q.shape[-2]].to(call.q.dtype)
    *grads, ds = call.backward(call.arguments["grad_out_"], lse)
    mask = call.arguments["grad_input_mask"]
    if mask[3] and call.bias is not None:
        grads.append(ds.sum_to_size(call.bias.shape))
    else:
        grads.append(call.q.new_zeros(0))
    return tuple(g if needed else call.q.new_zeros(0) for g, needed in zip(grads, mask, strict=True))


def _cudnn(call: _AttentionCall) -> tuple[Any, ...]:
    out, logsumexp = call.forward()
    logsumexp, rows, keys = logsumexp.float().unsqueeze(-1), call.q.shape[-2], call.k.shape[-2]
    return out, logsumexp, None, None, rows, keys, call.philox()[0], call.philox()[0], call.q.new_zeros(0)


def _cudnn_backward(call: _AttentionCall) -> tuple[Tensor, ...]:
    lse = call.arguments["logsumexp"].reshape(call.q.shape[:-1]).to(call.q.dtype)
    return call.backward(call.arguments["grad_out"], lse)[:3]


_KERNELS: dict[OpOverload, Callable[[_AttentionCall], tuple[Any, ...]]] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: _flash_cpu,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _flash_cpu_backward,
    aten._scaled_dot_product_flash_attention.default: _flash_cuda,
    aten._scaled_dot_product_flash_attention_backward.default: _flash_cuda_backward,
    aten._scaled_dot_product_efficient_attention.default: _efficient,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    aten._scaled_dot_product_cudnn_attention.default: _cudnn,
    aten._scaled_dot_product_cudnn_attention_backward.default: _cudnn_backward,
}


def _decomposed(op: OpOverload, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    return _KERNELS[op](_AttentionCall(op, args, kwargs))


TABLE: Decompositions = {op: partial(_decomposed, op) for op in _KERNELS}

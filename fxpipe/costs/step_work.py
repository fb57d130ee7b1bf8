"""How much a step computes, counted as usual in the field: FLOPs of matrix products, and tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, TypedDict

import torch
from torch import fx
from torch.utils.flop_counter import sdpa_flop_count

from fxpipe.costs.analytic import FLOPS, dtype_of, flops_of
from fxpipe.ir.program import AGAIN, Program, info, value
from fxpipe.torch_private import OpOverload

aten = torch.ops.aten

_MULTIPLIES = re.compile(r"rnn|lstm|linalg_(?!vector_norm)|cdist|trilinear|addmv|addbmm|_mm$|attention|conv[do0-9_]")
"""Parts of the names of ATen's operators that multiply matrices."""


class StepWork(TypedDict):
    """The fields of a plan about a step's work."""

    flops: dict[str, float]
    tokens: int


def step_work(program: Program) -> StepWork:
    """The work of a microbatch; see `model_flops` and `tokens_of`."""
    return {"flops": model_flops(program), "tokens": tokens_of(program)}


def model_flops(program: Program) -> dict[str, float]:
    """FLOPs of a microbatch's forward and backward, by the dtype that is multiplied; empty if unknown.

    Matrix products, convolutions and attention count; a multiplication and an addition count as two. Causal attention
    counts whole, and recomputation does not count, here or inside attention's backward (Chowdhery et al. 2022, PaLM,
    appendix B). They are unknown if an operator without a formula may multiply matrices, such as the user's own.
    """
    by_dtype: dict[str, float] = {}
    for node in program:
        if AGAIN in node.meta:
            continue
        flops = flops_of(node, _MODEL_FLOPS)
        if not flops and isinstance(node.target, OpOverload):
            if node.target.namespace not in ("aten", "prims"):
                return {}
            if _MULTIPLIES.search(node.target.overloadpacket.__name__) and value(node) is not None:
                return {}
        if flops:
            by_dtype[dtype_of(node)] = by_dtype.get(dtype_of(node), 0.0) + flops
    return by_dtype


def _attention_backward(gradient: Any, query: Any, key: Any, values: Any, *_: Any, **__: Any) -> int:
    """Four products, twice the forward's two, although a kernel computes the scores again, too."""
    return 2 * int(sdpa_flop_count(query.shape, key.shape, values.shape))


_KERNELS = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
_MODEL_FLOPS = FLOPS | {f"aten._scaled_dot_product_{kernel}_backward": _attention_backward for kernel in _KERNELS}


def tokens_of(program: Program) -> int:
    """How many tokens a microbatch has: the positions of its sequences, padding included; 0 if unknown.

    They are the integers of the batch that an embedding looks up, if a layer then multiplies each position separately;
    so a row of categories, whose embeddings are concatenated, does not count. If inputs have different numbers, such as
    those of an encoder and a decoder, it is unknown.
    """
    counts = {count for leaf in program.batch if leaf.node for count in _looked_up(program.placeholders[leaf.node])}
    leaves = [row.leaf for row in program.batch]
    samples = {leaf.tensor.shape[leaf.dim] for leaf in leaves if leaf.tensor and leaf.dim is not None}
    positions = {_positions(node) for node in program if info(node).phase == "F" and flops_of(node)}
    return counts.pop() if len(counts) == 1 and counts <= positions - samples else 0


def _looked_up(ids: fx.Node) -> Iterator[int]:
    """How many rows of an embedding are looked up by integers made from these, for each embedding."""
    reached, seen = [ids], {ids}
    while reached:
        node = reached.pop()
        for user in node.users:
            if user.target is aten.embedding.default and user.args[1] is node:
                yield value(node).numel()
            elif user not in seen and _whole(value(user)):
                seen.add(user)
                reached.append(user)


def _whole(result: Any) -> bool:
    return isinstance(result, torch.Tensor) and not result.is_floating_point() and not result.is_complex()


def _positions(node: fx.Node) -> int:
    """How many vectors a node multiplies by a matrix."""
    first = value(node.all_input_nodes[0])
    if node.target is aten.addmm.default:
        first = value(node.args[1])  # type: ignore[arg-type]
    features = 1 if node.target is aten.convolution.default else -1
    return int(first.numel() // max(first.shape[features], 1))

"""Products, layers and tables: what models are made of."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxpipe.ir.program import value
from fxpipe.passes.analysis.share import Known, Lost, Rows
from fxpipe.passes.analysis.share_rules.call import (
    MEAN,
    SAME,
    SUM,
    OperatorCall,
    Rule,
    argument,
    common_rows,
    not_linear,
    operator_of,
    reduced_dims,
    unknown,
    without_rows,
)


def _along(call: OperatorCall) -> Known:
    """Works along a dimension: softmax, cumsum, sort, flip; samples stay separate unless it is the batch's."""
    rows = common_rows(call, call.tensors, call.shape(call.tensors[0]))
    if isinstance(rows, Rows) and rows.dim in reduced_dims(call, len(call.shape(call.tensors[0]))):
        return call.lost("works along the batch")
    return rows or without_rows(call) or not_linear(call)


def _product(call: OperatorCall) -> Known:
    """Products of matrices: the last two arguments, after what is added."""
    one, other = call.tensors[-2:]
    left, right = call.known(one), call.known(other)
    added = call.tensors[:-2]
    count = len(call.shape(one))
    if not isinstance(left, Rows) and not isinstance(right, Rows):
        if not added and left in (SUM, MEAN) and call.whole(other):
            return left
        return without_rows(call) or call.lost("multiplies sums over the batch")
    inner_left, inner_right = count - 1, len(call.shape(other)) - 2 if len(call.shape(other)) > 1 else 0
    if isinstance(left, Rows) and isinstance(right, Rows):
        if count == 3 and left == right and left.dim == 0:
            rows: Known = left
        elif left.dim == inner_left and right.dim == inner_right and left.outer == right.outer and not added:
            return SUM
        else:
            return call.lost("multiplies samples with other samples")
    elif isinstance(left, Rows) and left.dim != inner_left and call.whole(other) and _is_one_factor(call, left, other):
        rows = left
    elif isinstance(right, Rows) and right.dim != inner_right and call.whole(one) and _is_one_factor(call, right, one):
        rows = right
    else:
        return call.lost("multiplies samples with what is the same for every microbatch")
    if not added:
        return rows
    assert isinstance(rows, Rows)
    share = call.known(added[0])
    dim = rows.dim - len(call.shape()) + len(call.shape(added[0]))
    same = dim < 0 or call.is_same_for_samples(added[0], dim, rows, call.shape()[rows.dim])
    goes_with = share == Rows(dim, rows.outer) or (call.whole(added[0]) and same)
    return rows if goes_with else call.lost("adds what is the same for every microbatch to each sample")


def _is_one_factor(call: OperatorCall, rows: Rows, factor: fx.Node) -> bool:
    """Whether a factor of matrices that are samples is one matrix for all of them, or equal matrices for each."""
    shape = call.shape(factor)
    return len(shape) < 3 or rows.dim > 0 or call.is_same_for_samples(factor, 0, rows, shape[0])


def _convolution(call: OperatorCall) -> Known:
    """Its weights must be the model's: weights that are made of samples apply to all samples."""
    weights = [n for n in (call.get("weight"), call.get("bias")) if n is not None]
    return _of_samples(call) if all(map(call.whole, weights)) else call.lost("convolves samples with samples")


def _of_samples(call: OperatorCall, dim: int = 0) -> Known:
    """Operators that treat each place of the first (or another) dimension separately."""
    first: Known = call.known(call.tensors[0])
    rows = [call.known(n) for n in call.tensors if isinstance(call.known(n), Rows)]
    batched = isinstance(first, Rows) and first.dim == dim and all(r == first for r in rows)
    if batched and all(isinstance(call.known(n), Rows) or call.whole(n) for n in call.tensors):
        return first
    return without_rows(call) or call.lost("does not have the batch as its first dimension")


def _distances(call: OperatorCall) -> Known:
    """From each row of one matrix to each of another: per sample if the other is whole, or samples are separate."""
    points = call.tensors[:2] if call.name == "_cdist_forward" else call.tensors[1:3]
    if all(isinstance(call.known(n), Rows) and len(call.shape(n)) == 2 for n in points):
        return call.lost("compares samples with each other")
    return _of_samples(call)


def _attention(call: OperatorCall) -> Known:
    """Samples and heads, the first two dimensions, stay separate. torch 2.15 adds a dimension to those of three."""
    mask = next((argument(call, n) for n in ("attn_mask", "attn_bias") if argument(call, n) is not None), None)
    query, key, value = call.tensors[:3]
    first = call.known(query)
    heads = isinstance(first, Rows) and first.dim == 1
    if mask is not None and not isinstance(call.known(mask), Rows):
        shape = call.shape(mask)
        place = len(shape) - 4 + heads
        if place >= 0 and shape[place] != 1 and place not in call.same_dims(mask):
            return call.lost("has a mask for each sample that is the same for every microbatch")
    if heads:
        alone = all(call.known(n) == first and call.shape(n)[1] == call.shape(query)[1] for n in (key, value))
        return _of_samples(call, 1) if alone else call.lost("queries samples in groups")
    rows: Known = call.known(key)
    if call.whole(query) and 0 in call.same_dims(query) and rows == Rows(0):
        others = [n for n in call.tensors[1:] if n is not mask]  # a learnt query, the same for every sample
        return rows if all(call.known(n) == rows for n in others) else call.lost("mixes samples with other values")
    return _of_samples(call)


def _recurrent(call: OperatorCall) -> Any:
    """[steps, samples, features], and first states of [directions, samples, features]; its weights are the model's."""
    states = call.get("hidden")
    rows = common_rows(call, [call.get("input"), *states], call.shape(call.get("input")))
    if rows != Rows(1) or not all(map(call.whole, call.get("weights"))):
        return rows if isinstance(rows, Lost) else unknown(call)
    left = len(value(call.node)) - 1 - len(states)
    return (rows,) * (1 + len(states)) + (call.lost("leaves values of one microbatch"),) * left


def _layer_norm(call: OperatorCall) -> Known:
    share: Known = call.known(call.tensors[0])
    if not isinstance(share, Rows):
        return unknown(call)
    count = len(call.shape(call.tensors[0])) - len(call.get("normalized_shape"))
    return share if share.dim < count else call.lost("normalises over the batch")


def batch_norm(call: OperatorCall) -> Any:
    share: Known = call.known(call.tensors[0])
    if isinstance(share, Rows) and share.dim == 1:
        return _instance_norm(call, share)
    if share != Rows(0):
        return unknown(call)
    return (share, *[call.lost("has statistics of one microbatch")] * 4) if _in_training(call) else share


def _instance_norm(call: OperatorCall, merged: Rows) -> Any:
    """Samples and channels in one dimension: statistics are per entry, and weights are per channel, repeated."""
    rows, size = Rows(0, merged.outer), call.shape()[1]
    repeated = all(call.whole(n) and call.is_same_for_samples(n, 0, rows, size) for n in call.tensors[1:])
    if not repeated or not _in_training(call):
        return unknown(call)
    return (merged, *[call.lost("has statistics of one microbatch")] * 4)


def mixes_samples(call: OperatorCall) -> bool:
    """Whether a batch norm takes its statistics from the samples of a microbatch."""
    source = call.tensors[0]
    lost = isinstance(call.known(source), Lost) and call.shape(source)[0] % call.facts.batch == 0
    return (lost or call.known(source) == Rows(0)) and _in_training(call)


def _in_training(call: OperatorCall) -> bool:
    return call.name != "_native_batch_norm_legit_no_training" and argument(call, "training") is not False


def _embedding(call: OperatorCall) -> Known:
    weight, indices = call.get("weight"), call.get("indices")
    share: Known = call.known(indices)
    if call.get("scale_grad_by_freq"):
        return call.lost("scales gradients by how often a word is in the batch (scale_grad_by_freq)")
    return share if isinstance(share, Rows) and call.whole(weight) else unknown(call)


def _gather(call: OperatorCall) -> Known:
    """gather and scatter: along a dimension that is not the batch's, or from a table of one dimension."""
    source, index = call.tensors[:2]
    share: Known = call.known(index)
    if call.name == "gather" and call.whole(source) and len(call.shape(source)) == 1 and isinstance(share, Rows):
        return share
    return _along(call)


def _index_fill(call: OperatorCall) -> Known:
    """Writes to the same places of every sample; its index is of places, not of samples."""
    source, filler = call.get("self"), call.get("value")
    share: Known = call.known(source)
    if not isinstance(share, Rows) or share.dim == call.get("dim") % len(call.shape(source)):
        return unknown(call)
    nodes = [n for n in (call.get("index"), filler) if isinstance(n, fx.Node)]
    return share if all(map(call.whole, nodes)) else call.lost("writes places or values that depend on samples")


def index(call: OperatorCall) -> Known:
    """x[i, j]: a table read by samples, or one entry of each sample, `x[arange(batch), j]`."""
    source, indices = call.get("self"), list(call.get("indices"))
    tensors = [i for i in indices if i is not None]
    share = call.known(source)
    shape = torch.broadcast_shapes(*(call.shape(i) for i in tensors))
    lost = [k for i in tensors if isinstance(k := call.known(i), Lost)]  # `arange` counts the samples of a microbatch
    if not all(isinstance(call.known(i), (Rows, Lost)) or call.whole(i) for i in tensors):
        return call.lost("reads by a sum over the batch")
    if lost and (share != Rows(0) or lost != [call.known(tensors[0])] or tensors[0] is not indices[0]):
        return lost[0]
    if call.whole(source) and None not in indices:
        return common_rows(call, tensors, shape) or SAME
    if share == Rows(0) and indices[0] is not None and None not in indices and counts_up(call, indices[0]):
        others = common_rows(call, tensors[1:], shape) if len(tensors) > 1 else Rows(0)
        return Rows(0) if others in (Rows(0), None) else call.lost("reads other samples")
    places = [i for i, given_there in enumerate(indices) if given_there is not None]
    together = places == list(range(places[0], places[-1] + 1))
    if isinstance(share, Rows) and share.dim not in places and together and all(map(call.whole, tensors)):
        return Rows(share.dim + (len(shape) - len(places) if share.dim > places[-1] else 0), share.outer)
    return call.lost("reads samples by an index")


def _index_put(call: OperatorCall) -> Known:
    """x[mask] = number, written element by element."""
    places, written = list(call.get("indices")), call.get("values")
    if places[1:] or value(places[0]).dtype != torch.bool or call.shape(written):
        return unknown(call)
    rows = common_rows(call, call.tensors, call.shape()) if call.shape(places[0]) == call.shape() else None
    return rows or unknown(call)


def counts_up(call: OperatorCall, node: fx.Node) -> bool:
    """Whether an index is 0, 1, 2 … up to the batch."""
    while node.op == "call_function" and operator_of(node) in ("view", "unsqueeze", "_to_copy", "expand"):
        node = node.all_input_nodes[0]
    if node.op != "call_function" or operator_of(node) != "arange" or call.shape(node) != (call.facts.batch,):
        return False
    counts = OperatorCall(call.facts, node)
    return all((argument(counts, name) or usual) == usual for name, usual in (("start", 0), ("step", 1)))


def _looked_up(call: OperatorCall) -> Known:
    """Looks up each element of the first argument in a table."""
    element, *tables = [call.get(name) for name in _LOOKED_UP[call.name]]
    share: Known = call.known(element) if isinstance(element, fx.Node) else SAME
    return share if isinstance(share, Rows) and all(map(call.whole, tables)) else unknown(call)


def _matrices(call: OperatorCall) -> Known:
    """Matrices in the last two dimensions, each by itself."""
    kinds = {(call.known(n), len(call.shape(n))) for n in call.tensors}
    share, count = call.known(call.tensors[0]), len(call.shape(call.tensors[0]))
    if len(kinds) > 1 or not isinstance(share, Rows):
        return unknown(call)
    return share if share.dim < count - 2 else call.lost("works along the batch")


_LOOKED_UP = {
    "bucketize": ("self", "boundaries"),
    "searchsorted": ("self", "sorted_sequence"),
    "isin": ("elements", "test_elements"),
}


RULES: tuple[tuple[Rule, str], ...] = (
    (_along, "_safe_softmax _softmax _log_softmax softmax log_softmax glu cumsum cumprod logcumsumexp cummax cummin"),
    (_along, "sort topk flip roll"),
    (_along, "argsort scatter scatter_add scatter_reduce _fft_r2c _fft_c2r _fft_c2c"),
    (_along, "linalg_cross _softmax_backward_data _log_softmax_backward_data glu_backward"),
    (_matrices, "linalg_cholesky_ex linalg_inv_ex linalg_qr linalg_solve_triangular cholesky_solve"),
    (_matrices, "_linalg_det _linalg_slogdet _linalg_eigh _linalg_svd _linalg_solve_ex"),
    (_looked_up, " ".join(_LOOKED_UP)),
    (_product, "mm bmm addmm baddbmm mv dot addmv"),
    (_convolution, "convolution"),
    (_of_samples, "max_pool2d_with_indices max_pool3d_with_indices avg_pool1d avg_pool2d avg_pool3d"),
    (
        _of_samples,
        "_adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_max_pool2d adaptive_max_pool3d native_group_norm",
    ),
    (_of_samples, "upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_bilinear2d upsample_bicubic2d"),
    (_of_samples, "_upsample_nearest_exact2d upsample_linear1d upsample_trilinear3d _upsample_bilinear2d_aa"),
    (_of_samples, "pixel_shuffle pixel_unshuffle im2col col2im reflection_pad1d reflection_pad2d replication_pad1d"),
    (_of_samples, "replication_pad2d channel_shuffle grid_sampler_2d grid_sampler_3d"),
    (_of_samples, "max_pool2d_with_indices_backward avg_pool2d_backward _adaptive_avg_pool2d_backward"),
    (_distances, "_cdist_forward _cdist_backward"),
    (_of_samples, "_scaled_dot_product_flash_attention_for_cpu_backward"),
    (_of_samples, "_thnn_fused_lstm_cell _thnn_fused_gru_cell"),
    (_recurrent, "recurrent_layer"),
    (_attention, "_scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention"),
    (_attention, "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_cudnn_attention"),
    (_layer_norm, "native_layer_norm _fused_rms_norm"),
    (batch_norm, "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional cudnn_batch_norm"),
    (batch_norm, "_native_batch_norm_legit_no_training _batch_norm_with_update_functional"),
    (_embedding, "embedding"),
    (_gather, "gather"),
    (_index_fill, "index_fill"),
    (index, "index _unsafe_index"),
    (_index_put, "index_put"),
)

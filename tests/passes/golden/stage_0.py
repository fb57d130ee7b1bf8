"""Stage 0 of 2, made by: fxpipe.compile(...)

forward   units 0 to 1, embed to norm
backward  units 0 to 5, embed to (no module)
owns      5 parameters, 224 bytes
receives  328 bytes a microbatch
sends     144 bytes a microbatch

Weights, buffers and saved values are arguments: what they are is the policy's business, not this file's.
It may be edited: `fxpipe run` warns and runs it, as long as sends, receives and arguments stay the same.
"""

import torch

aten = torch.ops.aten


def forward(weights, buffers, batch, comm):
    (
        embed_weight,  # embed.weight: f32[7, 4]
        norm_weight,  # norm.weight: f32[4]
        norm_bias,  # norm.bias: f32[4]
    ) = weights
    (
        norm_running_mean,  # norm.running_mean: f32[4]
        norm_running_var,  # norm.running_var: f32[4]
        norm_num_batches_tracked,  # norm.num_batches_tracked: i64[]
    ) = buffers
    (
        batch_0,  # batch[0]: i64[6]
        batch_1,  # batch[1]: i64[6]
    ) = batch
    comm.send("batch_1", batch_1)  # input to worker 1
    del batch_1
    # embed · golden_model.py:21: x = self.norm(self.embed(ids))
    embed_embedding = torch.embedding(embed_weight, batch_0)  # f32[6, 4]
    # norm · golden_model.py:21: x = self.norm(self.embed(ids))
    norm_add = norm_num_batches_tracked + 1  # i64[]
    norm__native_batch_norm_legit_functional = aten._native_batch_norm_legit_functional.default(embed_embedding, norm_weight, norm_bias, norm_running_mean, norm_running_var, True, 0.1, 1e-05)  # (f32[6, 4], f32[4], f32[4], f32[4], f32[4])
    norm_getitem = norm__native_batch_norm_legit_functional[0]  # f32[6, 4]
    comm.send("norm_getitem", norm_getitem)  # activation to worker 1
    norm_getitem_1 = norm__native_batch_norm_legit_functional[1]  # f32[4]
    norm_getitem_2 = norm__native_batch_norm_legit_functional[2]  # f32[4]
    norm_getitem_3 = norm__native_batch_norm_legit_functional[3]  # f32[4]
    norm_getitem_4 = norm__native_batch_norm_legit_functional[4]  # f32[4]
    del norm__native_batch_norm_legit_functional
    return None, (norm_getitem_3, norm_getitem_4, norm_add), [batch_0, embed_embedding, norm_getitem, norm_getitem_1, norm_getitem_2]


def backward(weights, buffers, saved, comm):
    (
        norm_weight,  # norm.weight: f32[4]
        hidden_weight,  # hidden.weight: f32[4, 4]
    ) = weights
    (
        batch_0,  # i64[6]
        embed_embedding,  # f32[6, 4]
        norm_getitem,  # f32[6, 4]
        norm_getitem_1,  # f32[4]
        norm_getitem_2,  # f32[4]
    ) = saved
    saved.clear()
    # drop · golden_model.py:22: x = x + self.drop(torch.relu(self.hidden(x)))
    drop_getitem_1 = comm.recv("drop_getitem_1")  # b8[6, 4] saved from worker 1
    d_head_mm_1 = comm.recv("d_head_mm_1")  # f32[6, 4] gradient from worker 1
    d_drop_native_dropout_backward = aten.native_dropout_backward.default(d_head_mm_1, drop_getitem_1, 1.3333333333333333)  # f32[6, 4]
    del drop_getitem_1
    # golden_model.py:22: x = x + self.drop(torch.relu(self.hidden(x)))
    relu = comm.recv("relu")  # f32[6, 4] saved from worker 1
    d_threshold_backward = aten.threshold_backward.default(d_drop_native_dropout_backward, relu, 0)  # f32[6, 4]
    del d_drop_native_dropout_backward, relu
    # hidden · golden_model.py:22: x = x + self.drop(torch.relu(self.hidden(x)))
    d_hidden_mm = torch.mm(d_threshold_backward, hidden_weight)  # f32[6, 4]
    d_hidden_t_1 = d_threshold_backward.t()  # f32[4, 6]
    d_hidden_mm_1 = torch.mm(d_hidden_t_1, norm_getitem)  # f32[4, 4]
    del d_hidden_t_1, norm_getitem
    d_hidden_sum = torch.sum(d_threshold_backward, [0], True)  # f32[1, 4]
    del d_threshold_backward
    d_hidden_view = d_hidden_sum.view(4)  # f32[4]
    del d_hidden_sum
    # hidden
    d_add = d_head_mm_1 + d_hidden_mm  # f32[6, 4]
    del d_head_mm_1, d_hidden_mm
    # norm · golden_model.py:21: x = self.norm(self.embed(ids))
    d_norm_native_batch_norm_backward = aten.native_batch_norm_backward.default(d_add, embed_embedding, norm_weight, None, None, norm_getitem_1, norm_getitem_2, True, 1e-05, [True, True, True])  # (f32[6, 4], f32[4], f32[4])
    del d_add, embed_embedding, norm_getitem_1, norm_getitem_2
    d_norm_getitem = d_norm_native_batch_norm_backward[0]  # f32[6, 4]
    d_norm_getitem_1 = d_norm_native_batch_norm_backward[1]  # f32[4]
    d_norm_getitem_2 = d_norm_native_batch_norm_backward[2]  # f32[4]
    del d_norm_native_batch_norm_backward
    # embed · golden_model.py:21: x = self.norm(self.embed(ids))
    d_embed_embedding_dense_backward = aten.embedding_dense_backward.default(d_norm_getitem, batch_0, 7, -1, False)  # f32[7, 4]
    del d_norm_getitem, batch_0
    # embed
    d_head_mm = comm.recv("d_head_mm")  # f32[7, 4] gradient from worker 1
    d_add_1 = d_head_mm + d_embed_embedding_dense_backward  # f32[7, 4]
    del d_embed_embedding_dense_backward, d_head_mm
    return (d_add_1, d_norm_getitem_1, d_norm_getitem_2, d_hidden_mm_1, d_hidden_view)

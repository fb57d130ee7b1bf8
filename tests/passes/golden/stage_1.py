"""Stage 1 of 2, made by: fxpipe.compile(...)

forward   units 2 to 8, hidden to (no module)
backward  units 6 to 8, head to (no module)
owns      0 parameters, 0 bytes
copies    embed.weight, hidden.weight, hidden.bias: 192 bytes
receives  144 bytes a microbatch
sends     328 bytes a microbatch

Weights, buffers and saved values are arguments: what they are is the policy's business, not this file's.
It may be edited: `fxpipe run` warns and runs it, as long as sends, receives and arguments stay the same.
"""

import torch

aten = torch.ops.aten


def forward(weights, buffers, batch, comm):
    (
        embed_weight,  # embed.weight: f32[7, 4]
        hidden_weight,  # hidden.weight: f32[4, 4]
        hidden_bias,  # hidden.bias: f32[4]
    ) = weights
    # hidden · golden_model.py:22: x = x + self.drop(torch.relu(self.hidden(x)))
    hidden_t = hidden_weight.t()  # f32[4, 4]
    norm_getitem = comm.recv("norm_getitem")  # f32[6, 4] activation from worker 0
    hidden_addmm = torch.addmm(hidden_bias, norm_getitem, hidden_t)  # f32[6, 4]
    del hidden_t
    # golden_model.py:22: x = x + self.drop(torch.relu(self.hidden(x)))
    relu = torch.relu(hidden_addmm)  # f32[6, 4]
    del hidden_addmm
    comm.send("relu", relu)  # saved to worker 0
    # drop · golden_model.py:22: x = x + self.drop(torch.relu(self.hidden(x)))
    drop_native_dropout = torch.native_dropout(relu, 0.25, True)  # (f32[6, 4], b8[6, 4])
    del relu
    drop_getitem = drop_native_dropout[0]  # f32[6, 4]
    drop_getitem_1 = drop_native_dropout[1]  # b8[6, 4]
    del drop_native_dropout
    comm.send("drop_getitem_1", drop_getitem_1)  # saved to worker 0
    del drop_getitem_1
    # golden_model.py:22: x = x + self.drop(torch.relu(self.hidden(x)))
    add_2 = norm_getitem + drop_getitem  # f32[6, 4]
    del norm_getitem, drop_getitem
    # head · golden_model.py:23: return self.head(x)
    head_t = embed_weight.t()  # f32[4, 7]
    head_mm = torch.mm(add_2, head_t)  # f32[6, 7]
    del head_t
    # golden_model.py:28: return F.cross_entropy(model(ids), targets)
    log_softmax = aten._log_softmax.default(head_mm, 1, False)  # f32[6, 7]
    del head_mm
    batch_1 = comm.recv("batch_1")  # i64[6] input from worker 0
    nll_loss_forward = aten.nll_loss_forward.default(log_softmax, batch_1, None, 1, -100)  # (f32[], f32[])
    getitem_8 = nll_loss_forward[0]  # f32[]
    getitem_10 = nll_loss_forward[1]  # f32[]
    del nll_loss_forward
    return getitem_8, (), [add_2, log_softmax, batch_1, getitem_10]


def backward(weights, buffers, saved, comm):
    (
        embed_weight,  # embed.weight: f32[7, 4]
    ) = weights
    (
        add_2,  # f32[6, 4]
        log_softmax,  # f32[6, 7]
        batch_1,  # i64[6]
        getitem_10,  # f32[]
    ) = saved
    saved.clear()
    d_loss = aten.ones.default([], dtype=torch.float32, device=torch.device("cpu"))  # f32[]
    # golden_model.py:28: return F.cross_entropy(model(ids), targets)
    d_nll_loss_backward = aten.nll_loss_backward.default(d_loss, log_softmax, batch_1, None, 1, -100, getitem_10)  # f32[6, 7]
    del d_loss, batch_1, getitem_10
    d_log_softmax_backward_data = aten._log_softmax_backward_data.default(d_nll_loss_backward, log_softmax, 1, torch.float32)  # f32[6, 7]
    del d_nll_loss_backward, log_softmax
    # head · golden_model.py:23: return self.head(x)
    d_head_t = d_log_softmax_backward_data.t()  # f32[7, 6]
    d_head_mm = torch.mm(d_head_t, add_2)  # f32[7, 4]
    del d_head_t, add_2
    comm.send("d_head_mm", d_head_mm)  # gradient to worker 0
    del d_head_mm
    d_head_mm_1 = torch.mm(d_log_softmax_backward_data, embed_weight)  # f32[6, 4]
    del d_log_softmax_backward_data
    comm.send("d_head_mm_1", d_head_mm_1)  # gradient to worker 0
    del d_head_mm_1
    return ()

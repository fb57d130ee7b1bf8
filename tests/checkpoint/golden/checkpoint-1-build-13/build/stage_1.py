"""Stage 1 of 2, made by: fxpipe.compile(...)

forward   units 6 to 12, (no module) to (no module)
backward  units 6 to 12, (no module) to (no module)
owns      4 parameters, 360 bytes
receives  288 bytes a microbatch
sends     256 bytes a microbatch

Weights, buffers and saved values are arguments: what they are is the policy's business, not this file's.
It may be edited: `fxpipe run` warns and runs it, as long as sends, receives and arguments stay the same.
"""

import torch

aten = torch.ops.aten


def forward(weights, buffers, batch, comm):
    (
        layers_2_weight,  # layers.2.weight: f32[8, 8]
        layers_2_bias,  # layers.2.bias: f32[8]
        leave_weight,  # leave.weight: f32[2, 8]
        leave_bias,  # leave.bias: f32[2]
    ) = weights
    # make.py:50: x = torch.tanh(layer(x)) + x
    layers_1_addmm = comm.recv("layers_1_addmm")  # f32[4, 8] activation from worker 0
    tanh_2 = aten.tanh.default(layers_1_addmm)  # f32[4, 8]
    del layers_1_addmm
    add_2 = comm.recv("add_2")  # f32[4, 8] activation from worker 0
    add_4 = aten.add.Tensor(tanh_2, add_2)  # f32[4, 8]
    del add_2
    # layers.2 · make.py:50: x = torch.tanh(layer(x)) + x
    layers_2_t = aten.t.default(layers_2_weight)  # f32[8, 8]
    layers_2_addmm = aten.addmm.default(layers_2_bias, add_4, layers_2_t)  # f32[4, 8]
    del layers_2_t
    # make.py:50: x = torch.tanh(layer(x)) + x
    tanh_4 = aten.tanh.default(layers_2_addmm)  # f32[4, 8]
    del layers_2_addmm
    add_6 = aten.add.Tensor(tanh_4, add_4)  # f32[4, 8]
    # leave · make.py:51: return self.leave(x)
    leave_t = aten.t.default(leave_weight)  # f32[8, 2]
    leave_addmm = aten.addmm.default(leave_bias, add_6, leave_t)  # f32[4, 2]
    del leave_t
    # make.py:55: return nn.functional.mse_loss(model(batch[0]), batch[1])
    batch_1 = comm.recv("batch_1")  # f32[4, 2] input from worker 0
    mse_loss = aten.mse_loss.default(leave_addmm, batch_1)  # f32[]
    return mse_loss, (), [tanh_2, add_4, tanh_4, add_6, leave_addmm, batch_1]


def backward(weights, buffers, saved, comm):
    (
        layers_2_weight,  # layers.2.weight: f32[8, 8]
        leave_weight,  # leave.weight: f32[2, 8]
    ) = weights
    (
        tanh_2,  # f32[4, 8]
        add_4,  # f32[4, 8]
        tanh_4,  # f32[4, 8]
        add_6,  # f32[4, 8]
        leave_addmm,  # f32[4, 2]
        batch_1,  # f32[4, 2]
    ) = saved
    saved.clear()
    d_loss = aten.ones.default([], dtype=torch.float32, device=torch.device("cpu"))  # f32[]
    # make.py:55: return nn.functional.mse_loss(model(batch[0]), batch[1])
    d_mse_loss_backward = aten.mse_loss_backward.default(d_loss, leave_addmm, batch_1, 1)  # f32[4, 2]
    del d_loss, leave_addmm, batch_1
    # leave · make.py:51: return self.leave(x)
    d_leave_mm = aten.mm.default(d_mse_loss_backward, leave_weight)  # f32[4, 8]
    # make.py:50: x = torch.tanh(layer(x)) + x
    d_tanh_backward = aten.tanh_backward.default(d_leave_mm, tanh_4)  # f32[4, 8]
    del tanh_4
    # layers.2 · make.py:50: x = torch.tanh(layer(x)) + x
    d_layers_2_mm = aten.mm.default(d_tanh_backward, layers_2_weight)  # f32[4, 8]
    # layers.2
    d_add = aten.add.Tensor(d_leave_mm, d_layers_2_mm)  # f32[4, 8]
    del d_leave_mm, d_layers_2_mm
    comm.send("d_add", d_add)  # gradient to worker 0
    # make.py:50: x = torch.tanh(layer(x)) + x
    d_tanh_backward_1 = aten.tanh_backward.default(d_add, tanh_2)  # f32[4, 8]
    del d_add, tanh_2
    comm.send("d_tanh_backward_1", d_tanh_backward_1)  # gradient to worker 0
    del d_tanh_backward_1
    # leave · make.py:51: return self.leave(x)
    d_leave_t_1 = aten.t.default(d_mse_loss_backward)  # f32[2, 4]
    d_leave_mm_1 = aten.mm.default(d_leave_t_1, add_6)  # f32[2, 8]
    del d_leave_t_1, add_6
    d_leave_sum = aten.sum.dim_IntList(d_mse_loss_backward, [0], True)  # f32[1, 2]
    del d_mse_loss_backward
    d_leave_view = aten.view.default(d_leave_sum, [2])  # f32[2]
    del d_leave_sum
    # layers.2 · make.py:50: x = torch.tanh(layer(x)) + x
    d_layers_2_t_1 = aten.t.default(d_tanh_backward)  # f32[8, 4]
    d_layers_2_mm_1 = aten.mm.default(d_layers_2_t_1, add_4)  # f32[8, 8]
    del d_layers_2_t_1, add_4
    d_layers_2_sum = aten.sum.dim_IntList(d_tanh_backward, [0], True)  # f32[1, 8]
    del d_tanh_backward
    d_layers_2_view = aten.view.default(d_layers_2_sum, [8])  # f32[8]
    del d_layers_2_sum
    return (d_layers_2_mm_1, d_layers_2_view, d_leave_mm_1, d_leave_view)

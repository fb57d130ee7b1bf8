"""Stage 0 of 2, made by: fxpipe.compile(...)

forward   units 0 to 5, enter to layers.1
backward  units 0 to 5, enter to layers.1
owns      7 parameters, 768 bytes
receives  256 bytes a microbatch
sends     288 bytes a microbatch

Weights, buffers and saved values are arguments: what they are is the policy's business, not this file's.
It may be edited: `fxpipe run` warns and runs it, as long as sends, receives and arguments stay the same.
"""

import torch

aten = torch.ops.aten


def forward(weights, buffers, batch, comm):
    (
        enter_weight,  # enter.weight: f32[8, 4]
        norm_weight,  # norm.weight: f32[8]
        norm_bias,  # norm.bias: f32[8]
        layers_0_weight,  # layers.0.weight: f32[8, 8]
        layers_0_bias,  # layers.0.bias: f32[8]
        layers_1_weight,  # layers.1.weight: f32[8, 8]
        layers_1_bias,  # layers.1.bias: f32[8]
    ) = weights
    (
        norm_running_mean,  # norm.running_mean: f32[8]
        norm_running_var,  # norm.running_var: f32[8]
        norm_num_batches_tracked,  # norm.num_batches_tracked: i64[]
    ) = buffers
    (
        batch_0,  # batch[0]: f32[4, 4]
        batch_1,  # batch[1]: f32[4, 2]
    ) = batch
    comm.send("batch_1", batch_1)  # input to worker 1
    del batch_1
    # enter · make.py:48: x = self.norm(self.enter(x))
    enter_t = aten.t.default(enter_weight)  # f32[4, 8]
    enter_mm = aten.mm.default(batch_0, enter_t)  # f32[4, 8]
    del enter_t
    # norm · make.py:48: x = self.norm(self.enter(x))
    norm_add = aten.add.Tensor(norm_num_batches_tracked, 1)  # i64[]
    norm__native_batch_norm_legit_functional = aten._native_batch_norm_legit_functional.default(enter_mm, norm_weight, norm_bias, norm_running_mean, norm_running_var, True, 0.1, 1e-05)  # (f32[4, 8], f32[8], f32[8], f32[8], f32[8])
    norm_getitem = norm__native_batch_norm_legit_functional[0]  # f32[4, 8]
    norm_getitem_1 = norm__native_batch_norm_legit_functional[1]  # f32[8]
    norm_getitem_2 = norm__native_batch_norm_legit_functional[2]  # f32[8]
    norm_getitem_3 = norm__native_batch_norm_legit_functional[3]  # f32[8]
    norm_getitem_4 = norm__native_batch_norm_legit_functional[4]  # f32[8]
    del norm__native_batch_norm_legit_functional
    # layers.0 · make.py:50: x = torch.tanh(layer(x)) + x
    layers_0_t = aten.t.default(layers_0_weight)  # f32[8, 8]
    layers_0_addmm = aten.addmm.default(layers_0_bias, norm_getitem, layers_0_t)  # f32[4, 8]
    del layers_0_t
    # make.py:50: x = torch.tanh(layer(x)) + x
    tanh = aten.tanh.default(layers_0_addmm)  # f32[4, 8]
    del layers_0_addmm
    add_2 = aten.add.Tensor(tanh, norm_getitem)  # f32[4, 8]
    comm.send("add_2", add_2)  # activation to worker 1
    # layers.1 · make.py:50: x = torch.tanh(layer(x)) + x
    layers_1_t = aten.t.default(layers_1_weight)  # f32[8, 8]
    layers_1_addmm = aten.addmm.default(layers_1_bias, add_2, layers_1_t)  # f32[4, 8]
    del layers_1_t
    comm.send("layers_1_addmm", layers_1_addmm)  # activation to worker 1
    del layers_1_addmm
    return None, (norm_getitem_3, norm_getitem_4, norm_add), [batch_0, enter_mm, norm_getitem, norm_getitem_1, norm_getitem_2, tanh, add_2]


def backward(weights, buffers, saved, comm):
    (
        norm_weight,  # norm.weight: f32[8]
        layers_0_weight,  # layers.0.weight: f32[8, 8]
        layers_1_weight,  # layers.1.weight: f32[8, 8]
    ) = weights
    (
        batch_0,  # f32[4, 4]
        enter_mm,  # f32[4, 8]
        norm_getitem,  # f32[4, 8]
        norm_getitem_1,  # f32[8]
        norm_getitem_2,  # f32[8]
        tanh,  # f32[4, 8]
        add_2,  # f32[4, 8]
    ) = saved
    saved.clear()
    # layers.1 · make.py:50: x = torch.tanh(layer(x)) + x
    d_tanh_backward_1 = comm.recv("d_tanh_backward_1")  # f32[4, 8] gradient from worker 1
    d_layers_1_mm = aten.mm.default(d_tanh_backward_1, layers_1_weight)  # f32[4, 8]
    d_layers_1_t_1 = aten.t.default(d_tanh_backward_1)  # f32[8, 4]
    d_layers_1_mm_1 = aten.mm.default(d_layers_1_t_1, add_2)  # f32[8, 8]
    del d_layers_1_t_1, add_2
    d_layers_1_sum = aten.sum.dim_IntList(d_tanh_backward_1, [0], True)  # f32[1, 8]
    del d_tanh_backward_1
    d_layers_1_view = aten.view.default(d_layers_1_sum, [8])  # f32[8]
    del d_layers_1_sum
    # layers.1
    d_add = comm.recv("d_add")  # f32[4, 8] gradient from worker 1
    d_add_1 = aten.add.Tensor(d_add, d_layers_1_mm)  # f32[4, 8]
    del d_layers_1_mm, d_add
    # make.py:50: x = torch.tanh(layer(x)) + x
    d_tanh_backward_2 = aten.tanh_backward.default(d_add_1, tanh)  # f32[4, 8]
    del tanh
    # layers.0 · make.py:50: x = torch.tanh(layer(x)) + x
    d_layers_0_mm = aten.mm.default(d_tanh_backward_2, layers_0_weight)  # f32[4, 8]
    d_layers_0_t_1 = aten.t.default(d_tanh_backward_2)  # f32[8, 4]
    d_layers_0_mm_1 = aten.mm.default(d_layers_0_t_1, norm_getitem)  # f32[8, 8]
    del d_layers_0_t_1, norm_getitem
    d_layers_0_sum = aten.sum.dim_IntList(d_tanh_backward_2, [0], True)  # f32[1, 8]
    del d_tanh_backward_2
    d_layers_0_view = aten.view.default(d_layers_0_sum, [8])  # f32[8]
    del d_layers_0_sum
    # layers.0
    d_add_2 = aten.add.Tensor(d_add_1, d_layers_0_mm)  # f32[4, 8]
    del d_add_1, d_layers_0_mm
    # norm · make.py:48: x = self.norm(self.enter(x))
    d_norm_native_batch_norm_backward = aten.native_batch_norm_backward.default(d_add_2, enter_mm, norm_weight, None, None, norm_getitem_1, norm_getitem_2, True, 1e-05, [True, True, True])  # (f32[4, 8], f32[8], f32[8])
    del d_add_2, enter_mm, norm_getitem_1, norm_getitem_2
    d_norm_getitem = d_norm_native_batch_norm_backward[0]  # f32[4, 8]
    d_norm_getitem_1 = d_norm_native_batch_norm_backward[1]  # f32[8]
    d_norm_getitem_2 = d_norm_native_batch_norm_backward[2]  # f32[8]
    del d_norm_native_batch_norm_backward
    # enter · make.py:48: x = self.norm(self.enter(x))
    d_enter_t = aten.t.default(d_norm_getitem)  # f32[8, 4]
    del d_norm_getitem
    d_enter_mm = aten.mm.default(d_enter_t, batch_0)  # f32[8, 4]
    del d_enter_t, batch_0
    return (d_enter_mm, d_norm_getitem_1, d_norm_getitem_2, d_layers_0_mm_1, d_layers_0_view, d_layers_1_mm_1, d_layers_1_view)

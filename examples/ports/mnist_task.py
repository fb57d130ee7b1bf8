"""mnist.py for fxpipe."""

import torch
from mnist import Net, loaders
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR

model = Net


def loss(net, batch):
    data, target = batch
    return F.nll_loss(net(data), target)


def train_data():
    return loaders()[0]


def optimizer(named_parameters):
    return torch.optim.Adadelta([p for _, p in named_parameters], lr=1.0)


def lr_scheduler(optimizer):
    return StepLR(optimizer, step_size=1, gamma=0.7), "epoch"


def eval_data():
    return loaders()[1]


def metrics(net, batch):
    data, target = batch
    output = net(data)
    return {"loss": F.nll_loss(output, target), "accuracy": (output.argmax(1) == target).float().mean()}

"""word_language_model.py for fxpipe; `fxpipe run --clip-norm 0.25` clips."""

import torch
from word_language_model import RNNModel as model
from word_language_model import batches, batchify, criterion

__all__ = ["eval_data", "loss", "metrics", "model", "optimizer", "train_data"]


def loss(net, batch):
    data, targets = batch
    return criterion(net(data), targets)


def train_data():
    return list(batches(batchify(train=True)))


def optimizer(named_parameters):
    return torch.optim.SGD([p for _, p in named_parameters], lr=2.0)


def eval_data():
    return list(batches(batchify(train=False)))


def metrics(net, batch):
    return {"loss": loss(net, batch)}

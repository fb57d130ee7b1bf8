"""recommendation.py for fxpipe."""

import torch
from recommendation import DeepFM as model
from recommendation import loaders, measured
from torch.nn import functional as F

__all__ = ["eval_data", "loss", "metrics", "model", "optimizer", "train_data"]


def loss(net, batch):
    return F.binary_cross_entropy_with_logits(net(batch), batch.liked)


def train_data():
    return loaders()[0]


def optimizer(named_parameters):
    return torch.optim.Adagrad([p for _, p in named_parameters], lr=0.05)


def eval_data():
    return loaders()[1]


def metrics(net, batch):
    return measured(net(batch), batch.liked)

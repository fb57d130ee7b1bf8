"""translation.py for fxpipe: a batch counts in an evaluation by its words."""

import torch
from torch.optim.lr_scheduler import LambdaLR
from translation import Seq2Seq as model
from translation import criterion as loss
from translation import loader, noam

__all__ = ["eval_data", "loss", "loss_weight", "lr_scheduler", "metrics", "model", "optimizer", "train_data"]


def train_data():
    return loader(256, 0, shuffle=True)


def optimizer(named_parameters):
    return torch.optim.Adam([p for _, p in named_parameters], lr=3e-3, betas=(0.9, 0.98), eps=1e-9)


def lr_scheduler(optimizer):
    return LambdaLR(optimizer, noam)


def eval_data():
    return loader(72, 1, shuffle=False)


def metrics(net, batch):
    return {"loss": loss(net, batch)}


def loss_weight(batch):
    return (batch["labels"] != -100).sum()

"""vae.py for fxpipe: its loss is a sum over the batch, what it measures a mean."""

import torch
from vae import VAE as model
from vae import loaders, parts

__all__ = ["eval_data", "loss", "metrics", "model", "optimizer", "train_data"]


def loss(net, batch):
    data, noise = batch
    recon, mu, logvar = net(data, noise)
    return sum(parts(recon, data, mu, logvar))


def train_data():
    return loaders()[0]


def optimizer(named_parameters):
    return torch.optim.Adam([p for _, p in named_parameters], lr=3e-3)


def eval_data():
    return loaders()[1]


def metrics(net, batch):
    data, noise = batch
    recon, mu, logvar = net(data, noise)
    reconstruction, divergence = parts(recon, data, mu, logvar)
    return {"reconstruction": reconstruction / len(data), "divergence": divergence / len(data)}

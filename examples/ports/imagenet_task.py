"""imagenet.py for fxpipe, with one microbatch: batch norm takes the mean over all of a batch."""

from imagenet import ResNet as model
from imagenet import accuracy, loaders, make_scheduler
from imagenet import make_optimizer as optimizer
from torch import nn

__all__ = ["eval_data", "loss", "lr_scheduler", "metrics", "model", "optimizer", "train_data"]

criterion = nn.CrossEntropyLoss(label_smoothing=0.1)


def loss(net, batch):
    images, target = batch
    return criterion(net(images), target)


def train_data():
    return loaders()[0]


def lr_scheduler(optimizer):
    return make_scheduler(optimizer), "epoch"


def eval_data():
    return loaders()[1]


def metrics(net, batch):
    images, target = batch
    return accuracy(net(images), target)

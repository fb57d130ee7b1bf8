"""glue.py for fxpipe, which makes stages for every length that batches are padded to."""

from glue import loaders, make_scheduler
from glue import make_model as model
from glue import make_optimizer as optimizer

__all__ = ["eval_data", "loss", "lr_scheduler", "metrics", "model", "optimizer", "train_data"]


def loss(net, batch):
    return net(**batch).loss


def train_data():
    return loaders()[0]


def lr_scheduler(optimizer):
    return make_scheduler(optimizer)


def eval_data():
    return loaders()[1]


def metrics(net, batch):
    return {"accuracy": (net(**batch).logits.argmax(-1) == batch["labels"]).float().mean()}

"""nanogpt.py for fxpipe, whose microbatches accumulate gradients; `fxpipe run --clip-norm 1.0` clips."""

from nanogpt import ACCUMULATE, BATCH, RATE, get_batch, get_lr
from nanogpt import GPT as model
from nanogpt import configure_optimizers as optimizer
from torch.optim.lr_scheduler import LambdaLR

__all__ = ["eval_data", "loss", "lr_scheduler", "metrics", "model", "optimizer", "train_data"]


def loss(net, batch):
    return net(*batch)[1]


def train_data():
    while True:
        yield get_batch("train", ACCUMULATE * BATCH)


def lr_scheduler(optimizer):
    return LambdaLR(optimizer, lambda it: get_lr(it) / RATE)


def eval_data():
    return [get_batch("val") for _ in range(4)]


def metrics(net, batch):
    return {"loss": net(*batch)[1]}

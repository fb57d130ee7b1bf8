"""Two equal towers and a small head, on devices that this machine does not have: blocks wait instead of computing.

So workers do not share its cores, and what is measured is only who waits for whom.
"""

import time

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, BLOCKS, BATCH = 8, 4, 8
SECONDS = 0.01  # of a block's forward for the whole batch; its backward takes twice as long


@torch.library.custom_op("branches::wait", mutates_args=())
def wait(x: torch.Tensor, seconds: float) -> torch.Tensor:
    """A copy of x, after a time in proportion to its samples."""
    time.sleep(seconds * len(x) / BATCH)
    return x.clone()


@wait.register_fake
def _(x, seconds):
    return torch.empty_like(x)


def keep_seconds(ctx, inputs, output):
    ctx.seconds = inputs[1]


wait.register_autograd(lambda ctx, gradient: (wait(gradient, 2 * ctx.seconds), None), setup_context=keep_seconds)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.tanh(self.linear(wait(x, SECONDS)))


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, 10)

    def forward(self, left, right):
        return self.linear(left * right)


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        # a tower's first layer makes the gradient that its first block waits with
        self.left, self.right = (
            nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Block() for _ in range(BLOCKS))) for _ in "12"
        )
        self.head = Head()

    def forward(self, x, y):
        return self.head(self.left(x), self.right(y))


def model():
    return Towers()


def loss(model, batch):
    x, y, classes = batch
    return F.cross_entropy(model(x, y), classes)


def train_data():
    torch.manual_seed(0)
    return [(torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH), torch.randint(10, (BATCH,)))] * 100


def optimizer(named_parameters):
    return torch.optim.SGD(named_parameters, lr=0.01, momentum=0.9)

"""Two equal towers of matrix products, whose layers take turns, and a small head."""

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, BLOCKS, BATCH = 512, 4, 256


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, 10)

    def forward(self, left, right):
        return self.linear(left * right)


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = (
            nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(BLOCKS)) for _ in "12"
        )
        self.head = Head()

    def forward(self, x, y):
        for left, right in zip(self.left, self.right, strict=True):
            x, y = left(x), right(y)
        return self.head(x, y)


def model():
    return Towers()


def loss(model, batch):
    x, y, classes = batch
    return F.cross_entropy(model(x, y), classes)


def train_data():
    torch.manual_seed(0)
    return [(torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH), torch.randint(10, (BATCH,)))] * 100


def optimizer(named_parameters):
    return torch.optim.SGD(named_parameters, lr=0.01)

"""A model whose training and evaluation differ in all that may differ, as a file and as builds of it.

Dropout, batch norm, a tied weight, a frozen one that two workers read, a constant that only metrics read, batches of
two shapes, and a metric that is a plain number.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fxpipe
from fxpipe.builds.build import Build
from fxpipe.task.model_file import Task, load_task

MODEL = """\
import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.4)

    def forward(self, x):
        return x + self.dropout(torch.tanh(self.norm(self.linear(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList([Block() for _ in range(6)])
        self.scale = nn.Parameter(torch.full((8,), 1.5), requires_grad=False)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.scale)


def model():
    torch.manual_seed(0)
    return Net()


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def train_data():
    return [(torch.randint(0, 11, (8,)), torch.randint(0, 11, (8,))) for _ in range(4)]


def eval_data():
    for size in (12, 5, 12, 12):
        yield torch.randint(0, 11, (size,)), torch.randint(0, 11, (size,))


def metrics(model, batch):
    ids, targets = batch
    logits = model(ids)
    right = (logits.argmax(-1) == targets).float()
    return {"accuracy": right.mean(), "size": len(ids), "loss": F.cross_entropy(logits, targets),
            "weighed": (logits * torch.linspace(0, 1, 11)).sum(), "norm": model.scale.norm(),
            "frozen": model.embed.weight.norm()}


def optimizer(named_parameters):
    return torch.optim.AdamW([p for _, p in named_parameters], lr=1e-2)
"""


def write_evaluated(folder: Path, *edits: tuple[str, str]) -> Path:
    """The model's file, with edits."""
    text = MODEL
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    path = folder / "evaluated.py"
    path.write_text(text)
    return path


def build_of(path: Path, **options: Any) -> tuple[Task, Build]:
    """The file's task, and a build of it; its backward is cut one block before its forward."""
    task = load_task(path)
    where = {"forward_at": ("blocks.2", "blocks.4"), "backward_at": ("blocks.1", "blocks.3")}
    chosen: dict[str, Any] = {"workers": 3, "cost": "analytic", **where, **options}
    evaluation = (task.metrics, list(task.eval_data()))
    build = fxpipe.compile(task.model(), task.loss, task.example(), evaluation=evaluation, **chosen)
    return task, build

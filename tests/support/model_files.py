"""A tiny model file as a user would write it, to be changed in one place by each test."""

from __future__ import annotations

from pathlib import Path

SOURCE = """\
import torch
from torch import nn
from torch.nn import functional as F


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        for block in self.blocks:
            x = F.dropout(torch.tanh(block(x)), 0.1, self.training)
        return self.head(self.norm(x))


def model():
    return Net()


def loss(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"])


def train_data():
    return [{"x": torch.randn(4, 6), "y": torch.randint(0, 3, (4,))} for _ in range(5)]


def optimizer(named_parameters):
    return torch.optim.SGD([p for _, p in named_parameters], lr=0.05, momentum=0.9)
"""
STEPS = 5  # batches in train_data()
MODULES = ("first", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "norm", "head")
PARAMETERS = {f"{module}.{name}" for module in MODULES for name in ("weight", "bias")}


def write_model(folder: Path, *edits: tuple[str, str], name: str = "model.py") -> Path:
    """Write the model file, with each edit's old text (which must be there) replaced."""
    source = SOURCE
    for old, new in edits:
        assert old in source, old
        source = source.replace(old, new)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(source)
    return path


def line_of(path: Path, text: str) -> int:
    """The number of the one line that holds `text`."""
    (number,) = (i for i, line in enumerate(path.read_text().splitlines(), 1) if text in line)
    return number

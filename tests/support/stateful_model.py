"""A language model whose hidden state is in buffers: truncated backpropagation through time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WORDS, WIDTH, BATCH, LENGTH = 11, 8, 4, 5
Batch = tuple[Tensor, Tensor]


class StatefulLSTM(nn.Module):
    """One layer; goes on from the state that the batch before has left."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH)
        self.register_buffer("hidden", torch.zeros(1, BATCH, WIDTH))
        self.register_buffer("cell", torch.zeros(1, BATCH, WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.shape[1]  # a smaller batch has the first rows alone
        out, (hidden, cell) = self.lstm(x, (self.hidden[:, :rows].clone(), self.cell[:, :rows].clone()))
        self.hidden[:, :rows] = hidden.detach()
        self.cell[:, :rows] = cell.detach()
        return out


class WordModel(nn.Module):
    """Time comes first in its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.first, self.second = StatefulLSTM(), StatefulLSTM()
        self.out = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        return self.out(self.second(self.first(self.words(words))))

    def forget(self) -> None:
        for layer in (self.first, self.second):
            layer.hidden.zero_()
            layer.cell = torch.zeros_like(layer.cell)


def model() -> WordModel:
    torch.manual_seed(0)
    return WordModel()


def loss(net: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(net(batch[0]).flatten(0, 1), batch[1].flatten())


def metrics(net: nn.Module, batch: Batch) -> dict[str, Tensor]:
    return {"loss": loss(net, batch)}


def optimizer(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.5, momentum=0.5)


def reset(net: Any) -> None:
    net.forget()


def in_eager(steps: Sequence[Batch], epochs: int, held_out: Sequence[Batch], every: int) -> tuple[list[float], Any]:
    """The losses of a loop that forgets at the start of epochs and evaluations; the metric by step."""
    net = model()
    trained = optimizer(net.named_parameters())
    losses, evaluated = list[float](), dict[int, float]()
    for _ in range(epochs):
        net.forget()
        for batch in steps:
            trained.zero_grad()
            found = loss(net, batch)
            found.backward()
            trained.step()
            losses.append(found.item())
            if len(losses) % every == 0:
                evaluated[len(losses)] = measured(net, held_out, resets=True)
    return losses, evaluated


def batches(count: int, seed: int, sizes: Sequence[int] = (BATCH,)) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(LENGTH, sizes[i % len(sizes)]) for i in range(count)]
    return [tuple(torch.randint(WORDS, s, generator=generator) for _ in range(2)) for s in shapes]  # type: ignore[misc]


def measured(net: WordModel, held_out: Sequence[Batch], resets: bool = False) -> float:
    """The mean loss in eager PyTorch; the state is afterwards as it was. All batches count alike: time comes first."""
    before = {name: value.clone() for name, value in net.named_buffers()}
    net.eval()
    if resets:
        net.forget()
    with torch.no_grad():
        losses = [float(loss(net, batch)) for batch in held_out]
    net.train()
    for name, value in net.named_buffers():
        value.copy_(before[name])
    return sum(losses) / len(losses)

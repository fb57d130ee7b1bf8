"""The study's workloads: a model, its data, where it is cut, and how long and at which rates it is trained."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import data
import models
import torch
from torch import Tensor, nn
from torch.nn import functional as F

PIECES = 8
Batch = tuple[Tensor, Tensor]
Metric = Literal["accuracy", "nats"]


@dataclass(frozen=True)
class Workload:
    """A model and its data.

    Attributes:
        read: its samples.
        pieces: the modules that begin the eight pieces.
        rates: the centre of the learning-rate grid, by optimizer.
        metric: of held-out data: the share of right answers, or nats per byte.
    """

    name: str
    model: Callable[[], nn.Module]
    read: Callable[[], data.Data]
    pieces: tuple[str, ...]
    rates: dict[str, float]
    steps: int
    metric: Metric = "accuracy"
    batch: int = 32

    def cuts(self, workers: int) -> tuple[str, ...]:
        """The modules to cut before: the same for forward and backward, so that only staleness is studied."""
        each = PIECES // workers
        return self.pieces[each::each]

    def make(self, seed: int) -> nn.Module:
        """The model with this seed's initial weights; the process's random state is left alone."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.model()

    def batches(self, seed: int) -> Iterator[Batch]:
        """Endless minibatches, every sample once in each round; a round's partial last one is dropped."""
        generator = torch.Generator().manual_seed(seed)
        known = self.load()
        while True:
            order = torch.randperm(len(known.targets), generator=generator)
            for chosen in order.split(self.batch)[: len(order) // self.batch]:
                yield known.inputs[chosen], known.targets[chosen]

    def load(self) -> data.Data:
        """The data, read once a process."""
        return _load(self.read)

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> float:
        """The metric on the held-out samples, in eval mode."""
        known = self.load()
        model.eval()
        logits = model(known.held_inputs)
        if self.metric == "nats":
            return float(F.cross_entropy(logits.flatten(0, -2), known.held_targets.flatten()))
        return float((logits.argmax(-1) == known.held_targets).float().mean())


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross-entropy, over all positions where every position has a target."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


@functools.cache
def _load(read: Callable[[], data.Data]) -> data.Data:
    return read()


def _numbered(stem: str, numbers: Sequence[int]) -> tuple[str, ...]:
    return tuple(f"{stem}.{number}" for number in numbers)


VGG = _numbered("layers", range(PIECES))
RESNET = ("stem", *_numbered("blocks", range(6)), "head")
SNN = _numbered("layers", range(0, 32, 4))
LSTM = ("embed", *_numbered("layers", range(1, PIECES)))
BLOCKS = ("embed", *_numbered("blocks", range(1, PIECES)))


def _lstm() -> nn.Module:
    return models.ResidualLSTM(data.VOCABULARY, len(data.PACKAGES))


def _transformer() -> nn.Module:
    return models.Transformer(data.VOCABULARY, data.WORDS, len(data.PACKAGES), causal=False)


def _gpt() -> nn.Module:
    return models.Transformer(256, data.CONTEXT, 256, causal=True)


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("vgg", models.VGG, data.digits, VGG, {"sgd": 0.03}, steps=400),
        Workload("resnet", models.ResNet, data.digits, RESNET, {"sgd": 0.03}, steps=400),
        Workload("snn", models.SNN, data.digits, SNN, {"sgd": 0.001}, steps=600),
        Workload("lstm", _lstm, data.lines, LSTM, {"sgd": 0.3}, steps=240),
        Workload("transformer", _transformer, data.lines, BLOCKS, {"sgd": 0.01, "adamw": 0.001}, steps=320),
        Workload("gpt", _gpt, data.windows, BLOCKS, {"sgd": 0.03, "adamw": 0.003}, steps=200, metric="nats"),
    )
}

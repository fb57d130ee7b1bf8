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

Batch = tuple[Tensor, Tensor]
Metric = Literal["accuracy", "nats"]


@dataclass(frozen=True)
class Workload:
    """A model and its data.

    Attributes:
        read: its samples.
        pieces: for a number of workers, the modules that begin their pieces, the first one's left out.
        rates: the centre of the learning-rate grid, by optimizer.
        metric: of held-out data: the share of right answers, or nats per byte.
    """

    name: str
    model: Callable[[], nn.Module]
    read: Callable[[], data.Data]
    pieces: dict[int, tuple[str, ...]]
    rates: dict[str, float]
    steps: int
    metric: Metric = "accuracy"
    batch: int = 32

    def cuts(self, workers: int) -> tuple[str, ...]:
        """The modules to cut before: the same for forward and backward, so that only staleness is studied."""
        most = min(n for n in self.pieces if n % workers == 0)
        each = most // workers
        return self.pieces[most][each - 1 :: each]

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


def _halves(blocks: int) -> tuple[str, ...]:
    """Two pieces of every transformer block, its attention and its MLP."""
    return tuple(f"blocks.{number // 2}" + (".norm2" if number % 2 else "") for number in range(1, 2 * blocks))


# From 8 workers to 16, a piece of vgg and resnet becomes a convolution and what follows it.
VGG = {
    8: _numbered("layers", range(1, 8)),
    16: (
        *("layers.0.1", "layers.1", "layers.1.0.1", "layers.1.1", "layers.2", "layers.2.1", "layers.3", "layers.3.1"),
        *("layers.4", "layers.4.0.1", "layers.5", "layers.5.1", "layers.6", "layers.6.2", "layers.7"),
    ),
}
RESNET = {
    8: (*_numbered("blocks", range(6)), "head"),
    16: (
        "stem.1",
        *(f"blocks.{number}{half}" for number in range(6) for half in ("", ".second")),
        *("blocks.5.norm", "head"),
    ),
}
SNN = {32: _numbered("layers", range(1, 32))}


def _lstm(layers: int) -> nn.Module:
    return models.ResidualLSTM(data.VOCABULARY, len(data.PACKAGES), layers)


def _transformer() -> nn.Module:
    return models.Transformer(data.VOCABULARY, data.WORDS, len(data.PACKAGES), causal=False)


def _gpt(blocks: int) -> nn.Module:
    return models.Transformer(256, data.CONTEXT, 256, causal=True, blocks=blocks)


def _lstm_pieces(layers: int) -> dict[int, tuple[str, ...]]:
    return {layers: _numbered("layers", range(1, layers))}


VGG_GN = functools.partial(models.VGG, models.group_norm)
RESNET_GN = functools.partial(models.ResNet, models.group_norm)
LSTM = functools.partial(_lstm, 8)
DEEP_LSTM = functools.partial(_lstm, 16)
GPT = functools.partial(_gpt, 8)
DEEP_GPT = functools.partial(_gpt, 16)
TEXT = {"sgd": 0.01, "adamw": 0.001, "muon": 0.001}
BYTES = {"sgd": 0.03, "adamw": 0.003, "muon": 0.003}

WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("vgg", models.VGG, data.digits, VGG, {"sgd": 0.03}, steps=400),
        Workload("resnet", models.ResNet, data.digits, RESNET, {"sgd": 0.03}, steps=400),
        Workload("vgg_gn", VGG_GN, data.digits, VGG, {"sgd": 0.01}, steps=400),
        Workload("resnet_gn", RESNET_GN, data.digits, RESNET, {"sgd": 0.01}, steps=400),
        Workload("snn", models.SNN, data.digits, SNN, {"sgd": 0.001}, steps=600),
        Workload("lstm", LSTM, data.lines, _lstm_pieces(8), {"sgd": 0.3}, steps=240),
        Workload("transformer", _transformer, data.lines, {16: _halves(8)}, TEXT, steps=320),
        Workload("gpt", GPT, data.windows, {16: _halves(8)}, BYTES, steps=200, metric="nats"),
        Workload("deep_lstm", DEEP_LSTM, data.lines, _lstm_pieces(16), {"sgd": 0.3}, steps=240),
        Workload("long_gpt", GPT, data.windows, {16: _halves(8)}, {"adamw": 0.003}, steps=3000, metric="nats"),
        Workload("deep_gpt", DEEP_GPT, data.windows, {32: _halves(16)}, {"adamw": 0.003}, steps=200, metric="nats"),
    )
}

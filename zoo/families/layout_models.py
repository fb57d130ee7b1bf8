"""Models whose values lie transposed in memory where norms, recurrences and random activations read them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from families.entry import CLASSES, ZooModel, classify, images
from families.huggingface import transformers_model

KIND = "transposed layouts"
LENGTH, CHANNELS = 16, 3
PATCHES = {
    "num_input_channels": CHANNELS, "context_length": LENGTH, "patch_length": 4, "patch_stride": 4,
    "prediction_length": 4, "num_hidden_layers": 3, "d_model": 16, "num_attention_heads": 2, "ffn_dim": 32,
}  # fmt: skip


def _series(size: int) -> Any:
    return {"past_values": torch.randn(size, LENGTH, CHANNELS), "future_values": torch.randn(size, 4, CHANNELS)}


def _patch_tst(name: str, **options: Any) -> ZooModel:
    return transformers_model(name, "PatchTSTForPrediction", "time series", _series, base=PATCHES, **options)


class TransposedNorms(nn.Module):
    """A stack over series [sample, time, feature]: each layer norms the transposed one, over features or over time."""

    def __init__(self, norm: Callable[[int], nn.Module], width: int = 24, depth: int = 6) -> None:
        super().__init__()
        self.first = nn.Linear(CHANNELS, width)
        self.mixes = nn.ModuleList([nn.Linear(width, width) for _ in range(depth)])
        self.norms = nn.ModuleList([norm(width) for _ in range(depth)])
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for mix, norm in zip(self.mixes, self.norms, strict=True):
            x = x + torch.tanh(norm(mix(x).transpose(1, 2)).transpose(1, 2))
        return self.head(x.mean(1))


class TransposedRecurrences(nn.Module):
    """A GRU and an LSTM, whose outputs are transposed into batch norm, layer norm over time, and group norm."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.gru = nn.GRU(CHANNELS, width, batch_first=True)
        self.over_features = nn.BatchNorm1d(width)
        self.over_time = nn.LayerNorm(LENGTH)
        self.lstm = nn.LSTM(width, width)
        self.over_groups = nn.GroupNorm(3, width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.gru(x)
        x = self.over_time(self.over_features(x.transpose(1, 2)))
        x, _ = self.lstm(x.permute(2, 0, 1))
        return self.head(self.over_groups(x.permute(1, 2, 0)).mean(2))


class Randomly(nn.Module):
    """Randomized leaky relu on transposed values."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Linear(LENGTH, LENGTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.rrelu(self.scale(x), training=self.training)


class PixelsInFront(nn.Module):
    """Patches of images with their pixels as features [sample, height, width, channel], between transposed norms."""

    def __init__(self, width: int = 16, depth: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.spread = nn.ModuleList([nn.Conv2d(width, width, 3, padding=1, groups=width) for _ in range(depth)])
        self.mixes = nn.ModuleList([nn.Linear(width, width) for _ in range(depth)])
        self.channels = nn.ModuleList([nn.LayerNorm(width) for _ in range(depth)])
        self.batches = nn.ModuleList([nn.BatchNorm2d(width) for _ in range(depth)])
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).permute(0, 2, 3, 1)
        for spread, mix, over_channels, over_batch in zip(
            self.spread, self.mixes, self.channels, self.batches, strict=True
        ):
            y = over_batch(spread(x.permute(0, 3, 1, 2))).permute(0, 2, 3, 1)
            x = x + F.gelu(mix(over_channels(y.transpose(1, 2)))).transpose(1, 2)
        return self.head(x.reshape(len(x), -1, x.shape[-1]).mean(1))


def _classified_series(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, LENGTH, CHANNELS), torch.randint(0, CLASSES, (size,))


def _own(name: str, model: Callable[[], nn.Module], batch: Callable[[int], Any] = _classified_series) -> ZooModel:
    return ZooModel(name, model, classify, batch, kind=KIND)


MODELS = (
    _patch_tst("patchtst"),
    _patch_tst("patchtst_layernorm", norm_type="layernorm", channel_attention=True),
    _own("batch_norm_transposed", lambda: TransposedNorms(nn.BatchNorm1d)),
    _own("instance_norm_transposed", lambda: TransposedNorms(lambda width: nn.InstanceNorm1d(width, affine=True))),
    _own("layer_norm_transposed", lambda: TransposedNorms(lambda width: nn.LayerNorm(LENGTH))),
    _own("rrelu_transposed", lambda: TransposedNorms(Randomly)),
    _own("recurrent_transposed", TransposedRecurrences),
    _own("channels_last_mixer", PixelsInFront, images(16)),
)

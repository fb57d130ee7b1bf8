"""Recurrent networks: torch's layers and cells, alone, in stacks, in both directions, with attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from families.core_models import ResidualLSTM
from families.entry import CLASSES, VOCABULARY, ZooModel, classify, mean_square, next_token, tokens

KIND = "recurrent"
STEPS = 8


class Stack(nn.Module):
    """Embedded tokens, one recurrent module of several layers with dropout between them; the next token."""

    def __init__(self, kind: type[nn.RNNBase], width: int = 48, layers: int = 4, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = kind(width, width, layers, batch_first=True, dropout=0.2, **options)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(ids))[0])


class Bidirectional(nn.Module):
    """LSTM layers in both directions, time first; the last states of both give a class."""

    def __init__(self, width: int = 32, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.LSTM(width, width, layers, bidirectional=True)
        self.head = nn.Linear(2 * width, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        _, (state, _) = self.layers(self.embed(ids.T))
        return self.head(torch.cat([state[-2], state[-1]], 1))


class Series(nn.Module):
    """An LSTM that reads the batch itself, with projections; forecasts the next values."""

    def __init__(self, features: int = 6, width: int = 48) -> None:
        super().__init__()
        self.layers = nn.LSTM(features, width, 3, batch_first=True, proj_size=24)
        self.head = nn.Linear(24, features)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x)[0])


class Translator(nn.Module):
    """GNMT-like (Wu et al., 2016): a bidirectional layer, residual encoder layers, and a decoder whose first layer
    attends and gives the context to all others."""

    def __init__(self, width: int = 32, depth: int = 4) -> None:
        super().__init__()
        self.source = nn.Embedding(VOCABULARY, width, padding_idx=0)
        self.target = nn.Embedding(VOCABULARY, width, padding_idx=0)
        self.first = nn.LSTM(width, width // 2, bidirectional=True, batch_first=True)
        self.encoder = nn.ModuleList([nn.LSTM(width, width, batch_first=True) for _ in range(depth - 1)])
        self.query = nn.LSTM(width, width, batch_first=True)
        self.attention = nn.MultiheadAttention(width, 1, batch_first=True)
        self.decoder = nn.ModuleList([nn.LSTM(2 * width, width, batch_first=True) for _ in range(depth - 1)])
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        x = self.first(self.source(source))[0]
        for k, layer in enumerate(self.encoder):
            x = layer(self.dropout(x))[0] + (x if k else 0)
        y = self.query(self.target(target))[0]
        context = self.attention(y, x, x, key_padding_mask=source == 0, need_weights=False)[0]
        for k, layer in enumerate(self.decoder):
            y = layer(self.dropout(torch.cat([y, context], -1)))[0] + (y if k else 0)
        return self.head(y)


class Cells(nn.Module):
    """LSTM and GRU cells in a loop over time, the input fed to both; the last state gives a class."""

    def __init__(self, features: int = 6, width: int = 32) -> None:
        super().__init__()
        self.lower = nn.LSTMCell(features, width)
        self.middle = nn.GRUCell(width, width)
        self.upper = nn.RNNCell(width, width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = c = middle = upper = x.new_zeros(len(x), self.upper.hidden_size)
        for now in x.unbind(1):
            h, c = self.lower(now, (h, c))
            middle = self.middle(h, middle)
            upper = self.upper(middle, upper)
        return self.head(upper)


class ConvLSTM(nn.Module):
    """ConvLSTM (Shi et al., 2015): gates by convolutions over frames; the next frame."""

    def __init__(self, channels: int = 2, width: int = 8, layers: int = 2) -> None:
        super().__init__()
        self.width = width
        self.gates = nn.ModuleList(
            [nn.Conv2d((channels if k == 0 else width) + width, 4 * width, 3, padding=1) for k in range(layers)]
        )
        self.head = nn.Conv2d(width, channels, 1)

    def forward(self, frames: Tensor) -> Tensor:
        zeros = frames.new_zeros(len(frames), self.width, *frames.shape[-2:])
        states = [(zeros, zeros) for _ in self.gates]
        for frame in frames.unbind(1):
            x = frame
            for k, gates in enumerate(self.gates):
                h, c = states[k]
                i, f, g, o = gates(torch.cat([x, h], 1)).chunk(4, 1)
                c = f.sigmoid() * c + i.sigmoid() * g.tanh()
                x = o.sigmoid() * c.tanh()
                states[k] = (x, c)
        return self.head(states[-1][0])


class SpeechRecognizer(nn.Module):
    """DeepSpeech2-like (Amodei et al., 2016): convolutions over spectra, GRU layers in both directions."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, 8, (5, 3), (2, 1), (2, 1)), nn.BatchNorm2d(8), nn.Hardtanh(0, 20),
            nn.Conv2d(8, 8, (5, 3), (2, 2), (2, 1)), nn.BatchNorm2d(8), nn.Hardtanh(0, 20),
        )  # fmt: skip
        self.layers = nn.GRU(8 * 5, width, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, 12)

    def forward(self, spectra: Tensor) -> Tensor:
        x = self.stem(spectra[:, None]).flatten(1, 2).mT
        return self.head(self.layers(x)[0]).log_softmax(-1)


def _spoken(model: nn.Module, batch: Any) -> Tensor:
    """Connectionist temporal classification of words of one length."""
    spectra, words = batch
    found = model(spectra)
    size, frames = found.shape[:2]
    return F.ctc_loss(found.transpose(0, 1), words, (frames,) * size, (words.shape[1],) * size)


def _speech(size: int) -> Any:
    return torch.randn(size, 20, 2 * STEPS), torch.randint(1, 12, (size, 3))


def _framed(model: nn.Module, batch: Any) -> Tensor:
    """A letter for every frame."""
    spectra, letters = batch
    return F.nll_loss(model(spectra).flatten(0, 1), letters.flatten())


def _aligned_speech(size: int) -> Any:
    return torch.randn(size, 20, 2 * STEPS), torch.randint(0, 12, (size, STEPS))


def _classed(size: int) -> Any:
    return torch.randint(0, VOCABULARY, (size, STEPS)), torch.randint(0, CLASSES, (size,))


def _series(size: int) -> Any:
    x = torch.randn(size, STEPS + 1, 6)
    return x[:, :-1].contiguous(), x[:, 1:].contiguous()


def _labelled_series(size: int) -> Any:
    return torch.randn(size, STEPS, 6), torch.randint(0, CLASSES, (size,))


def _translated(model: nn.Module, batch: Any) -> Tensor:
    source, target, labels = batch
    return F.cross_entropy(model(source, target).flatten(0, 1), labels.flatten(), ignore_index=0)


def _translations(size: int) -> Any:
    source, target = torch.randint(1, VOCABULARY, (2, size, STEPS))
    source = source.masked_fill(torch.arange(STEPS) >= torch.randint(STEPS // 2, STEPS + 1, (size, 1)), 0)
    return source, target, target.roll(-1, 1)


def _frames(size: int) -> Any:
    return torch.randn(size, 5, 2, 16, 16), torch.randn(size, 2, 16, 16)


def _entry(name: str, model: Any, loss: Any, batch: Any, **more: Any) -> ZooModel:
    return ZooModel(name, model, loss, batch, kind=KIND, **more)


MODELS = (
    _entry("rnn", lambda: Stack(nn.RNN), next_token, tokens),
    _entry("lstm", lambda: Stack(nn.LSTM), next_token, tokens, random=True),
    _entry("gru", lambda: Stack(nn.GRU), next_token, tokens, random=True),
    _entry("lstm_bidirectional", Bidirectional, classify, _classed),
    _entry("lstm_series", Series, mean_square, _series),
    _entry("lstm_residual", ResidualLSTM, next_token, tokens, random=True),
    _entry("gnmt", Translator, _translated, _translations, random=True),
    _entry("recurrent_cells", Cells, classify, _labelled_series),
    _entry("conv_lstm", ConvLSTM, mean_square, _frames),
    _entry("deep_speech", SpeechRecognizer, _framed, _aligned_speech),
    _entry("deep_speech_ctc", SpeechRecognizer, _spoken, _speech, refused=("whose shape depends on values",
        "torch declares the shape of ctc_loss's intermediate result as dependent on data, for fixed lengths, too")),
)  # fmt: skip

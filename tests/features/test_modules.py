"""Modules: recurrent ones, attention, parametrizations, pruning, lazy ones that were initialised."""

from __future__ import annotations

import pytest
import torch
from features import WIDTH, Feature, check, layers
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune


class Recurrent(nn.Module):
    """LSTM with projection, bidirectional GRU, plain RNN with ReLU, given initial states, final states read."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4, num_layers=2, batch_first=True, proj_size=3)
        self.gru = nn.GRU(3, 3, bidirectional=True, batch_first=True)
        self.rnn = nn.RNN(6, WIDTH, nonlinearity="relu", bias=False)
        self.start = nn.Parameter(torch.zeros(2, 1, 3))

    def forward(self, x: Tensor) -> Tensor:
        y = x.unflatten(1, (2, 3))
        start = self.start.expand(-1, len(x), -1).contiguous()
        y, (hidden, cell) = self.lstm(y, (start, torch.zeros(2, len(x), 4)))
        y, last = self.gru(y + hidden.transpose(0, 1))
        y, _ = self.rnn(y.transpose(0, 1))
        return torch.tanh(y[-1]) + last.transpose(0, 1).flatten(1) + cell.mean((0, 2))[:, None]


class Cells(nn.Module):
    """Loops over cells: LSTMCell, GRUCell, RNNCell, and a Python loop with a growing list."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru, self.rnn = nn.LSTMCell(2, 3), nn.GRUCell(3, 3), nn.RNNCell(3, 2)
        self.last = nn.Linear(6, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        state, hidden, seen = None, torch.zeros(len(x), 3), []
        for piece in x.split(2, dim=1):
            state = self.lstm(piece, state)
            hidden = self.gru(state[0], hidden)
            seen.append(self.rnn(hidden))
        return self.last(torch.cat(seen, 1))


class Attention(nn.Module):
    """nn.MultiheadAttention with masks and averaged weights, scaled_dot_product_attention, grouped heads."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.MultiheadAttention(WIDTH, 2, batch_first=True, add_bias_kv=True)
        self.cross = nn.MultiheadAttention(WIDTH, 2, kdim=WIDTH, vdim=3, bias=False)
        self.layers = layers(2)

    def forward(self, x: Tensor) -> Tensor:
        y = x[None]
        padding = torch.zeros(1, y.shape[1], dtype=torch.bool)
        padding[:, -1] = True
        y = y + self.own(y, y, y, key_padding_mask=padding, need_weights=False)[0]
        y = torch.tanh(self.layers[0](y)).transpose(0, 1)
        z, weights = self.cross(y, y, y[..., :3], attn_mask=torch.ones(len(y), len(y)).triu(1).bool())
        y = (z + y).transpose(0, 1).unflatten(-1, (2, 3)).transpose(1, 2)
        y = F.scaled_dot_product_attention(y, y, y, is_causal=True) + F.scaled_dot_product_attention(
            y, y[:, :1], y[:, :1], attn_mask=weights.detach(), enable_gqa=True
        )
        return self.layers[1](y.transpose(1, 2).flatten(2)[0])


class Transformers(nn.Module):
    """The library's own encoder and decoder layers, before and behind their norms, with masks."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            WIDTH, 2, 8, dropout=0.0, batch_first=True, norm_first=True, activation="gelu"
        )
        self.encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(len(x))
        y = self.encoder(x[None], mask=mask, is_causal=True)
        return self.decoder(x[None], y, tgt_mask=mask, tgt_is_causal=True)[0]


class Parametrized(nn.Module):
    """Weight norm of both kinds, spectral norm of both kinds (buffers change in forward), orthogonal, own ones."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.spectral = parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH), n_power_iterations=2)
        self.orthogonal = parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH), orthogonal_map="cayley")
        self.symmetric = nn.Linear(WIDTH, WIDTH)
        parametrize.register_parametrization(self.symmetric, "weight", Symmetric())
        self.cached = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH), dim=None)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.norm, self.spectral, self.orthogonal, self.symmetric):
            x = torch.tanh(layer(x))
        with parametrize.cached():
            return self.cached(torch.tanh(self.cached(x)))


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).mT


class OldParametrized(nn.Module):
    """The hooks of torch.nn.utils: weight_norm and spectral_norm recompute an attribute before every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.spectral = nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.spectral(torch.tanh(self.norm(x)))))


class Pruned(nn.Module):
    """weight_orig and weight_mask: unstructured, structured, of a bias, twice, and removed again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers(4)
        prune.random_unstructured(self.layers[0], "weight", amount=0.4)
        prune.ln_structured(self.layers[1], "weight", amount=0.3, n=2, dim=0)
        prune.l1_unstructured(self.layers[1], "bias", amount=2)
        prune.l1_unstructured(self.layers[2], "weight", amount=0.2)
        prune.random_unstructured(self.layers[2], "weight", amount=0.2)
        prune.remove(prune.random_unstructured(self.layers[3], "weight", amount=0.2), "weight")

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Embeddings(nn.Module):
    """Padding rows, embedding bags, renormalised rows are refused elsewhere; one table read as a matrix too."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, WIDTH, padding_idx=0)
        self.bag = nn.EmbeddingBag(9, WIDTH, mode="mean")
        self.scaled = nn.Embedding(9, WIDTH, scale_grad_by_freq=True)
        self.layers = layers(2)

    def forward(self, x: Tensor) -> Tensor:
        ids = (x.detach() * 4).round().long().abs().remainder(9)
        y = torch.tanh(self.layers[0](x)) + self.table(ids).sum(1)
        y = torch.tanh(self.layers[1](y)) + self.bag(ids) + self.scaled(ids[:, 0])
        return y @ self.table.weight.t() @ self.table.weight * 0.1


class Initialised(nn.Module):
    """Lazy modules that have seen a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.lazy = nn.Sequential(nn.LazyLinear(WIDTH), nn.LazyBatchNorm1d(), nn.Tanh(), nn.LazyLinear(WIDTH))
        with torch.no_grad():
            self.lazy(torch.randn(4, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.lazy(x)


class Containers(nn.Module):
    """Sequential in Sequential, ModuleDict by key, a module list that shrinks, Identity, a partial, a bound method."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Identity()), nn.Tanh())
        self.by_name = nn.ModuleDict({"a-b": nn.Linear(WIDTH, WIDTH), "class": nn.Linear(WIDTH, WIDTH)})
        self.activation = torch.tanh
        self.calls = [self.by_name["a-b"].forward, self.call]

    def call(self, x: Tensor) -> Tensor:
        return self.by_name["class"](x)

    def forward(self, x: Tensor) -> Tensor:
        for call in (self.inner, *self.calls):
            x = self.activation(call(x))
        return x


FEATURES = [
    Feature("recurrent", Recurrent),
    Feature("cells", Cells),
    Feature("attention", Attention),
    Feature("transformers", Transformers),
    Feature("parametrized", Parametrized),
    Feature("old-parametrized", OldParametrized),
    Feature("pruned", Pruned),
    Feature("embeddings", Embeddings),
    Feature("initialised", Initialised),
    Feature("containers", Containers),
]


@pytest.mark.parametrize("feature", FEATURES, ids=lambda f: f.name)
def test_modules(feature: Feature) -> None:
    check(feature)

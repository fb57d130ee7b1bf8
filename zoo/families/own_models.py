"""Architectures written out here: multilayer, graph, recommendation, radiance, audio, capsule and physics networks."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from families.core_models import UNet
from families.entry import (
    CLASSES,
    LENGTH,
    VOCABULARY,
    ZooModel,
    classify,
    images,
    mean_square,
    next_token,
    segmented,
)

KIND = "architectures written out"
NODES, EDGES, FEATURES = 40, 160, 16


class SelfNormalizing(nn.Sequential):
    """SNN: 32 fully connected layers with SELU and alpha dropout (Klambauer et al., 2017)."""

    def __init__(self, inputs: int = 64, width: int = 128, depth: int = 32) -> None:
        super().__init__()
        for k in range(depth - 1):
            layer = nn.Linear(inputs if k == 0 else width, width)
            nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
            nn.init.zeros_(layer.bias)
            self += nn.Sequential(layer, nn.SELU(), nn.AlphaDropout(0.05))
        self.append(nn.Linear(width, CLASSES))


class Transformer(nn.Module):
    """torch's own encoder-decoder with sinusoidal positions: sources to targets, the next token of the target."""

    def __init__(self, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        self.source = nn.Embedding(VOCABULARY, width)
        self.target = nn.Embedding(VOCABULARY, width)
        self.transformer = nn.Transformer(
            width, nhead=4, num_encoder_layers=depth, num_decoder_layers=depth, dim_feedforward=4 * width,
            dropout=0.1, batch_first=True,
        )  # fmt: skip
        self.head = nn.Linear(width, VOCABULARY)
        angles = torch.arange(LENGTH)[:, None] * 10000 ** (-torch.arange(0, width, 2) / width)
        self.register_buffer("positions", torch.stack([angles.sin(), angles.cos()], -1).flatten(1))

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        x = self.source(source) + self.positions[: source.shape[1]]
        y = self.target(target) + self.positions[: target.shape[1]]
        return self.head(self.transformer(x, y, tgt_mask=mask, tgt_is_causal=True))


class EncoderLayers(nn.Module):
    """torch's encoder layers, norm first, over padded texts; a class for each text."""

    def __init__(self, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width, padding_idx=0)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.1, F.gelu, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, depth, norm=nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.layers(self.embed(ids), src_key_padding_mask=ids == 0)
        return self.head(x.mean(1))


def _translated(model: nn.Module, batch: Any) -> Tensor:
    source, target, labels = batch
    return F.cross_entropy(model(source, target).flatten(0, 1), labels.flatten())


def _translations(size: int) -> Any:
    source, target = torch.randint(0, VOCABULARY, (2, size, LENGTH))
    return source, target, target.roll(-1, 1)


def _padded(size: int) -> Any:
    ids = torch.randint(1, VOCABULARY, (size, LENGTH))
    ids = ids.masked_fill(torch.arange(LENGTH) >= torch.randint(LENGTH // 2, LENGTH + 1, (size, 1)), 0)
    return ids, torch.randint(0, CLASSES, (size,))


def edge_softmax(scores: Tensor, target: Tensor, nodes: int) -> Tensor:
    """Softmax over the edges that end in a node; scores [edges, heads]."""
    index = target[:, None].expand_as(scores)
    peak = torch.full((nodes, scores.shape[1]), -math.inf).scatter_reduce(0, index, scores.detach(), "amax")
    weights = (scores - peak[target]).exp()
    total = torch.zeros(nodes, scores.shape[1]).index_add(0, target, weights)
    return weights / total[target].clamp_min(1e-12)


class GraphConvolution(nn.Module):
    """GCN (Kipf and Welling, 2017): the mean of the neighbours, weighed by both ends' degrees."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        degree = torch.ones(len(x)).index_add(0, target, torch.ones(len(target)))
        weight = (degree[source] * degree[target]).rsqrt()
        x = self.linear(x)
        return (x / degree[:, None]).index_add(0, target, x[source] * weight[:, None])


class GraphAttention(nn.Module):
    """GAT (Veličković et al., 2018), with several heads."""

    def __init__(self, inputs: int, outputs: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.linear = nn.Linear(inputs, outputs, bias=False)
        self.from_source = nn.Parameter(torch.randn(heads, outputs // heads) * 0.3)
        self.from_target = nn.Parameter(torch.randn(heads, outputs // heads) * 0.3)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        h = self.linear(x).view(len(x), self.heads, -1)
        scores = (h * self.from_source).sum(-1)[source] + (h * self.from_target).sum(-1)[target]
        weights = self.dropout(edge_softmax(F.leaky_relu(scores, 0.2), target, len(x)))
        messages = h.index_select(0, source) * weights[..., None]
        return torch.zeros_like(h).index_add_(0, target, messages).flatten(1)


class SageConvolution(nn.Module):
    """GraphSAGE (Hamilton et al., 2017) with the neighbours' largest features, gathered and scattered."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.pool = nn.Linear(inputs, inputs)
        self.own = nn.Linear(inputs, outputs)
        self.neighbours = nn.Linear(inputs, outputs, bias=False)

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        width = x.shape[1]
        messages = self.pool(x).relu().gather(0, source[:, None].expand(-1, width))
        most = torch.zeros_like(x).scatter_reduce(0, target[:, None].expand(-1, width), messages, "amax")
        return F.normalize(self.own(x) + self.neighbours(most), dim=-1)


class IsomorphismConvolution(nn.Module):
    """GIN (Xu et al., 2019): sums by scatter_add, then an MLP with batch norm."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.mlp = nn.Sequential(
            nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs), nn.ReLU(), nn.Linear(outputs, outputs)
        )

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        total = torch.zeros_like(x).scatter_add(0, target[:, None].expand(-1, x.shape[1]), x[source])
        return self.mlp((1 + self.weight) * x + total)


class GraphNetwork(nn.Module):
    """Graph layers over a batch of graphs of one size, joined as one graph of parts; a class for each graph."""

    def __init__(self, layer: type[nn.Module], width: int = 32, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layer(FEATURES if k == 0 else width, width) for k in range(depth)])
        self.head = nn.Linear(width, CLASSES)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        features, edges = batch
        graphs = len(features)
        start = torch.arange(graphs)[:, None] * NODES
        source, target = ((edges[:, k] + start).flatten() for k in range(2))
        x = features.flatten(0, 1)
        for layer in self.layers:
            x = F.elu(layer(x, source, target))
        return self.head(x.view(graphs, NODES, -1).mean(1))


def _graphs(size: int) -> Any:
    edges = torch.randint(0, NODES, (size, 2, EDGES))
    return (torch.randn(size, NODES, FEATURES), edges), torch.randint(0, CLASSES, (size,))


class Recommender(nn.Module):
    """DLRM (Naumov et al., 2019): bags of categories and numbers, their pairwise products, an MLP."""

    def __init__(self, tables: int = 6, rows: int = 50, width: int = 16) -> None:
        super().__init__()
        self.bags = nn.ModuleList([nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables)])
        self.bottom = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, width), nn.ReLU())
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(
            nn.Linear(width + pairs, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1)
        )

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        numbers, categories = batch
        dense = self.bottom(numbers)
        vectors = torch.stack([dense, *(bag(categories[:, k]) for k, bag in enumerate(self.bags))], 1)
        products = vectors @ vectors.mT
        row, column = torch.tril_indices(vectors.shape[1], vectors.shape[1], -1)
        return self.top(torch.cat([dense, products[:, row, column]], 1)).squeeze(1)


def _clicked(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return F.binary_cross_entropy_with_logits(model(x), y)


def _clicks(size: int) -> Any:
    return (torch.randn(size, 8), torch.randint(0, 50, (size, 6, 3))), torch.randint(0, 2, (size,)).float()


class RadianceField(nn.Module):
    """NeRF (Mildenhall et al., 2020): the colour of rays, by an MLP of encoded points and a cumulated transmittance."""

    def __init__(self, width: int = 64, samples: int = 16, bands: int = 4) -> None:
        super().__init__()
        self.bands, self.samples = bands, samples
        inputs = 3 * (1 + 2 * bands)
        self.first = nn.ModuleList([nn.Linear(inputs if k == 0 else width, width) for k in range(4)])
        self.second = nn.ModuleList([nn.Linear(width + (inputs if k == 0 else 0), width) for k in range(4)])
        self.density = nn.Linear(width, 1)
        self.colour = nn.Sequential(nn.Linear(width + inputs, width // 2), nn.ReLU(), nn.Linear(width // 2, 3))

    def encode(self, x: Tensor) -> Tensor:
        angles = x[..., None] * 2.0 ** torch.arange(self.bands)
        return torch.cat([x, angles.sin().flatten(-2), angles.cos().flatten(-2)], -1)

    def forward(self, rays: Tensor) -> Tensor:
        origin, direction = rays.unbind(1)
        depth = torch.linspace(1, 3, self.samples)
        points = self.encode(origin[:, None] + direction[:, None] * depth[:, None])
        h = points
        for layer in self.first:
            h = layer(h).relu()
        h = torch.cat([h, points], -1)
        for layer in self.second:
            h = layer(h).relu()
        opaque = 1 - torch.exp(-F.softplus(self.density(h).squeeze(-1)) * (depth[1] - depth[0]))
        through = torch.cumprod(torch.cat([torch.ones_like(opaque[:, :1]), 1 - opaque[:, :-1]], 1), 1)
        view = self.encode(F.normalize(direction, dim=-1))[:, None].expand(-1, self.samples, -1)
        colour = self.colour(torch.cat([h, view], -1)).sigmoid()
        return ((opaque * through)[..., None] * colour).sum(1)


def _rays(size: int) -> Any:
    return torch.randn(size, 2, 3), torch.rand(size, 3)


class WaveNet(nn.Module):
    """WaveNet (van den Oord et al., 2016): dilated causal convolutions with gates, residual and skip sums."""

    def __init__(self, width: int = 32, dilations: tuple[int, ...] = (1, 2, 4, 8, 1, 2, 4, 8)) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.dilated = nn.ModuleList([nn.Conv1d(width, 2 * width, 2, dilation=d) for d in dilations])
        self.residual = nn.ModuleList([nn.Conv1d(width, width, 1) for _ in dilations])
        self.skip = nn.ModuleList([nn.Conv1d(width, width, 1) for _ in dilations])
        self.head = nn.Sequential(nn.ReLU(), nn.Conv1d(width, width, 1), nn.ReLU(), nn.Conv1d(width, VOCABULARY, 1))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids).mT
        total = torch.zeros(())
        for dilated, residual, skip in zip(self.dilated, self.residual, self.skip, strict=True):
            value, gate = dilated(F.pad(x, (dilated.dilation[0], 0))).chunk(2, 1)
            h = value.tanh() * gate.sigmoid()
            total = total + skip(h)
            x = x + residual(h)
        return self.head(total).mT


class MixerBlock(nn.Module):
    """MLP-Mixer (Tolstikhin et al., 2021): an MLP over patches, one over channels."""

    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.over_patches = nn.Sequential(nn.Linear(patches, 2 * patches), nn.GELU(), nn.Linear(2 * patches, patches))
        self.over_channels = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.over_patches(self.norms[0](x).mT).mT
        return x + self.over_channels(self.norms[1](x))


class Mixer(nn.Module):
    """Patches of images, mixer blocks, the mean."""

    def __init__(self, width: int = 64, depth: int = 6) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, 8)
        self.blocks = nn.Sequential(*(MixerBlock(16, width) for _ in range(depth)))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.patches(x).flatten(2).mT).mean(1))


class CapsuleNetwork(nn.Module):
    """CapsNet (Sabour et al., 2017): capsules that agree by routing, three times."""

    def __init__(self, capsules: int = 32, length: int = 8) -> None:
        super().__init__()
        self.length = length
        self.stem = nn.Sequential(nn.Conv2d(3, 32, 5, 2), nn.ReLU(), nn.Conv2d(32, 64, 5, 2), nn.ReLU())
        self.primary = nn.Conv2d(64, capsules, 3, 2)
        self.votes = nn.Parameter(torch.randn(capsules * 4 // length, CLASSES, length, 16) * 0.1)

    @staticmethod
    def squash(x: Tensor) -> Tensor:
        square = x.square().sum(-1, keepdim=True)
        return x * square / ((1 + square) * (square + 1e-8).sqrt())

    def forward(self, x: Tensor) -> Tensor:
        capsules = self.squash(self.primary(self.stem(x)).flatten(1).unflatten(1, (-1, self.length)))
        votes = torch.einsum("bil,iclo->bico", capsules, self.votes)
        logits = torch.zeros(votes.shape[:3])
        for step in range(3):
            found = self.squash((logits.softmax(2)[..., None] * votes).sum(1))
            if step < 2:
                logits = logits + (votes.detach() * found.detach()[:, None]).sum(-1)
        return found.norm(dim=-1)


def _margins(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    lengths, right = model(x), F.one_hot(y, CLASSES)
    return (right * (0.9 - lengths).relu() ** 2 + 0.5 * (1 - right) * (lengths - 0.1).relu() ** 2).sum(1).mean()


class FourierLayer(nn.Module):
    """FNO (Li et al., 2021): complex weights for the lowest frequencies, beside a pointwise convolution."""

    def __init__(self, width: int, modes: int) -> None:
        super().__init__()
        self.modes = modes
        self.weights = nn.Parameter(torch.randn(width, width, modes, dtype=torch.cfloat) / width)
        self.point = nn.Conv1d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        low = torch.fft.rfft(x)[..., : self.modes]
        mixed = torch.einsum("bim,iom->bom", low, self.weights)
        return F.gelu(torch.fft.irfft(mixed, n=x.shape[-1]) + self.point(x))


class FourierOperator(nn.Module):
    """Functions on a line to functions on it."""

    def __init__(self, width: int = 24, modes: int = 8, depth: int = 4) -> None:
        super().__init__()
        self.lift = nn.Conv1d(1, width, 1)
        self.layers = nn.Sequential(*(FourierLayer(width, modes) for _ in range(depth)))
        self.project = nn.Sequential(nn.Conv1d(width, 64, 1), nn.GELU(), nn.Conv1d(64, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.project(self.layers(self.lift(x)))


def _functions(size: int) -> Any:
    return torch.randn(size, 1, 64), torch.randn(size, 1, 64)


class PointNet(nn.Module):
    """PointNet (Qi et al., 2017): shared MLPs over points, a learned rotation, the maximum."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Sequential(self.shared(3, 64, 128), nn.AdaptiveMaxPool1d(1), nn.Flatten(), nn.Linear(128, 9))
        self.points = self.shared(3, 64, 64, 128, 256)
        self.head = nn.Sequential(nn.Linear(256, 128), nn.ReLU(), nn.Dropout(0.3), nn.Linear(128, CLASSES))

    @staticmethod
    def shared(*widths: int) -> nn.Sequential:
        pairs = itertools.pairwise(widths)
        return nn.Sequential(*(nn.Sequential(nn.Conv1d(a, b, 1), nn.BatchNorm1d(b), nn.ReLU()) for a, b in pairs))

    def forward(self, x: Tensor) -> Tensor:
        turn = self.turn(x).view(-1, 3, 3) + torch.eye(3)
        return self.head(self.points(turn @ x).amax(-1))


def _clouds(size: int) -> Any:
    return torch.randn(size, 3, 128), torch.randint(0, CLASSES, (size,))


class VectorQuantized(nn.Module):
    """VQ-VAE (van den Oord et al., 2017): nearest codes, straight-through gradients, codes that move in buffers."""

    def __init__(self, width: int = 32, codes: int = 64) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, width, 4, 2, 1), nn.ReLU(), nn.Conv2d(width, width, 4, 2, 1), nn.ReLU(),
            nn.Conv2d(width, width, 1),
        )  # fmt: skip
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(width, width, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(width, 3, 4, 2, 1)
        )
        self.register_buffer("codes", torch.randn(codes, width))
        self.register_buffer("counts", torch.ones(codes))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.encoder(x).permute(0, 2, 3, 1)
        flat = z.flatten(0, 2)
        nearest = torch.cdist(flat.detach(), self.codes).argmin(1)
        found = F.embedding(nearest, self.codes).view_as(z)
        commitment = F.mse_loss(z, found)
        with torch.no_grad():
            chosen = F.one_hot(nearest, len(self.codes)).float()
            self.counts.mul_(0.99).add_(chosen.sum(0), alpha=0.01)
            means = chosen.T @ flat / chosen.sum(0).clamp_min(1)[:, None]
            self.codes.lerp_(means, 0.01)
        return self.decoder((z + (found - z).detach()).permute(0, 3, 1, 2)), commitment


def _reconstructed(model: nn.Module, batch: Any) -> Tensor:
    found, commitment = model(batch[0])
    return F.mse_loss(found, batch[0]) + 0.25 * commitment


def _entry(name: str, model: Any, loss: Any, batch: Any, **more: Any) -> ZooModel:
    return ZooModel(name, model, loss, batch, kind=KIND, **more)


def _vectors(size: int) -> Any:
    return torch.randn(size, 64), torch.randint(0, CLASSES, (size,))


def _words(size: int) -> Any:
    ids = torch.randint(0, VOCABULARY, (size, 2 * LENGTH + 1))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


MODELS = (
    _entry("snn", SelfNormalizing, classify, _vectors, size=16, random=True),
    _entry("transformer", Transformer, _translated, _translations, random=True),
    _entry("transformer_encoder", EncoderLayers, classify, _padded),
    _entry("gcn", lambda: GraphNetwork(GraphConvolution), classify, _graphs),
    _entry("gat", lambda: GraphNetwork(GraphAttention), classify, _graphs, random=True),
    _entry("graphsage", lambda: GraphNetwork(SageConvolution), classify, _graphs),
    _entry("gin", lambda: GraphNetwork(IsomorphismConvolution), classify, _graphs),
    _entry("dlrm", Recommender, _clicked, _clicks, size=16),
    _entry("nerf", RadianceField, mean_square, _rays, size=16),
    _entry("wavenet", WaveNet, next_token, _words),
    _entry("mlp_mixer", Mixer, classify, images(32)),
    _entry("capsnet", CapsuleNetwork, _margins, images(32)),
    _entry("fourier_operator", FourierOperator, mean_square, _functions),
    _entry("pointnet", PointNet, classify, _clouds, size=8),
    _entry("vq_vae", VectorQuantized, _reconstructed, images(32)),
    _entry("unet", UNet, classify, segmented(32)),
)

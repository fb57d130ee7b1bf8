"""Training recipes: a teacher that follows, a queue, gradients in the loss, objects beside the model, solvers."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.nn import functional as F

from families.entry import CLASSES, LENGTH, VOCABULARY, ZooModel, classify, images

WIDTH = 24


def convolutions(outputs: int, width: int = WIDTH) -> nn.Sequential:
    """Images [samples, 3, n, n] to [samples, outputs]."""
    blocks = [
        layer
        for inputs, made in ((3, width), (width, width), (width, 2 * width))
        for layer in (nn.Conv2d(inputs, made, 3, 2, 1), nn.BatchNorm2d(made), nn.ReLU())
    ]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, outputs))


def perceptron(inputs: int, outputs: int, depth: int = 4, width: int = WIDTH) -> nn.Sequential:
    sizes = [inputs, *[width] * (depth - 1)]
    layers = [layer for a, b in itertools.pairwise(sizes) for layer in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(width, outputs))


@torch.no_grad()
def follow(teacher: nn.Module, student: nn.Module, rate: float = 0.01) -> None:
    for old, new in zip(teacher.parameters(), student.parameters(), strict=True):
        old.data = old.data * (1 - rate) + new.data * rate


class MomentumContrast(nn.Module):
    """MoCo (He et al., 2020): keys of an encoder that follows, and a queue of earlier ones."""

    def __init__(self, length: int = 16) -> None:
        super().__init__()
        self.query = convolutions(WIDTH)
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(length, WIDTH)))

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        queries = F.normalize(self.query(one))
        with torch.no_grad():
            follow(self.key, self.query)
            keys = F.normalize(self.key(other))
        near = (queries * keys).sum(1, keepdim=True)
        logits = torch.cat([near, queries @ self.queue.clone().t()], 1) / 0.07
        self.queue = torch.cat([keys, self.queue[: -len(keys)]])
        return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))


class Bootstrap(nn.Module):
    """BYOL (Grill et al., 2020): what a teacher that follows says of another view of the image."""

    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Sequential(convolutions(WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.predictor = perceptron(WIDTH, WIDTH, 2)

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        with torch.no_grad():
            follow(self.target, self.online)
            wanted = self.target(other)
        return 2 - 2 * F.cosine_similarity(self.predictor(self.online(one)), wanted).mean()


class Distilled(nn.Module):
    """A student that learns a teacher's classes and its features, which forward hooks fetch from both."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = convolutions(CLASSES, 2 * WIDTH).eval().requires_grad_(False)
        self.student = convolutions(CLASSES)
        self.adapted = nn.Conv2d(WIDTH, 2 * WIDTH, 1)
        self.features: dict[str, Tensor] = {}
        features = self.features
        for name, part in (("teacher", self.teacher), ("student", self.student)):
            part[5].register_forward_hook(lambda module, args, out, name=name: features.__setitem__(name, out))

    def train(self, mode: bool = True) -> Distilled:
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            wanted = self.teacher(x)
        return self.student(x), wanted


def distillation(model: Any, batch: Any) -> Tensor:
    x, y = batch
    found, wanted = model(x)
    softer = F.kl_div((found / 4).log_softmax(1), (wanted / 4).softmax(1), reduction="batchmean") * 16
    features = F.mse_loss(model.adapted(model.features["student"]), model.features["teacher"])
    return F.cross_entropy(found, y) + softer + 0.1 * features


class ProxyAnchor:
    """Proxy anchors (Kim et al., 2020): a loss that holds parameters of the model, and is no module."""

    def __init__(self, proxies: nn.Parameter) -> None:
        self.proxies = proxies

    def __call__(self, found: Tensor, y: Tensor) -> Tensor:
        near = F.normalize(found) @ F.normalize(self.proxies).t()
        own = F.one_hot(y, len(self.proxies)).bool()
        pulled = torch.where(own, (-32 * (near - 0.1)).exp(), 0.0).sum(0).log1p()
        pushed = torch.where(own, 0.0, (32 * (near + 0.1)).exp()).sum(0).log1p()
        return (pulled + pushed).mean()


class Metric(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = convolutions(WIDTH)
        self.proxies = nn.Parameter(torch.randn(CLASSES, WIDTH))
        self.criterion = ProxyAnchor(self.proxies)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def metric(model: Any, batch: Any) -> Tensor:
    return model.criterion(model(batch[0]), batch[1])


class Adversaries(nn.Module):
    """A generator and a discriminator of convolutions (Radford et al., 2016), in one step."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.ConvTranspose2d(WIDTH, WIDTH, 4), nn.BatchNorm2d(WIDTH), nn.ReLU(),
            nn.ConvTranspose2d(WIDTH, WIDTH, 4, 2, 1), nn.BatchNorm2d(WIDTH), nn.ReLU(),
            nn.ConvTranspose2d(WIDTH, 3, 4, 2, 1), nn.Tanh(),
        )  # fmt: skip
        self.discriminator = nn.Sequential(
            nn.Conv2d(3, WIDTH, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(WIDTH, WIDTH, 4, 2, 1), nn.LeakyReLU(0.2),
            nn.Flatten(), nn.Linear(16 * WIDTH, 1),
        )  # fmt: skip


def adversarial(model: Any, batch: Any) -> Tensor:
    """Both losses; the generator's passes a discriminator whose weights are detached."""
    real, noise = batch
    made = model.generator(noise)
    judged = F.softplus(model.discriminator(made.detach())).mean() + F.softplus(-model.discriminator(real)).mean()
    fixed = {name: p.detach() for name, p in model.discriminator.named_parameters()}
    return judged + F.softplus(-functional_call(model.discriminator, fixed, made)).mean()


def penalized(model: nn.Module, batch: Any) -> Tensor:
    """A critic with gradient penalty (Gulrajani et al., 2017)."""
    real, made = batch
    between = (0.3 * real + 0.7 * made).requires_grad_()
    (slope,) = torch.autograd.grad(model(between).sum(), between, create_graph=True)
    return model(made).mean() - model(real).mean() + 10 * (slope.flatten(1).norm(dim=1) - 1).square().mean()


def burgers(model: nn.Module, batch: Any) -> Tensor:
    """A physics-informed network (Raissi et al., 2019): second derivatives of what it says, at points [n, 2]."""
    points, start = batch
    points = points.requires_grad_()
    u = model(points)
    (first,) = torch.autograd.grad(u.sum(), points, create_graph=True)
    (second,) = torch.autograd.grad(first[:, 0].sum(), points, create_graph=True)
    residue = first[:, 1] + u[:, 0] * first[:, 0] - 0.01 * second[:, 0]
    at_start = model(torch.stack([start, torch.zeros_like(start)], 1))[:, 0] + torch.sin(torch.pi * start)
    return residue.square().mean() + at_start.square().mean()


class NeuralODE(nn.Module):
    """An equation whose right side is a network (Chen et al., 2018), by Runge and Kutta's fourth order."""

    def __init__(self, steps: int = 4) -> None:
        super().__init__()
        self.right, self.head, self.steps = perceptron(4, 4, 3), nn.Linear(4, CLASSES), steps

    def forward(self, x: Tensor) -> Tensor:
        h = 1 / self.steps
        for _ in range(self.steps):
            a = self.right(x)
            b = self.right(x + h / 2 * a)
            c = self.right(x + h / 2 * b)
            x = x + h / 6 * (a + 2 * b + 2 * c + self.right(x + h * c))
        return self.head(x)


def meta_learned(model: nn.Module, batch: Any) -> Tensor:
    """MAML (Finn et al., 2017): the loss after one step of descent, differentiated through that step."""
    x, y, later, wanted = batch
    weights = dict(model.named_parameters())
    slopes = grad(lambda own: F.mse_loss(functional_call(model, own, x), y))(weights)
    adapted = {name: weight - 0.1 * slopes[name] for name, weight in weights.items()}
    return F.mse_loss(functional_call(model, adapted, later), wanted)


class Tagger(nn.Module):
    """An LSTM in both directions under a conditional random field (Lample et al., 2016)."""

    def __init__(self, tags: int = 5) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.LSTM(WIDTH, WIDTH, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * WIDTH, tags)
        self.moves = nn.Parameter(torch.randn(tags, tags) * 0.1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layers(self.table(ids))[0])


def tagged(model: Any, batch: Any) -> Tensor:
    """Less the log likelihood of the tags [samples, length]: all ways are summed up by dynamic programming."""
    ids, tags = batch
    scores = model(ids)
    own = scores.gather(2, tags[..., None]).sum((1, 2)) + model.moves[tags[:, :-1], tags[:, 1:]].sum(1)
    every = scores[:, 0]
    for step in range(1, scores.shape[1]):
        every = (every[:, :, None] + model.moves + scores[:, step, None, :]).logsumexp(1)
    return (every.logsumexp(1) - own).mean()


class LowRank(nn.Module):
    """A frozen network whose layers get adapters of low rank (Hu et al., 2022)."""

    def __init__(self) -> None:
        super().__init__()
        self.base = convolutions(CLASSES).requires_grad_(False)
        self.down = nn.ModuleList(nn.Conv2d(c, 2, 3, 2, 1, bias=False) for c in (3, WIDTH, WIDTH))
        self.up = nn.ModuleList(nn.Conv2d(2, c, 1, bias=False) for c in (WIDTH, WIDTH, 2 * WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for k in range(3):
            convolved, norm, bent = self.base[3 * k : 3 * k + 3]
            x = bent(norm(convolved(x) + self.up[k](self.down[k](x))))
        return self.base[9:](x)


def _pairs(size: int) -> Any:
    return torch.randn(2, size, 3, 16, 16).unbind(0)


def _contrasted(model: nn.Module, batch: Any) -> Tensor:
    return model(*batch)


def _regressions(size: int) -> Any:
    x, later = torch.randn(2, size, 6)
    y, wanted = torch.randn(2, size, 2)
    return x, y, later, wanted


def _entry(name: str, model: Callable[[], nn.Module], loss: Any, batch: Callable[[int], Any]) -> ZooModel:
    return ZooModel(name, model, loss, batch, size=8, kind="training recipes")


MODELS = (
    _entry("moco", MomentumContrast, _contrasted, _pairs),
    _entry("byol", Bootstrap, _contrasted, _pairs),
    _entry("distillation", Distilled, distillation, images(16)),
    _entry("proxy_anchor", Metric, metric, images(16)),
    _entry("gan", Adversaries, adversarial,
        lambda size: (torch.randn(size, 3, 16, 16), torch.randn(size, WIDTH, 1, 1))),
    _entry("gradient_penalty", lambda: perceptron(12, 1), penalized, lambda size: torch.randn(2, size, 12).unbind(0)),
    _entry("physics_informed", lambda: perceptron(2, 1), burgers, lambda size: (torch.rand(size, 2), torch.rand(size))),
    _entry("neural_ode", NeuralODE, classify, lambda size: (torch.randn(size, 4), torch.randint(0, CLASSES, (size,)))),
    _entry("maml", lambda: perceptron(6, 2), meta_learned, _regressions),
    _entry("lstm_crf", Tagger, tagged,
        lambda size: (torch.randint(0, VOCABULARY, (size, LENGTH // 2)), torch.randint(0, 5, (size, LENGTH // 2)))),
    _entry("lora", LowRank, classify, images(16)),
)  # fmt: skip

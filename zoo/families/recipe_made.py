"""Recipes of what is made: adversaries, codes, noise, flows, and gradients within the step."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.nn import functional as F

from families.recipe import Recipe, called
from families.recipe_models import burgers, penalized
from families.recipe_pairs import LATER
from families.recipe_parts import CLASSES, FEATURES, OF_THE_BATCH, SIZE, kept, layers, number

CODES, NOISE, TIMES = 7, 4, 10


class Adversaries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.maker, self.judge = layers(FEATURES, NOISE), layers(1)

    def judged(self, x: Tensor, fixed: bool = False) -> Tensor:
        weights = {n: p.detach() if fixed else p for n, p in self.judge.named_parameters()}
        return functional_call(self.judge, weights, (x,))[:, 0]


def hinged(model: Any, batch: Any) -> Tensor:
    """A generator and a critic with hinges (Miyato et al., 2018), in one step."""
    real, noise = batch
    made = model.maker(noise)
    critic = F.relu(1 - model.judged(real)).mean() + F.relu(1 + model.judged(made.detach())).mean()
    return critic - model.judged(made, fixed=True).mean()


def penalised(model: Any, batch: Any) -> Tensor:
    """R1 (Mescheder et al., 2018): the critic's slope at what is real, where that counts."""
    real, noise, counts = batch
    real = real.requires_grad_()
    said = model.judged(real)
    (slope,) = torch.autograd.grad(said.sum(), real, create_graph=True)
    told = (F.softplus(-said) * counts).sum() / counts.sum()
    steep = (slope.square().sum(1) * counts).sum() / counts.sum()
    return told + F.softplus(model.judged(model.maker(noise).detach())).mean() + 0.5 * steep


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return -0.5 * grad


class Adapted(nn.Module):
    """Ganin et al., 2016: of the first domain classes are known; of both, the domain is not to be told."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.classes, self.domains = layers(8), nn.Linear(8, CLASSES), nn.Linear(8, 2)

    def forward(self, x: Tensor, y: Tensor, domain: Tensor) -> Tensor:
        x = self.body(x)
        told = F.cross_entropy(self.classes(x), y, ignore_index=-1)
        return told + F.cross_entropy(self.domains(Reversed.apply(x)), domain)


class Coded(nn.Module):
    """A variational autoencoder (Kingma and Welling, 2014); the noise is given, or drawn in the step."""

    def __init__(self, weight: float = 1.0) -> None:
        super().__init__()
        self.encode, self.decode, self.weight = layers(2 * NOISE), layers(FEATURES, NOISE), weight

    def forward(self, x: Tensor, noise: Tensor | None = None) -> Tensor:
        mean, spread = self.encode(x).chunk(2, 1)
        noise = torch.randn_like(mean) if noise is None else noise
        found = self.decode(mean + noise * (0.5 * spread).exp())
        apart = -0.5 * (1 + spread - mean.square() - spread.exp()).sum()
        return (F.mse_loss(found, x, reduction="sum") + self.weight * apart) / len(x)


class Quantised(nn.Module):
    """Codes from a book (van den Oord et al., 2017), which learns by its own loss, or follows what is coded."""

    def __init__(self, follows: bool = False) -> None:
        super().__init__()
        self.encode, self.decode, self.follows = layers(NOISE), layers(FEATURES, NOISE), follows
        book = torch.randn(CODES, NOISE)
        if follows:
            self.register_buffer("book", book)
            self.register_buffer("counts", torch.ones(CODES))
            self.register_buffer("sums", book.clone())
        else:
            self.book = nn.Parameter(book)

    def forward(self, x: Tensor) -> Tensor:
        code = self.encode(x)
        place = (code[:, None] - self.book).square().sum(-1).argmin(1)
        near = self.book.clone()[place] if self.follows else self.book[place]
        loss = F.mse_loss(self.decode(code + (near - code).detach()), x) + 0.25 * F.mse_loss(code, near.detach())
        if not self.follows:
            return loss + F.mse_loss(near, code.detach())
        with torch.no_grad():
            chosen = number(F.one_hot(place, CODES))
            self.counts = 0.9 * self.counts + 0.1 * chosen.sum(0)
            self.sums = 0.9 * self.sums + 0.1 * chosen.t() @ code
            self.book = self.sums / self.counts[:, None]
        return loss


def sparse(model: Any, batch: Any) -> Tensor:
    """An autoencoder whose units are each on the average rarely on (Ng, 2011)."""
    code = model.encode(batch[0]).sigmoid()
    usual = code.mean(0)
    rare = (0.1 * (0.1 / usual).log() + 0.9 * (0.9 / (1 - usual)).log()).sum()
    return F.mse_loss(model.decode(code), batch[0]) + 0.1 * rare


def hidden(model: nn.Module, batch: Any) -> Tensor:
    """A masked autoencoder (He et al., 2022): only what was hidden counts."""
    x, gone = batch
    return ((model(x * (1 - gone)) - x).square() * gone).sum() / gone.sum()


class Denoiser(nn.Module):
    """Noise from noisy samples and their times."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.times = layers(FEATURES), nn.Embedding(TIMES, FEATURES)
        self.register_buffer("kept", torch.linspace(0.95, 0.05, TIMES))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        return self.body(x + self.times(time))


def denoised(model: Any, batch: Any) -> Tensor:
    """Ho et al., 2020: noise and times are drawn in the step."""
    (x,) = batch
    time, noise = torch.randint(0, TIMES, (len(x),)), torch.randn_like(x)
    share = model.kept[time][:, None]
    return F.mse_loss(model(share.sqrt() * x + (1 - share).sqrt() * noise, time), noise)


def weighed_noise(model: Any, batch: Any) -> Tensor:
    """With noise and times of the batch, weighed by how much signal there is (Hang et al., 2023)."""
    x, noise, time = batch
    share = model.kept[time]
    found = model(share.sqrt()[:, None] * x + (1 - share).sqrt()[:, None] * noise, time)
    weight = (share / (1 - share)).clamp(max=5.0)
    return ((found - noise).square().mean(1) * weight).mean()


def flowed(model: nn.Module, batch: Any) -> Tensor:
    """Flow matching (Lipman et al., 2023)."""
    x, noise, time = batch
    time = time[:, None] / TIMES
    return F.mse_loss(model(torch.cat([(1 - time) * noise + time * x, time], 1)), x - noise)


class Couplings(nn.Module):
    """A normalising flow (Dinh et al., 2017) with a mixing matrix (Kingma and Dhariwal, 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(layers(FEATURES, FEATURES // 2) for _ in range(3))
        self.mix = nn.Parameter(torch.eye(FEATURES) + 0.1 * torch.randn(FEATURES, FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        grown = torch.linalg.slogdet(self.mix).logabsdet.expand(len(x))
        x = x @ self.mix
        for part in self.parts:
            one, other = x.chunk(2, 1)
            scale, shift = part(one).chunk(2, 1)
            x, grown = torch.cat([other * scale.tanh().exp() + shift, one], 1), grown + scale.tanh().sum(1)
        return -(torch.distributions.Normal(0.0, 1.0).log_prob(x).sum(1) + grown).mean()


def scored(model: nn.Module, batch: Any) -> Tensor:
    """Sliced score matching (Song et al., 2019): the slope of what the model says, along a way of the batch."""
    x, way = batch
    x = x.requires_grad_()
    found = model(x)
    (slope,) = torch.autograd.grad((found * way).sum(), x, create_graph=True)
    return ((slope * way).sum(1) + 0.5 * (found * way).sum(1).square()).mean()


def attacked(model: nn.Module, batch: Any) -> Tensor:
    """Goodfellow et al., 2015: each sample is moved to where it is told worse, and learned there."""
    x, y = batch
    near = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(F.cross_entropy(model(near), y, reduction="sum"), near)
    return F.cross_entropy(model(x), y) + F.cross_entropy(model(x + 0.1 * slope.sign()), y)


def smooth(model: nn.Module, batch: Any) -> Tensor:
    """Virtual adversaries (Miyato et al., 2019): what the model says is alike around each sample, labelled or not."""
    x, y, way = batch
    said = model(x).detach().softmax(1)
    way = (1e-2 * F.normalize(way)).requires_grad_()
    (slope,) = torch.autograd.grad(F.kl_div(model(x + way).log_softmax(1), said, reduction="sum"), way)
    near = model(x + 0.5 * F.normalize(slope.detach())).log_softmax(1)
    return F.cross_entropy(model(x), y, ignore_index=-1) + F.kl_div(near, said, reduction="batchmean")


def learned(model: nn.Module, batch: Any) -> Tensor:
    """MAML (Finn et al., 2017), each sample a task of some points: one step of descent, then the loss."""
    x, y, later, wanted = batch
    weights = dict(model.named_parameters())

    def told(own: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(functional_call(model, own, x), y)

    def of_task(x: Tensor, y: Tensor, later: Tensor, wanted: Tensor) -> Tensor:
        slopes = grad(told)(weights, x, y)
        return told({n: w - 0.1 * slopes[n] for n, w in weights.items()}, later, wanted)

    return torch.vmap(of_task)(x, y, later, wanted).mean()


def learned_together(model: nn.Module, batch: Any) -> Tensor:
    """The same with one task, the batch: the step of descent is of the whole batch."""
    x, y = batch
    weights = dict(model.named_parameters())
    slopes = grad(lambda own: F.mse_loss(functional_call(model, own, x), y))(weights)
    return F.mse_loss(functional_call(model, {n: w - 0.5 * slopes[n] for n, w in weights.items()}, x + 1), y)


def _noise(*more: Callable[[int], Tensor]) -> Callable[[int], Any]:
    return lambda step: (torch.randn(SIZE, FEATURES), *(made(step) for made in more))


def _normal(outputs: int) -> Callable[[int], Tensor]:
    return lambda step: torch.randn(SIZE, outputs)


def _some(step: int) -> Tensor:
    return number(kept(step)).index_fill(0, torch.tensor([3]), 1.0)


def _classes(step: int) -> Tensor:
    return torch.randint(0, CLASSES, (SIZE,))


def _some_classes(step: int) -> Tensor:
    return torch.where(_some(step) > 0, _classes(step), -1)


def _times(step: int) -> Tensor:
    return torch.randint(0, TIMES, (SIZE,))


def _tasks(step: int) -> Any:
    x, later = torch.randn(2, SIZE, 4, FEATURES).unbind(0)
    return x, x.sum(-1, keepdim=True).sin(), later, later.sum(-1, keepdim=True).sin()


def _of(name: str, loss: Any, batch: Any, model: Callable[[], nn.Module], **more: Any) -> Recipe:
    return Recipe(f"recipe_{name}", model, loss, batch, **more)


def _steep(inputs: int, outputs: int) -> nn.Sequential:
    sizes = itertools.pairwise([inputs, 12, 12, outputs])
    return nn.Sequential(*[layer for a, b in sizes for layer in (nn.Linear(a, b), nn.Tanh())][:-1])


RECIPES = (
    _of("hinged_adversaries", hinged, _noise(_normal(NOISE)), Adversaries),
    _of("slope_of_the_real", penalised, _noise(_normal(NOISE), _some), Adversaries),
    _of("penalised_critic", penalized, _noise(_normal(FEATURES)), lambda: layers(1)),
    _of("reversed_gradient", called, _noise(_some_classes, lambda step: kept(step).long()), Adapted),
    _of("vae", called, _noise(), Coded, random=True),
    _of("beta_vae", called, _noise(_normal(NOISE)), lambda: Coded(4.0)),
    _of("vq_vae", called, _noise(), Quantised),
    _of("vq_vae_following", called, _noise(), lambda: Quantised(follows=True),
        differs=("which every microbatch changes", LATER)),
    _of("sparse_code", sparse, _noise(), lambda: nn.ModuleDict({"encode": layers(9), "decode": layers(FEATURES, 9)}),
        differs=("reciprocal .* is not linear", OF_THE_BATCH)),
    _of("masked_autoencoder", hidden, _noise(lambda step: number(kept(step, FEATURES))), lambda: layers(FEATURES)),
    _of("diffusion", denoised, _noise(), Denoiser, random=True),
    _of("weighed_noise", weighed_noise, _noise(_normal(FEATURES), _times), Denoiser),
    _of("flow_matching", flowed, _noise(_normal(FEATURES), _times), lambda: layers(FEATURES, FEATURES + 1)),
    _of("normalising_flow", called, _noise(), Couplings),
    _of("score_matching", scored, _noise(_normal(FEATURES)), lambda: layers(FEATURES)),
    _of("physics", burgers, lambda step: (torch.rand(SIZE, 2), torch.rand(SIZE)), lambda: _steep(2, 1)),
    _of("attacked_samples", attacked, _noise(_classes), lambda: layers(CLASSES)),
    _of("virtual_adversaries", smooth, _noise(_some_classes, _normal(FEATURES)), lambda: layers(CLASSES)),
    _of("maml", learned, _tasks, lambda: layers(1)),
    _of("maml_of_the_batch", learned_together, _noise(_normal(1)), lambda: layers(1), differs=("(?s).", OF_THE_BATCH)),
)  # fmt: skip

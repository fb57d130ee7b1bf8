"""Recipes of the loop around a loss: schedules, groups, clipping, averages, weights, what is frozen or noisy."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, StepLR

from families.recipe import Named, Recipe, called, momentum
from families.recipe_parts import (
    CLASSES,
    FEATURES,
    OF_THE_BATCH,
    SIZE,
    classified,
    drawn,
    images,
    labelled,
    layers,
    number,
    pooled,
    segmented,
)
from families.recipe_texts import Decoder, likelihood, pairs

WIDTH = 12


def adamw(named: Named) -> torch.optim.Optimizer:
    """Matrices decay, vectors do not."""
    wide = [p for _, p in named if p.dim() > 1]
    rest = [p for _, p in named if p.dim() < 2]
    groups = [{"params": g, "weight_decay": d} for g, d in ((wide, 0.1), (rest, 0.0)) if g]
    return torch.optim.AdamW(groups, lr=1e-2)


def by_layer(named: Named) -> torch.optim.Optimizer:
    """Lower layers learn more slowly (Howard and Ruder, 2018)."""
    depth = {"words": 0, "places": 0, "blocks.0": 1, "blocks.1": 2}
    rates = [0.1 * 0.5 ** (3 - next((d for n, d in depth.items() if name.startswith(n)), 3)) for name, _ in named]
    return torch.optim.SGD(
        [{"params": [p], "lr": lr} for (_, p), lr in zip(named, rates, strict=True)], lr=0.1, momentum=0.9
    )


class Averaging(torch.optim.SGD):
    """Keeps the mean of the weights after each step (Izmailov et al., 2018)."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["seen"] = state.get("seen", 0) + 1
                mean = state.setdefault("mean", torch.zeros_like(p))
                mean += (p - mean) / state["seen"]


def averaging(named: Named) -> torch.optim.Optimizer:
    return Averaging([p for _, p in named], lr=0.05, momentum=0.9)


def averaged(optimizer: torch.optim.Optimizer, named: Any) -> dict[str, Tensor]:
    return {name: optimizer.state[p]["mean"] for name, p in named}


def warmed(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda k: min(1, (k + 1) / 3) * (1 + math.cos(math.pi * k / 6)) / 2)


def with_penalty(model: nn.Module, batch: Any) -> Tensor:
    """A padded loss and the weights' squares."""
    return likelihood(model, batch) + 1e-2 * sum(p.square().sum() for p in model.parameters())


def in_parts(model: nn.Module, batch: Any) -> Tensor:
    """As gradients are added up by hand: each half of the batch counts half."""
    halves = zip(*(t.chunk(2) for t in batch), strict=True)
    return torch.stack([F.mse_loss(model(x), y) / 2 for x, y in halves]).sum()


class Weighed(nn.Module):
    """Divides by a norm of the samples' weights that no graph is known to sum up."""

    def __init__(self) -> None:
        super().__init__()
        self.body = layers(CLASSES)

    def forward(self, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        return (F.cross_entropy(self.body(x), y, reduction="none") * weight).sum() / weight.norm(p=1)


def weighed(step: int) -> Any:
    return torch.randn(SIZE, FEATURES), torch.randint(0, CLASSES, (SIZE,)), torch.rand(SIZE) * (1 + torch.arange(SIZE))


class Adapter(nn.Module):
    """A frozen layer and what is learned beside it (Hu et al., 2022)."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = (
            nn.Linear(base.in_features, rank, bias=False),
            nn.Linear(rank, base.out_features, bias=False),
        )
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2 * self.up(self.down(x))


def adapted() -> nn.Module:
    model = Decoder().requires_grad_(False)
    for block in model.blocks:
        block.project, block.out = Adapter(block.project), Adapter(block.out)
    return model


def by_peft() -> nn.Module:
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(r=2, lora_alpha=4, target_modules=["project", "out"])
    return inject_adapter_in_model(config, Decoder().requires_grad_(False))


def half_frozen() -> nn.Module:
    model = Decoder(tied=False)
    model.words.requires_grad_(False)
    model.blocks[0].requires_grad_(False).eval()
    return model


class Experts(nn.Module):
    """Two of four experts for each word, and how evenly they are used (Fedus et al., 2022)."""

    def __init__(self, even: float, certain: float = 0.0) -> None:
        super().__init__()
        self.body, self.route = Decoder(), nn.Linear(16, 4)
        self.experts, self.even, self.certain = nn.ModuleList(layers(16, 16) for _ in range(4)), even, certain

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.body.hidden(ids)
        scores = self.route(x)
        share, chosen = scores.softmax(-1).topk(2)
        gates = torch.zeros_like(scores).scatter(-1, chosen, share / share.sum(-1, keepdim=True))
        x = x + sum(gates[..., k, None] * expert(x) for k, expert in enumerate(self.experts))
        loss = F.cross_entropy(self.body.head(x).flatten(0, 1), targets.flatten())
        if self.certain:
            loss = loss + self.certain * scores.logsumexp(-1).square().mean()
        if self.even:
            used = number(gates > 0).mean((0, 1))
            loss = loss + self.even * 4 * (used * scores.softmax(-1).mean((0, 1))).sum()
        return loss


class Bounded(nn.Module):
    """A critic under spectral norm, whose power iteration goes on in every forward (Miyato et al., 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            parametrizations.spectral_norm(nn.Linear(FEATURES, WIDTH)), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(),
            parametrizations.spectral_norm(nn.Linear(WIDTH, 1)),
        )  # fmt: skip

    def forward(self, real: Tensor, made: Tensor) -> Tensor:
        return self.layers(made).mean() - self.layers(real).mean()


def normed() -> nn.Module:
    return nn.Sequential(
        parametrizations.weight_norm(nn.Linear(FEATURES, WIDTH)), nn.Tanh(), nn.LayerNorm(WIDTH),
        nn.Linear(WIDTH, WIDTH), nn.Tanh(), parametrizations.orthogonal(nn.Linear(WIDTH, CLASSES)),
    )  # fmt: skip


class Counting(nn.Module):
    """The penalty grows with the steps, which a buffer counts."""

    def __init__(self) -> None:
        super().__init__()
        self.body = layers(CLASSES)
        self.register_buffer("step", torch.zeros(()))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.step += 1
        found = self.body(x)
        return F.cross_entropy(found, y) + (self.step / 10).clamp(max=1) * found.square().mean()


def vectors(step: int) -> Any:
    return torch.randn(SIZE, FEATURES), torch.randint(0, CLASSES, (SIZE,))


def accuracy(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    return {"accuracy": number(model(batch[0]).argmax(1) == batch[1]).mean(), "loss": classified(model, batch)}


def _words(name: str, loss: Any = likelihood, model: Callable[[], nn.Module] = Decoder, **more: Any) -> Recipe:
    return Recipe(f"recipe_{name}", model, loss, pairs, **more)


def _of(name: str, loss: Any, batch: Any, model: Callable[[], nn.Module], **more: Any) -> Recipe:
    return Recipe(f"recipe_{name}", model, loss, batch, **more)


RECIPES = (
    _words("clipped", clip=0.3),
    _words("decay_groups", optimizer=adamw, scheduler=warmed, clip=1.0, tolerance=1e-6),
    _words("rates_by_layer", optimizer=by_layer, scheduler=functools.partial(CosineAnnealingLR, T_max=6)),
    _words("one_cycle", scheduler=functools.partial(OneCycleLR, max_lr=0.1, total_steps=7)),
    _words("stepped_rate", scheduler=functools.partial(StepLR, step_size=2, gamma=0.3), ema=0.8),
    _words("moving_average", ema=0.9, clip=0.5),
    _words("average_of_steps", optimizer=averaging, averaged=averaged),
    _words("squared_weights", with_penalty),
    _words("half_frozen", model=half_frozen),
    _words("low_rank", model=adapted, optimizer=adamw, tolerance=1e-6),
    _words("low_rank_of_peft", model=by_peft, needs=("peft",)),
    _words("eight_microbatches", microbatches=8),
    _words("experts", called, lambda: Experts(0.0, 1e-2)),
    _words("even_experts", called, lambda: Experts(1e-2), differs=("(?s).", OF_THE_BATCH)),
    _words("dropout", model=lambda: nn.Sequential(Decoder(16, tied=False), nn.Dropout(0.3), nn.Linear(16, 23)),
           random=True),
    _of("weight_hook", called, weighed, Weighed, loss_weight=lambda batch: batch[2].sum(),
        tolerance=1e-6),  # the hook's weights have float32
    _of("parts_by_hand", in_parts, lambda step: torch.randn(2, SIZE, FEATURES).unbind(0), lambda: layers(FEATURES),
        differs=("divides the batch", OF_THE_BATCH)),
    _of("weight_norm", classified, vectors, normed),
    _of("spectral_norm", called, lambda step: torch.randn(2, SIZE, FEATURES).unbind(0), Bounded,
        differs=("which every microbatch changes", OF_THE_BATCH)),
    _of("instance_norm", segmented, drawn, lambda: images(CLASSES, lambda n: nn.InstanceNorm2d(n, affine=True))),
    _of("counted_steps", called, vectors, Counting, differs=("which every microbatch changes", OF_THE_BATCH)),
    _of("channels_last", classified, labelled, lambda: pooled(CLASSES).to(memory_format=torch.channels_last)),
    _of("bf16_images", classified, labelled, lambda: pooled(CLASSES), autocast="bf16", double=False, tolerance=2e-2),
    _of("accuracy", classified, vectors, lambda: layers(CLASSES), metrics=accuracy, optimizer=momentum),
)  # fmt: skip

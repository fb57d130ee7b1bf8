"""Optimizers of torch, transformers, timm and pytorch-optimizer, each over a masked loss on two workers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from families.entry import TIMM, TRANSFORMERS, define_torchvision_ops
from families.recipe import OPTIMIZERS, Named, Recipe
from families.recipe_parts import layers, masked, valued

ALL = "behaves differently when each worker has its own"
TOGETHER = "it looks at all parameters at once"
Make = Callable[[Named], Any]


def _torch(name: str, **options: Any) -> Make:
    return lambda named: getattr(torch.optim, name)([p for _, p in named], **options)


def _transformers(name: str, **options: Any) -> Make:
    def make(named: Named) -> torch.optim.Optimizer:
        import transformers

        made: torch.optim.Optimizer = getattr(transformers, name)([p for _, p in named], **options)
        return made

    return make


def _timm(name: str, **options: Any) -> Make:
    def make(named: Named) -> torch.optim.Optimizer:
        define_torchvision_ops()
        from timm.optim import create_optimizer_v2

        settings = {"lr": 1e-2, "weight_decay": 1e-2, **options}
        made: torch.optim.Optimizer = create_optimizer_v2([p for _, p in named], opt=name, **settings)
        return made

    return make


def _pytorch_optimizer(name: str, **options: Any) -> Make:
    def make(named: Named) -> torch.optim.Optimizer:
        from pytorch_optimizer import load_optimizer

        made: torch.optim.Optimizer = load_optimizer(name)([p for _, p in named], **{"lr": 1e-2, **options})
        return made

    return make


def _muon(named: Named) -> list[torch.optim.Optimizer]:
    wide, rest = [p for _, p in named if p.dim() == 2], [p for _, p in named if p.dim() != 2]
    made: list[torch.optim.Optimizer] = [torch.optim.Muon(wide, lr=1e-2)] if wide else []
    return [*made, *([torch.optim.AdamW(rest, lr=1e-2)] if rest else [])]


def _of(library: str, name: str, make: Make, needs: tuple[str, ...] = (), **more: Any) -> Recipe:
    loss = masked(functools.partial(F.mse_loss, reduction="none"))
    named, kind = f"recipe_optimizer_{library}_{name}", OPTIMIZERS
    return Recipe(named, lambda: layers(3), loss, valued, make, needs=needs, kind=kind, **more)


def _torchs(name: str, **options: Any) -> Recipe:
    return _of("torch", name.lower(), _torch(name, **options))


def _timms(name: str, **more: Any) -> Recipe:
    return _of("timm", name, _timm(name), TIMM, **more)


def _others(name: str, options: Any = None, **more: Any) -> Recipe:
    return _of("pytorch_optimizer", name, _pytorch_optimizer(name, **(options or {})), ("pytorch_optimizer",), **more)


# All but those that need a closure, second derivatives or CUDA, and those that begin with random numbers. SOAP is left
# out: rounding alone moves its weights by a quarter of their way in 60 steps of eager PyTorch.
RECIPES = (
    _torchs("ASGD"),
    _torchs("Adadelta", lr=1.0),
    _torchs("Adafactor"),
    _torchs("Adagrad", lr=0.05),
    _torchs("Adam", amsgrad=True),
    _torchs("AdamW", lr=1e-2, foreach=True),
    _torchs("Adamax"),
    _torchs("NAdam"),
    _torchs("RAdam", lr=1e-2),
    _torchs("RMSprop", centered=True, momentum=0.9),
    _torchs("Rprop"),
    _torchs("SGD", lr=0.1, nesterov=True, momentum=0.9, weight_decay=1e-2),
    _of("torch", "muon_and_adamw", _muon, tolerance=1e-4),  # Muon multiplies in bfloat16
    _of("torch", "lbfgs", _torch("LBFGS"), refused=("needs a closure", "it computes the loss again within a step")),
    _of("transformers", "adafactor", _transformers("Adafactor"), TRANSFORMERS),
    _of("transformers", "adafactor_of_given_rate", _transformers(
        "Adafactor", lr=1e-2, relative_step=False, scale_parameter=False, warmup_init=False), TRANSFORMERS),
    *map(_timms, (
        "adabelief", "adafactorbv", "adamp", "adan", "adopt", "laprop", "lars", "lion", "madgrad", "mars", "nadamw",
        "novograd", "radabelief", "sgdp", "cadamw",
    )),
    _of("timm", "lamb_clipped_outside", _timm("lamb", max_grad_norm=None), TIMM, clip=1.0),
    _timms("lamb", refused=(ALL, "it clips by the norm of all gradients")),
    *map(_others, (
        "a2grad", "adabound", "adafactor", "adamod", "adan", "adanorm", "adapnm", "adatam", "ademamix", "aggmo",
        "amos", "apollo", "came", "diffgrad", "exadam", "fromage", "ftrl", "grams", "lars", "lion", "nero", "novograd", 
        "padam", "pid", "qhadam", "ranger", "scalableshampoo", "schedulefreeadamw", "shampoo", "sm3", "srmm", 
        "stableadamw", "tiger", "yogi",
    )),
    *(_others(name, refused=(ALL, TOGETHER)) for name in ("adagc", "adai", "adams", "avagrad")),
    *(_others(name, {"lr": 1.0}, refused=(ALL, "it adapts one distance to all parameters"))
        for name in ("prodigy", "dadaptadam", "dadaptlion")),
    _of("pytorch_optimizer", "prodigy_slow", _pytorch_optimizer("prodigy", lr=1e-2), ("pytorch_optimizer",),
        refused=("adapts d.* to all parameters at once", "it adapts one distance to all parameters")),
)  # fmt: skip

"""Optimizers that are known to look at each parameter alone."""

from __future__ import annotations

import torch

from fxpipe.task.several_optimizers import changes_torchs, parts_of

_PACKAGES = ("pytorch_optimizer.optimizer.", "timm.optim.", "transformers.optimization")

_TRIED = {
    "A2Grad", "APOLLO", "AdEMAMix", "AdaBelief", "AdaBound", "AdaFactor", "AdaMod", "AdaNorm", "AdaPNM", "AdaTAM",
    "Adafactor", "AdafactorBigVision", "AdamP", "AdamWLegacy", "Adan", "Adopt", "AggMo", "Amos", "CAME", "DiffGrad",
    "EXAdam", "FTRL", "Fromage", "Grams", "LARS", "LaProp", "Lars", "Lion", "MADGRAD", "Mars", "NAdamW", "Nero",
    "NovoGrad", "NvNovoGrad", "PAdam", "PID", "QHAdam", "Ranger", "SGDP", "SM3", "SRMM", "ScalableShampoo",
    "ScheduleFreeAdamW", "Shampoo", "StableAdamW", "Tiger", "Yogi",
}  # fmt: skip
"""Names in these packages: `make zoo ONLY=recipe` finds that they train as eager PyTorch does."""


def looks_at_each_alone(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is known to: one of torch's own without hooks on its step, or one of those tested."""
    return all(
        not changes_torchs(part) or (type(part).__name__ in _TRIED and type(part).__module__.startswith(_PACKAGES))
        for part in parts_of(optimizer)
    )

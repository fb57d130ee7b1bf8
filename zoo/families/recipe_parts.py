"""What many recipes share: sizes, samples that do not count, small models, batches and losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SIZE, CLASSES, WIDTH, FEATURES = 8, 5, 12, 6
OF_THE_BATCH = "a function of the whole batch that no sum over its parts gives"


def kept(step: int, *shape: int) -> Tensor:
    """Truth values [samples, *shape]: more of them in later samples, other ones each step."""
    share = (torch.arange(SIZE).reshape(-1, *[1] * len(shape)) + step % 3) / (SIZE + 2)
    return torch.rand(SIZE, *shape) < share


def number(flags: Tensor) -> Tensor:
    return flags.to(torch.get_default_dtype())


def layers(outputs: int, inputs: int = FEATURES) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, outputs)
    )


def images(outputs: int, norm: Callable[[int], nn.Module] = lambda n: nn.GroupNorm(2, n)) -> nn.Sequential:
    """Images [samples, 3, 8, 8] to maps [samples, outputs, 8, 8]."""
    return nn.Sequential(
        nn.Conv2d(3, WIDTH, 3, 1, 1), norm(WIDTH), nn.ReLU(), nn.Conv2d(WIDTH, WIDTH, 3, 1, 1), norm(WIDTH), nn.ReLU(),
        nn.Conv2d(WIDTH, outputs, 1),
    )  # fmt: skip


def pooled(outputs: int, norm: Callable[[int], nn.Module] = lambda n: nn.GroupNorm(2, n)) -> nn.Sequential:
    return nn.Sequential(images(outputs, norm), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def labelled(step: int) -> Any:
    return torch.randn(SIZE, 3, 8, 8), torch.randint(0, CLASSES, (SIZE,))


def valued(step: int) -> Any:
    """Numbers to be foretold, of which some are missing."""
    return torch.randn(SIZE, FEATURES), torch.randn(SIZE, 3), number(kept(step, 3))


def masked(each: Callable[[Tensor, Tensor], Tensor]) -> Any:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        x, y, known = batch
        return (each(model(x), y) * known).sum() / known.sum().clamp(min=1)

    return loss


def classified(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def drawn(step: int) -> Any:
    """Images with a class for each pixel, 255 where it does not count."""
    pixels = torch.randint(0, CLASSES, (SIZE, 8, 8)).masked_fill(~kept(step, 8, 8), 255)
    return torch.randn(SIZE, 3, 8, 8), pixels


def segmented(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], ignore_index=255)

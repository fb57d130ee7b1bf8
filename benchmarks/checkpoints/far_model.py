"""A small model, and endless windows of random numbers that say where they stand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

WIDTH, BATCH = 8, 4


class Windows:
    """Each batch takes some ten microseconds to make: less than that of most data."""

    def __init__(self) -> None:
        self.numbers = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
        self.generator = torch.Generator().manual_seed(1)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            starts = torch.randint(len(self.numbers) - WIDTH, (BATCH, 1), generator=self.generator)
            x = self.numbers[starts + torch.arange(WIDTH)]
            yield x, x.sum(-1, keepdim=True)

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def train_data() -> Windows:
    return Windows()

"""What a training recipe of the zoo is: a model, its step, its batches, and all that trains it."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from families.entry import Loss, define_torchvision_ops, find_apart_packages

STEPS = 6
WORKERS, MICROBATCHES = 2, 4
KIND = "training recipes, six steps"
OPTIMIZERS = "optimizers under 1f1b, six steps"

Named = list[tuple[str, nn.Parameter]]


def momentum(named: Named) -> torch.optim.Optimizer:
    """What most recipes train with: it forgives no wrong scale of a gradient, and does not blow up rounding."""
    return torch.optim.SGD([p for _, p in named], lr=0.05, momentum=0.9)


@dataclass(frozen=True)
class Recipe:
    """A model with its step, its batches and what a training loop does besides.

    Attributes:
        model: makes the module, with random weights; nothing is downloaded.
        loss: `loss(model, batch)` is the step.
        batch: the minibatch of a step, from the step's number; torch's generator is seeded for it.
        optimizer, scheduler, loss_weight, averaged: the hooks.
        clip: the norm that all gradients are clipped to, if they are.
        ema: the share of each weight's moving average that an update leaves, if averages are kept.
        metrics: `metrics(model, batch)`, which is evaluated on the batches after training.
        microbatches: how many a minibatch is cut into.
        dims: where leaves are cut, for `microbatch_dims`; found by their use if None.
        autocast: 'bf16', or None.
        double: float64 all through; float32 if not.
        random: the step draws random numbers: they are the same for every element when it is compared with eager.
        tolerance: of the weights, relative to each tensor's norm; by the dtype if None.
        differs: what a compile with microbatches says, as a pattern, of a loss that is another one then, and why it
            must be; the recipe is then compared with one microbatch.
        refused: what the error of every compile must match, and why it must be refused.
        needs: packages that it imports.
        kind: its heading in the table.
    """

    name: str
    model: Callable[[], nn.Module]
    loss: Loss
    batch: Callable[[int], Any]
    optimizer: Callable[[Named], Any] = momentum
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    clip: float | None = None
    ema: float | None = None
    averaged: Callable[[torch.optim.Optimizer, Any], Any] | None = None
    loss_weight: Callable[[Any], Any] | None = None
    metrics: Callable[[nn.Module, Any], dict[str, Any]] | None = None
    microbatches: int = MICROBATCHES
    dims: Any = None
    autocast: str | None = None
    double: bool = True
    random: bool = False
    tolerance: float | None = None
    differs: tuple[str, str] | None = None
    refused: tuple[str, str] | None = None
    needs: tuple[str, ...] = ()
    kind: str = KIND

    def missing(self) -> str | None:
        """Why it cannot be made here, if it cannot."""
        find_apart_packages()
        absent = [name for name in self.needs if importlib.util.find_spec(name) is None]
        return f"{' and '.join(absent)} not installed; `make venv` installs it" if absent else None

    def make(self) -> nn.Module:
        """The module, always with the same weights."""
        define_torchvision_ops()
        with torch.random.fork_rng(), self.dtype():
            torch.manual_seed(0)
            return self.model()

    def batches(self) -> list[Any]:
        """A minibatch for every step, always the same."""
        found = []
        with torch.random.fork_rng(), self.dtype():
            for step in range(STEPS):
                torch.manual_seed(1234 + step)
                found.append(self.batch(step))
        return found

    @contextlib.contextmanager
    def dtype(self) -> Iterator[None]:
        """Inside, tensors are made in the recipe's dtype."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64 if self.double else torch.float32)
        try:
            yield
        finally:
            torch.set_default_dtype(before)

    @property
    def bound(self) -> float:
        """The largest relative error of a weight that counts as rounding."""
        if self.tolerance is not None:
            return self.tolerance
        return 1e-9 if self.double else 1e-4

    def named(self, model: nn.Module) -> Named:
        return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def called(model: nn.Module, batch: Any) -> Tensor:
    """The step of a model that computes its loss itself."""
    found: Tensor = model(*batch)
    return found

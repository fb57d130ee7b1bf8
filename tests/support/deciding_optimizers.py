"""Optimizers that decide something: by each parameter alone, or by all at once, though not in every step."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

clip_grad_norm_ = torch.nn.utils.clip_grad_norm_


class Decides(Optimizer):
    """Gradient descent; subclasses say whether, and what they do to gradients before."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.options = options
        self.steps = 0
        self.history: list[float] = []

    @property
    def all(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    @property
    def gradients(self) -> list[Any]:
        return [p.grad for p in self.all]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        if self.goes():
            for p in self.all:
                self.move(p, p.grad)

    def goes(self) -> bool:
        return True

    def move(self, p: Tensor, grad: Any) -> None:
        p.sub_(grad, alpha=0.1)


def global_norm(gradients: list[Tensor]) -> Tensor:
    return torch.stack([g.norm() for g in gradients]).norm()


# By all at once.


class SkipsLargeNorms(Decides):
    def goes(self) -> bool:
        return bool(global_norm(self.gradients) < 150e4)


class SkipsNormsBetween(Decides):
    def goes(self) -> bool:
        norm = global_norm(self.gradients)
        return not (norm >= 149.9 and norm <= 150)


class SumsInPython(Decides):
    def goes(self) -> bool:
        return math.sqrt(sum(g.norm().item() ** 2 for g in self.gradients)) < 1e9


class ClipsOutliers(Decides):
    """As ZClip: what is far from the mean of the last norms."""

    window = 25

    def goes(self) -> bool:
        norm = math.sqrt(sum(float(g.norm()) ** 2 for g in self.gradients))
        if len(self.history) == self.window:
            mean = sum(self.history) / self.window
            deviation = math.sqrt(sum((x - mean) ** 2 for x in self.history) / self.window)
            if (norm - mean) / (deviation + 1e-6) > 250:
                for g in self.gradients:
                    g.mul_(mean / norm)
                norm = mean
        self.history = [*self.history, norm][-self.window :]
        return True


class ClipsOutliersOfHundred(ClipsOutliers):
    window = 100


class ClipsLater(Decides):
    def goes(self) -> bool:
        if self.steps > 25:
            clip_grad_norm_(self.all, 1e7)
        return True


class ClipsLargeNorms(Decides):
    def goes(self) -> bool:
        clip_grad_norm_(self.all, 1e9)
        return True


class ClipsInAHook(Decides):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.register_step_pre_hook(lambda optimizer, args, kwargs: self.clip())

    def clip(self) -> None:
        clip_grad_norm_(self.all, 1e9)


class ClipsFlat(Decides):
    """One buffer for all."""

    def goes(self) -> bool:
        flat = torch.cat([g.flatten() for g in self.gradients])
        flat.div_(flat.norm().clamp(min=1e12) / 1e12)
        for g, part in zip(self.gradients, flat.split([g.numel() for g in self.gradients]), strict=True):
            g.copy_(part.view_as(g))
        return True


class SkipsNotFinite(Decides):
    def goes(self) -> bool:
        return all(bool(g.isfinite().all()) for g in self.gradients)


class SkipsNotFiniteByNumpy(Decides):
    def goes(self) -> bool:
        return all(math.isfinite(g.numpy().sum()) for g in self.gradients)


class KeepsWeightsWhereNotFinite(Decides):
    """Without a decision in Python."""

    def goes(self) -> bool:
        self.fine = torch.stack([g.isfinite().all() for g in self.gradients]).all()
        return True

    def move(self, p: Tensor, grad: Any) -> None:
        p.copy_(torch.where(self.fine, p - 0.1 * grad, p))


class AsksTheFirst(Decides):
    def goes(self) -> bool:
        return bool(self.gradients[0].abs().max() < 1e6)


class AsksTheFirstSometimes(Decides):
    """Only of its sign is it asked, and of an element."""

    def goes(self) -> bool:
        return not (self.steps == 2 and self.gradients[0].flatten()[0] * self.gradients[0].flatten()[0] < 0)


class AdaptsTheRate(Decides):
    """A group's number by a small part of the distance gone, as D-Adaptation."""

    def goes(self) -> bool:
        far = max(g.abs().max().item() for g in self.gradients)
        for group in self.param_groups:
            group["d"] = max(group.get("d", 1e6), far)
        return True


# Of all at once, though nothing comes of it.


class LogsTheNorm(Decides):
    def goes(self) -> bool:
        self.last = global_norm(self.gradients).item()
        return True


class LogsTheSum(Decides):
    def goes(self) -> bool:
        self.last = sum(g.norm().item() for g in self.gradients)
        return True


class KeepsTheNorm(Decides):
    def goes(self) -> bool:
        self.last = global_norm(self.gradients)
        return True


# By each alone.


class TrustRatioByItem(Decides):
    """As LAMB."""

    def move(self, p: Tensor, grad: Any) -> None:
        weight, norm = p.norm().item(), grad.norm().item()
        super().move(p, grad * (weight / norm if weight > 0 and norm > 0 else 1.0))


class SkipsItsOwn(Decides):
    def move(self, p: Tensor, grad: Any) -> None:
        if not torch.isnan(grad).any():
            super().move(p, grad)


class ClipsItsOwn(Decides):
    def move(self, p: Tensor, grad: Any) -> None:
        clip_grad_norm_([p], 0.5)
        super().move(p, grad)


class ListsNorms(Decides):
    def goes(self) -> bool:
        norms = torch.stack([g.norm() for g in self.gradients]).tolist()
        for g, norm in zip(self.gradients, norms, strict=True):
            g.div_(max(norm, 1.0))
        return True


class ByNumpy(Decides):
    def move(self, p: Tensor, grad: Any) -> None:
        p.detach().numpy()[...] -= 0.1 * grad.numpy()


class OneBuffer(Decides):
    """All momenta are one tensor."""

    def goes(self) -> bool:
        flat = torch.cat([g.flatten() for g in self.gradients])
        momenta = self.__dict__.setdefault("momenta", torch.zeros_like(flat)).mul_(0.9).add_(flat)
        for p, part in zip(self.all, momenta.split([p.numel() for p in self.all]), strict=True):
            p.sub_(part.view_as(p), alpha=0.1)
        return False


class Scratch(Decides):
    """What is computed for one parameter is where that for another was."""

    def move(self, p: Tensor, grad: Any) -> None:
        buffer = self.__dict__.setdefault("buffer", torch.zeros(64, dtype=p.dtype))
        part = buffer[: p.numel()].view_as(p)
        part.copy_(grad)
        super().move(p, part.mul_(0.5))


class ScheduleFree(Decides):
    """Averages, which step and evaluation see."""

    def move(self, p: Tensor, grad: Any) -> None:
        state = self.state[p]
        far = state.setdefault("z", p.clone()).sub_(grad, alpha=0.1)
        p.lerp_(far, 1 / self.steps)


class RaisesOnNan(Decides):
    def move(self, p: Tensor, grad: Any) -> None:
        if not math.isfinite(grad.norm().item()):
            raise FloatingPointError("nan")
        super().move(p, grad)


class Halves(Decides):
    """Until it is small: with another number forever."""

    def move(self, p: Tensor, grad: Any) -> None:
        while not grad.norm() < 1e3:
            grad = grad / 2
        super().move(p, grad)


TOGETHER: tuple[type[Decides], ...] = (
    *(SkipsLargeNorms, SkipsNormsBetween, SumsInPython, ClipsOutliers, ClipsOutliersOfHundred, ClipsLater),
    *(ClipsLargeNorms, ClipsInAHook, ClipsFlat, SkipsNotFinite, SkipsNotFiniteByNumpy, KeepsWeightsWhereNotFinite),
    *(AsksTheFirst, AsksTheFirstSometimes, AdaptsTheRate),
)
LOGGING: tuple[type[Decides], ...] = (LogsTheNorm, LogsTheSum, KeepsTheNorm)
ALONE: tuple[type[Decides], ...] = (
    *(TrustRatioByItem, SkipsItsOwn, ClipsItsOwn, ListsNorms, ByNumpy, OneBuffer, Scratch, ScheduleFree),
    *(RaisesOnNan, Halves),
)

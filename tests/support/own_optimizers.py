"""Optimizers as users write them: those that look at each parameter alone, and those that look at all at once."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Each(Optimizer):
    """Gradient descent, a parameter at a time; subclasses say how far each goes."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, {"lr": 0.1, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        members = [(group, p) for group in self.param_groups for p in group["params"]]
        self.look([p.grad for _, p in members])
        for place, (group, p) in enumerate(members):
            p -= group["lr"] * self.way(group, p, place)

    def look(self, gradients: list[Any]) -> None:
        pass

    def way(self, group: dict[str, Any], p: Tensor, place: int) -> Tensor:
        assert p.grad is not None
        return p.grad


class ClipsInside(Each):
    """The norm of all gradients is at most `most`."""

    def look(self, gradients: list[Any]) -> None:
        norm = torch.stack([g.norm() for g in gradients]).norm()
        self.scale = min(1.0, self.defaults["most"] / float(norm))

    def way(self, group: dict[str, Any], p: Tensor, place: int) -> Tensor:
        return self.scale * super().way(group, p, place)


class MeanOfSquares(Each):
    """As Adai: how loud all parameters are on the average."""

    def look(self, gradients: list[Any]) -> None:
        count = sum(g.numel() for g in gradients)
        self.mean = math.sqrt(sum(float(g.square().sum()) for g in gradients) / count)

    def way(self, group: dict[str, Any], p: Tensor, place: int) -> Tensor:
        return super().way(group, p, place) / self.mean


class Adapts(Each):
    """As Prodigy: one distance for all parameters, which grows."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, d=1e-6)
        self.first = [p.detach().clone() for group in self.param_groups for p in group["params"]]
        self.gained = self.all = 0.0

    def look(self, gradients: list[Any]) -> None:
        now = [p for group in self.param_groups for p in group["params"]]
        for group in self.param_groups:
            self.gained += sum(float(((a - b) * g).sum()) for a, b, g in zip(self.first, now, gradients, strict=True))
            self.all += sum(float(g.abs().sum()) for g in gradients)
            group["d"] = max(group["d"], 2 * self.gained / self.all)

    def way(self, group: dict[str, Any], p: Tensor, place: int) -> Tensor:
        return super().way(group, p, place).sign() * group["d"]


class ByPlace(Each):
    """Goes a little less far for every parameter before."""

    def way(self, group: dict[str, Any], p: Tensor, place: int) -> Tensor:
        return super().way(group, p, place) * 0.999**place


class TrustRatio(Each):
    """As LAMB and LARS: by the norms of the parameter itself."""

    def way(self, group: dict[str, Any], p: Tensor, place: int) -> Tensor:
        grad = super().way(group, p, place)
        return grad * p.norm() / grad.norm()


class Noisy(Each):
    """As SGLD."""

    def way(self, group: dict[str, Any], p: Tensor, place: int) -> Tensor:
        return super().way(group, p, place) + torch.randn_like(p)


class OwnGenerator(Each):
    """As SGLD, with a generator of its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.generator = torch.Generator().manual_seed(7)

    def way(self, group: dict[str, Any], p: Tensor, place: int) -> Tensor:
        return super().way(group, p, place) + torch.randn(p.shape, generator=self.generator, dtype=p.dtype)


class SkipsNotFinite(Each):
    """No step where any gradient is not finite; in one number, without a decision in Python."""

    def look(self, gradients: list[Any]) -> None:
        self.fine = torch.stack([g.isfinite().all() for g in gradients]).all()

    def way(self, group: dict[str, Any], p: Tensor, place: int) -> Tensor:
        grad = super().way(group, p, place)
        return torch.where(self.fine, grad, torch.zeros_like(grad))


class AdaptsLate(Each):
    """A group's number by a small part of the distance gone, as D-Adaptation."""

    def look(self, gradients: list[Any]) -> None:
        far = max(float(g.abs().max()) for g in gradients)
        for group in self.param_groups:
            group["d"] = max(group.get("d", 1e6), far)


class ClipsLater(ClipsInside):
    """Clips after more steps than a trial has."""

    def look(self, gradients: list[Any]) -> None:
        self.steps = self.__dict__.get("steps", 0) + 1
        super().look(gradients)
        self.scale = self.scale if self.steps > 25 else 1.0


class RaisesOnNan(Each):
    def way(self, group: dict[str, Any], p: Tensor, place: int) -> Tensor:
        if not math.isfinite(super().way(group, p, place).norm().item()):
            raise FloatingPointError("nan")
        return super().way(group, p, place)


class Halves(Each):
    """Until it is small: of what is not a number forever."""

    def way(self, group: dict[str, Any], p: Tensor, place: int) -> Tensor:
        grad = super().way(group, p, place)
        while not grad.norm() < 1e3:
            grad = grad / 2
        return grad

"""What changes autograd itself: own functions and operators, checkpoints, hooks, gradients inside the step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from features import WIDTH, Chain, Feature, check, layers, squared
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential


class Scaled(torch.autograd.Function):
    """Plain fields and saved tensors in its context, only the gradients that are needed, a result without gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, factor: float, mode: str) -> tuple[Tensor, Tensor, Tensor]:
        ctx.factor, ctx.mode = factor, mode
        out = x * weight * factor
        largest = out.argmax(1)
        ctx.save_for_backward(x, weight, out)
        ctx.mark_non_differentiable(largest)
        ctx.set_materialize_grads(False)
        return out, largest, x * 2

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: Any, of_double: Tensor | None) -> Any:
        x, weight, out = ctx.saved_tensors
        assert ctx.mode == "odd"
        gradient = gradient * ctx.factor + 0.01 * out
        by_x = gradient * weight if ctx.needs_input_grad[0] else None
        if by_x is not None and of_double is not None:
            by_x = by_x + 3 * of_double
        by_weight = (gradient * x).sum(0) if ctx.needs_input_grad[1] else None
        return by_x, by_weight, None, None


class NewStyle(torch.autograd.Function):
    """forward without a context, setup_context, a tensor kept as a plain attribute."""

    @staticmethod
    def forward(x: Tensor, power: int) -> Tensor:
        return x.abs() ** power

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.x, ctx.power = inputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.x * ctx.power * 0.7, None


class DirtyReLU(torch.autograd.Function):
    """Works in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        x.clamp_(min=0)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (out,) = ctx.saved_tensors
        return gradient * (out > 0) * 1.1


class Reversed(torch.autograd.Function):
    """Gradient reversal."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -0.5 * gradient


class Functions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = layers(3)
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.frozen = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y, largest, double = Scaled.apply(self.layers[0](x), self.weight, 1.5, "odd")
        y = NewStyle.apply(torch.tanh(self.layers[1](y)), 2) + F.one_hot(largest, WIDTH) * 0.1 + double * 0.1
        y, _, _ = Scaled.apply(DirtyReLU.apply(y * 1.0), self.frozen, 0.5, "odd")
        return self.layers[2](Reversed.apply(y))


class Inner(torch.autograd.Function):
    """Recomputes its forward with autograd inside its backward, as hand-written checkpoints do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.tanh(x @ weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = (v.detach().requires_grad_() for v in ctx.saved_tensors)
        with torch.enable_grad():
            out = torch.tanh(x @ weight) * 1.1
        return torch.autograd.grad(out, (x, weight), gradient)


class RecomputesItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.randn(WIDTH, WIDTH) * 0.4 for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = Inner.apply(x, weight) + x
        return x


class Checkpoints(nn.Module):
    """Several inputs, keywords, constants, tuples out, nested, by sequence, sharing a weight with plain code."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers(5)
        self.sequence = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.layers[0](x))
        y, z = checkpoint(self.two, x, y, 0.5, None, use_reentrant=False, flag=True)
        y = checkpoint(self.outer, y, use_reentrant=False)
        y, z = checkpoint(self.two, y, z, 2.0, None, use_reentrant=True)
        y = checkpoint_sequential(self.sequence, 2, y, use_reentrant=False)
        return torch.tanh(self.layers[1](y)) + z

    def two(self, x: Tensor, y: Tensor, factor: float, nothing: None, flag: bool = False) -> tuple[Tensor, Tensor]:
        z = torch.tanh(self.layers[1](x)) * factor
        return self.layers[2](y + z), z.detach() if flag else z

    def outer(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, torch.tanh(self.layers[3](x)), use_reentrant=False) + x

    def inner(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layers[4](x))


class DropoutInCheckpoint(nn.Module):
    """Its masks must be those of forward when backward recomputes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers(4)

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = x + checkpoint(self.block, layer, x, use_reentrant=i % 2 == 0)
        return x

    def block(self, layer: nn.Module, x: Tensor) -> Tensor:
        return F.dropout(torch.tanh(layer(F.dropout(x, 0.3))), 0.2) * torch.rand_like(x)


class Hooks(nn.Module):
    """Forward hooks that change inputs and outputs, hooks with keywords, hooks on tensors and parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers(4)
        self.layers[0].register_forward_hook(lambda module, args, out: torch.tanh(out) * 1.5)
        self.layers[1].register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
        self.layers[2].register_forward_hook(
            lambda module, args, kwargs, out: out + kwargs["input"].detach(), with_kwargs=True
        )
        self.layers[3].weight.register_hook(lambda gradient: gradient * 0.5)
        self.layers[3].weight.register_hook(lambda gradient: gradient + 0.01)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[1](self.layers[0](x))
        x = torch.tanh(self.layers[2](input=x))
        x.register_hook(lambda gradient: gradient.clamp(-1e-2, 1e-2))
        return self.layers[3](x)


class BackwardHooks(nn.Module):
    """Full backward hooks that change a module's gradients, before and behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers(4)
        self.layers[1].register_full_backward_hook(lambda module, into, out: (into[0] * 0.5,))
        self.layers[2].register_full_backward_pre_hook(lambda module, out: (out[0].clamp(-1e-2, 1e-2),))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def gradient_penalty(model: nn.Module, batch: Any) -> Tensor:
    """Second derivatives: the norm of the gradient by the batch enters the loss."""
    x = batch[0].detach().requires_grad_()
    out = model(x)
    (gradient,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    return F.mse_loss(out, batch[1]) + gradient.square().mean()


def meta_step(model: nn.Module, batch: Any) -> Tensor:
    """One inner step of gradient descent by torch.func, through which the outer gradient goes."""
    x, y = batch
    weights = dict(model.named_parameters())

    def inner(given: dict[str, Tensor]) -> Tensor:
        return F.mse_loss(torch.func.functional_call(model, given, (x,)), y)

    gradients = torch.func.grad(inner)(weights)
    stepped = {name: value - 0.1 * gradients[name] for name, value in weights.items()}
    return F.mse_loss(torch.func.functional_call(model, stepped, (x,)), y)


def per_sample(model: nn.Module, batch: Any) -> Tensor:
    """vmap over the samples, and a Jacobian-vector product."""
    x, y = batch
    out = torch.func.vmap(lambda one: model(one[None])[0], randomness="error")(x)
    _, tangent = torch.func.jvp(torch.tanh, (out,), (torch.ones_like(out),))
    return F.mse_loss(out, y) + tangent.square().mean()


def inner_gradient(model: nn.Module, batch: Any) -> Tensor:
    """A gradient by a weight, without second derivatives, scales the loss."""
    loss = squared(model, batch)
    (gradient,) = torch.autograd.grad(loss, model.layers[0].weight, retain_graph=True)  # type: ignore[union-attr]
    return loss * (1 + gradient.norm().detach())


FEATURES = [
    Feature("functions", Functions),
    Feature("recomputes-itself", RecomputesItself),
    Feature("checkpoints", Checkpoints),
    Feature("dropout-in-checkpoint", DropoutInCheckpoint, draws=True),
    Feature("hooks", Hooks),
    Feature("backward-hooks", BackwardHooks),
    Feature("gradient-penalty", Chain, gradient_penalty, alone=True),
    Feature("meta-step", Chain, meta_step, alone=True),
    Feature("per-sample", Chain, per_sample, alone=True),
    Feature("inner-gradient", Chain, inner_gradient, alone=True),
]


@pytest.mark.parametrize("feature", FEATURES, ids=lambda f: f.name)
def test_functions(feature: Feature) -> None:
    check(feature)

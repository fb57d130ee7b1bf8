"""A step around a function of tensors: captured, run, and compared with eager PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from fxpipe.ir.program import Program
from fxpipe.tracing.capture import capture

Function = Callable[..., Any]
TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 2e-5, torch.float64: 1e-10}


class Held(nn.Module):
    """Tensors as parameters."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self.held = nn.ParameterList([nn.Parameter(t.clone()) for t in tensors])


def weighted(out: Any) -> Tensor:
    """One number of all that a function gives, with another weight for every element: a plain sum hides what moves."""
    total = torch.zeros((), dtype=torch.float64)
    for place, value in enumerate(v for v in pytree.tree_leaves(out) if isinstance(v, Tensor)):
        value = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
        value = value if value.is_floating_point() else value.float()
        weights = torch.linspace(0.5 + 0.1 * place, 1.7, value.numel(), dtype=value.dtype).reshape(value.shape)
        total = total + (value * weights).sum().double()
    return total


def captured(function: Function, trained: Sequence[Tensor], given: Sequence[Tensor]) -> tuple[Program, Held]:
    """The step that weighs what `function(*trained, *given)` makes."""
    model = Held(trained)
    batch = [*given, torch.zeros(1)]  # a batch has a tensor
    return capture(model, lambda m, b: weighted(function(*m.held, *b[:-1])), batch), model


def run(program: Program, count: int) -> list[Tensor | None]:
    """The loss and the gradients of `count` parameters."""
    feed = {**program.values, **program.example}
    torch.manual_seed(7)
    with torch.no_grad():
        step = fx.Interpreter(fx.GraphModule(nn.Module(), program.graph))
        made = step.run(*(feed[name] for name in program.placeholders))
    found = {o.target if o.kind == "gradient" else o.kind: v for o, v in zip(program.outputs, made, strict=True)}
    names = {p.names[0]: p.node for p in program.parameters}
    return [found["loss"], *(found.get(names[f"held.{i}"]) for i in range(count))]


def eager(function: Function, trained: Sequence[Tensor], given: Sequence[Tensor]) -> list[Tensor | None]:
    """The same of eager PyTorch."""
    leaves = [t.clone().requires_grad_() for t in trained]
    torch.manual_seed(7)
    loss = weighted(function(*leaves, *given))
    loss.backward()
    return [loss.detach(), *(t.grad for t in leaves)]


def differences(function: Function, trained: Sequence[Tensor], given: Sequence[Tensor] = ()) -> list[str]:
    """In words, what of the captured step is not eager's."""
    expected = eager(function, trained, given)
    found = run(captured(function, trained, given)[0], len(trained))
    names = ["loss", *(f"gradient {i}" for i in range(len(trained)))]
    limit = max(TOLERANCE[t.dtype] for t in trained)
    return [f"{n} {why}" for n, e, f in zip(names, expected, found, strict=True) if (why := _differs(e, f, limit))]


def _differs(expected: Tensor | None, found: Tensor | None, limit: float) -> str:
    if expected is None or found is None:
        other = found if expected is None else expected
        return "" if other is None or not other.any() else f"is {found}, not {expected}"
    if (found.dtype, found.shape) != (expected.dtype, expected.shape):
        return f"is {found.dtype}{list(found.shape)}, not {expected.dtype}{list(expected.shape)}"
    finite = expected.isfinite()
    if not torch.equal(found[~finite].nan_to_num(7.0), expected[~finite].nan_to_num(7.0)):
        return f"is {found}, not {expected}"
    off = (found[finite].double() - expected[finite].double()).norm()
    return "" if bool(off <= limit * expected[finite].double().norm() + 1e-12) else f"is {found}, not {expected}"

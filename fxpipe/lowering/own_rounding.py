"""What a step in float64 says of a difference from eager PyTorch: whether float32's own rounding is as large.

If the terms of a sum cancel, as in the gradient of a bias before a norm, eager's float32 value is only rounding:
another order of summation gives another value, and neither is wrong.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.errors import listed
from fxpipe.lowering.agreement import Agreement, Step
from fxpipe.stages.compare import SLACK
from fxpipe.task.batch import Batch

THE_LOSS = "the loss"

ALIKE = 1e-2
"""How far eager's gradients, all together, may be from those in float64: beyond it, that is another step, such as one
that draws other random numbers, and says nothing of rounding."""

LARGEST_OWN = 0.1
"""The same for one gradient, relative as in `compare`: a real difference of this size would not be seen."""


def without_rounding(
    agreement: Agreement, found: Step, eager: Step, limit: float, floor: float, exact: Callable[[], Step | None]
) -> Agreement:
    """The agreement without the errors beyond `limit` that float32's own rounding explains; `rounding` has those.

    An error is explained if `found` is at most `SLACK` times as far from the step in float64 as eager's own float32
    step is. Buffers and metrics are left as they are.

    Args:
        agreement: of `found` with `eager`, by `compare` with this `floor`.
        limit: what counts as right without more ado.
        exact: makes eager PyTorch's step in float64, or None if that cannot be; not called where nothing is off.
    """
    wrong = [name for name, error in agreement.gradients.items() if limit < error < math.inf]
    off = limit < agreement.loss < math.inf
    if not wrong and not off:
        return agreement
    true = exact()
    if true is None or not _is_the_same_step(eager, true):
        return agreement
    least = floor * max((_norm(g) for g in true.gradients.values()), default=0.0)
    explained = {}
    for name in wrong:
        own = _distance(eager.gradients[name], true.gradients[name])
        small = own <= LARGEST_OWN * max(_norm(true.gradients[name]), least)
        if small and _distance(found.gradients[name], true.gradients[name]) <= SLACK * own:
            explained[name] = agreement.gradients[name]
    gradients = agreement.gradients | dict.fromkeys(explained, 0.0)
    loss = agreement.loss
    if off and _distance(found.loss, true.loss) <= SLACK * _distance(eager.loss, true.loss):
        explained[THE_LOSS], loss = loss, 0.0
    return replace(agreement, loss=loss, gradients=gradients, rounding=explained)


def rounding_text(agreement: Agreement) -> str:
    """What float32's rounding explains, in words; '' if that is nothing."""
    if not agreement.rounding:
        return ""
    parts = [
        f"{name if name == THE_LOSS else f'the gradient of {name}'} ({error:.1e})"
        for name, error in sorted(agreement.rounding.items(), key=lambda item: -item[1])
    ]
    return (
        f"no more than float32's own rounding is what differs from eager PyTorch in {listed(parts, 4)}: eager's own "
        "float32 values are about as far from those in float64"
    )


def in_float64(step: Callable[[nn.Module, Any], Step], model: nn.Module, batch: Any) -> Step | None:
    """A step of eager PyTorch on a copy of the model and the batch in float64; None if there is none.

    Args:
        step: of a model and a batch, which may fail: a model may name float32, or use an operator without float64.
    """
    if all(t.dtype != torch.float32 for t in model.parameters()):
        return None
    try:
        wide = copy.deepcopy(model).double()
        precise = Batch.of(batch).each(lambda tensor: tensor.double() if tensor.dtype == torch.float32 else tensor)
        with _default_float64():
            return step(wide, precise.given)
    except Exception:  # the user's code, and copies of the user's objects
        return None


@contextmanager
def _default_float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _is_the_same_step(eager: Step, true: Step) -> bool:
    """Whether two steps are one, but for rounding."""
    if eager.gradients.keys() != true.gradients.keys():
        return False
    if _distance(eager.loss, true.loss) > ALIKE * max(_norm(true.loss), 1e-6):
        return False
    off = math.hypot(*(_distance(g, true.gradients[n]) for n, g in eager.gradients.items()))
    return off <= ALIKE * math.hypot(*(_norm(g) for g in true.gradients.values()))  # False where one is NaN


def _norm(value: Tensor) -> float:
    return value.detach().double().norm().item()


def _distance(one: Tensor, other: Tensor) -> float:
    return math.inf if one.shape != other.shape else _norm(one.detach().double() - other.detach().double())

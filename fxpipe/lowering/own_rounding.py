"""Finds with steps in float64 whether a difference from eager PyTorch is rounding, for any dtype.

If the terms of a sum cancel, as in the gradient of a bias before a norm, eager's float32 value is only rounding:
another order of summation gives another value, and neither is wrong. In bfloat16 all values are like this, to some
digits.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor, nn

from fxpipe.errors import listed
from fxpipe.lowering.agreement import Agreement, Step, compare
from fxpipe.stages.compare import SLACK
from fxpipe.stages.pure_function import NARROW, all_float64, wide
from fxpipe.task.batch import Batch
from fxpipe.task.bf16_parameters import narrow

THE_LOSS = "the loss"

ALIKE = 1e-2
"""How far all of eager's gradients together may be from those in float64. If they are farther, float64 computes another
step, such as one with other random numbers, and says nothing about rounding."""

LARGEST_OWN = 0.1
"""The same for one gradient, relative as in `compare`: a real difference of this size would not be seen."""


class Exact(NamedTuple):
    """One step in float64, by eager PyTorch and by the stages.

    Attributes:
        found: None if the stages cannot run it, or have not yet.
    """

    eager: Step
    found: Step | None = None


def without_rounding(
    agreement: Agreement, found: Step, eager: Step, limit: float, floor: float, exact: Callable[[], Exact | None]
) -> Agreement:
    """The agreement without errors above `limit` that rounding explains: `rounding` has them. `cause` says why it does
    not explain the others.

    An error is explained if `found` is at most `SLACK` times as far from eager's step in float64 as eager's own step
    is, in this value or, relative to their norms, in all gradients together. If the stages give the same step in
    float64, eager's own step may be any distance from it; else at most `ALIKE` and `LARGEST_OWN`, since a real
    difference could hide in a larger one. Buffers and metrics stay as they are.

    Args:
        agreement: of `found` with `eager`, by `compare` with this `floor`.
        limit: what counts as right.
        exact: makes the step in float64, or None if that is impossible; called only if an error is above `limit`.
    """
    wrong = [name for name, error in agreement.gradients.items() if limit < error < math.inf]
    off = limit < agreement.loss < math.inf
    if not wrong and not off:
        return agreement
    made = exact()
    if made is None:
        return replace(agreement, cause=_NO_FLOAT64)
    true, proved = made.eager, False
    if made.found is not None:
        precise = replace(compare(made.found, true, floor), buffers={})  # eager changes them once for the whole batch
        proved = precise.largest <= limit
        if not proved:
            where, error = precise.worst
            return replace(agreement, cause=_IN_FLOAT64_TOO.format(where, error))
    if not _comparable(eager, true) or not (proved or _is_the_same_step(eager, true)):
        return replace(agreement, cause=_OTHER_DRAWS)
    least = floor * max((_norm(g) for g in true.gradients.values()), default=0.0)
    own = {name: _distance(g, true.gradients[name]) for name, g in eager.gradients.items()}
    norms = {name: _norm(g) for name, g in true.gradients.items()}
    usual = math.hypot(*own.values()) / max(math.hypot(*norms.values()), 1e-30) if proved else 0.0
    explained = {}
    for name in wrong:
        allowed = max(own[name], usual * max(norms[name], least))
        small = proved or own[name] <= LARGEST_OWN * max(norms[name], least)
        if small and _distance(found.gradients[name], true.gradients[name]) <= SLACK * allowed:
            explained[name] = agreement.gradients[name]
    gradients = agreement.gradients | dict.fromkeys(explained, 0.0)
    loss = agreement.loss
    allowed = max(_distance(eager.loss, true.loss), usual * _norm(true.loss))
    if off and _distance(found.loss, true.loss) <= SLACK * allowed:
        explained[THE_LOSS], loss = loss, 0.0
    return replace(agreement, loss=loss, gradients=gradients, rounding=explained, cause=_ROUGHER if proved else "")


_NO_FLOAT64 = "eager PyTorch cannot make this step in float64, so fxpipe cannot distinguish rounding from a fault"
_IN_FLOAT64_TOO = "in float64, where nothing is rounded, {} differs by {:.1e} as well: this is not rounding"
_OTHER_DRAWS = "eager PyTorch's step in float64 is another one, so fxpipe cannot distinguish rounding from a fault"
_ROUGHER = (
    f"in float64 both are equal, but the stages' values are rounded more than {SLACK} times as roughly as eager's"
)


def rounding_text(agreement: Agreement) -> str:
    """What rounding explains, in words; '' if nothing."""
    if not agreement.rounding:
        return ""
    parts = [
        f"{name if name == THE_LOSS else f'the gradient of {name}'} ({error:.1e})"
        for name, error in sorted(agreement.rounding.items(), key=lambda item: -item[1])
    ]
    return (
        f"only rounding differs from eager PyTorch in {listed(parts, 4)}: eager's own values are about "
        "as far from those in float64"
    )


def in_float64(
    step: Callable[[nn.Module, Any], Step], model: nn.Module, batch: Any, params: str | None = None
) -> Step | None:
    """A step of eager PyTorch on a copy of the model and the batch in float64; None if there is none.

    Args:
        step: of a model and a batch, which may fail: a model may name float32, or use an operator without float64.
        params: 'bf16' takes the values of what is not trained as a run has them, in bfloat16.
    """
    if all(t.dtype not in NARROW for t in model.parameters()):
        return None
    try:
        made = copy.deepcopy(model)
        if params is not None:
            narrow(made, trained=False)
        made = made.double()
        precise = Batch.of(batch).each(wide)
        with all_float64():
            return step(made, precise.given)
    except Exception:  # the user's code, and copies of the user's objects
        return None


def _comparable(eager: Step, true: Step) -> bool:
    if eager.gradients.keys() != true.gradients.keys():
        return False
    return all(math.isfinite(_distance(g, true.gradients[n])) for n, g in eager.gradients.items())


def _is_the_same_step(eager: Step, true: Step) -> bool:
    """Whether two steps are equal except for float32's rounding."""
    if _distance(eager.loss, true.loss) > ALIKE * max(_norm(true.loss), 1e-6):
        return False
    off = math.hypot(*(_distance(g, true.gradients[n]) for n, g in eager.gradients.items()))
    return off <= ALIKE * math.hypot(*(_norm(g) for g in true.gradients.values()))  # False where one is NaN


def _norm(value: Tensor) -> float:
    return value.detach().double().norm().item()


def _distance(one: Tensor, other: Tensor) -> float:
    return math.inf if one.shape != other.shape else _norm(one.detach().double() - other.detach().double())

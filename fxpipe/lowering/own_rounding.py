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

from torch import nn

from fxpipe.errors import listed
from fxpipe.lowering.agreement import Agreement, Step, agreement_of
from fxpipe.stages.compare import AMPLIFIED, EXACT, SLACK, distance, error_of_all, norm, relative_error
from fxpipe.stages.pure_function import NARROW, all_float64, wide
from fxpipe.task.batch import Batch
from fxpipe.task.bf16_parameters import narrow

THE_LOSS = "the loss"

LARGEST_OWN = 0.1
"""How far eager's own gradient may be from that in float64, relatively, where the stages' step in float64 is unknown: a
real difference of this size would not be seen."""


class Exact(NamedTuple):
    """One step in float64, by eager PyTorch and by the stages; None if these cannot run it, or have not yet."""

    eager: Step
    found: Step | None = None


def without_rounding(
    agreement: Agreement, found: Step, eager: Step, limit: float, floor: float, exact: Callable[[], Exact | None]
) -> Agreement:
    """The agreement without errors above `limit` that rounding explains: `rounding` has them. `cause` says why it does
    not explain the others.

    An error is explained if `found` is at most `SLACK` times as far from eager's step in float64 as eager's own step
    is, in this value or, relative to their norms, in all gradients together. If the stages give the same value in
    float64, eager's own may be any distance from it; else at most `AMPLIFIED` and `LARGEST_OWN`, since a real
    difference could hide in a larger one. Buffers and metrics stay as they are.

    Args:
        agreement: of `found` with `eager`, by `agreement_of` with this `floor`.
        limit: what counts as right; in float64 it is `EXACT`.
        exact: makes the step in float64, or None if that is impossible; called only if an error is above `limit`.
    """
    errors = {THE_LOSS: agreement.loss, **agreement.gradients}
    if not any(limit < error < math.inf for error in errors.values()):
        return agreement
    steps = exact()
    if steps is None:
        return replace(agreement, cause=_NO_FLOAT64)
    true, proved = steps.eager, steps.found is not None
    same, cause = _is_the_same_step(eager, true), _ROUGHER if proved else ""
    faults: dict[str, float] = {}
    if steps.found is not None:
        precise = replace(agreement_of(steps.found, true, floor), buffers={})  # eager changes them once a batch
        faults = {n: e for n, e in {THE_LOSS: precise.loss, **precise.gradients}.items() if not e <= EXACT}
        if faults:
            cause = (_IN_FLOAT64_TOO if same else _NO_VALUE).format(*precise.worst)
            errors |= {name: max(error, errors.get(name, 0.0)) for name, error in faults.items()}
    explained: dict[str, float] = {}
    if _comparable(eager, true) if proved else same:
        values = [{THE_LOSS: step.loss, **step.gradients} for step in (true, eager, found)]
        least = floor * max(map(norm, true.gradients.values()), default=0.0)
        usual = error_of_all(eager.gradients, true.gradients) if proved else 0.0
        for name in [n for n, error in errors.items() if limit < error < math.inf and n not in faults]:
            exactly, eagerly, emitted = (step[name] for step in values)
            size, own = max(norm(exactly), least), distance(eagerly, exactly)
            allowed = SLACK * max(own, usual * size)
            if (proved or own <= LARGEST_OWN * size) and distance(emitted, exactly) <= allowed:
                explained[name] = errors[name]
    elif not faults:
        cause = _OTHER_DRAWS
    errors |= dict.fromkeys(explained, 0.0)
    return replace(agreement, loss=errors.pop(THE_LOSS), gradients=errors, rounding=explained, cause=cause)


_NO_FLOAT64 = "eager PyTorch cannot make this step in float64, so fxpipe cannot distinguish rounding from a fault"
_IN_FLOAT64_TOO = "in float64, where nothing is rounded, {} differs by {:.1e} as well: this is not rounding"
_NO_VALUE = (
    "in float64 {} differs by {:.1e} as well, and eager PyTorch's own step is another one there: the step may be only "
    "rounding, as where it divides by weights that add up to 0, or have a fault"
)
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

    The step may fail: a model may name float32, or use an operator without float64. With `params`, what is not trained
    has the values of a run, in bfloat16.
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
    """Whether both have the same gradients, and these and their differences are finite."""
    if eager.gradients.keys() != true.gradients.keys():
        return False
    return all(math.isfinite(distance(g, true.gradients[n])) for n, g in eager.gradients.items())


def _is_the_same_step(eager: Step, true: Step) -> bool:
    """Whether two steps are equal except for rounding. If not, float64 computes another step, such as one with other
    random numbers, and says nothing about rounding."""
    if not _comparable(eager, true) or not relative_error(eager.loss, true.loss, 1e-6) <= AMPLIFIED:
        return False
    return error_of_all(eager.gradients, true.gradients) <= AMPLIFIED

"""What a build makes of its microbatches: where the batch is cut, and what their losses are of the whole batch's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fxpipe.observe.record import samples_of
from fxpipe.plan.spec import Plan

FEW_SAMPLES = 8
"""With 4 images, batch norm cost half a point to two in benchmarks/accuracy, with 2 two to four."""


def microbatch_facts(plan: Plan) -> dict[str, Any] | None:
    """Plain data; None for a build of whole batches."""
    if plan.microbatches == 1:
        return None
    return {
        "loss": plan.loss_of_microbatches,
        "totals": list(plan.totals.metrics) if plan.totals else [],
        "weighed": plan.loss_weight,
        "differs": plan.differs_from_whole,
        "batch_norm": plan.batch_norm,
        "cut": {leaf.name: leaf.dim for leaf in plan.given if leaf.tensor is not None},
    }


def microbatch_lines(plan: Plan) -> Iterator[str]:
    """The same in words, for a build of microbatches; without what every user expects."""
    facts = microbatch_facts(plan)
    if facts is None:
        return
    whole = [name for name, dim in facts["cut"].items() if dim is None]
    along = {name: dim for name, dim in facts["cut"].items() if dim}
    if whole or along:
        cut = [f"{name} is cut along dimension {dim}" for name, dim in along.items()]
        cut += [f"every microbatch gets all of {', '.join(whole)}"] if whole else []
        yield f"batch: {'; '.join(cut)}"
    if facts["batch_norm"]:
        each = samples_of(plan) // plan.microbatches
        advice = "; larger minibatches or group norm train better than so few" if each < FEW_SAMPLES else ""
        yield f"batch norm: normalises each microbatch by itself, {each} samples ({facts['batch_norm']}){advice}"
    if facts["differs"]:
        yield f"loss: not the whole batch's, since {facts['differs']}"
    elif facts["weighed"]:
        yield "loss: the whole batch's, by the weights that loss_weight(batch) gives the microbatches"
    elif facts["totals"]:
        yield "loss: the whole batch's; it divides by sums over the whole batch, which worker 0 makes (totals.py)"
    elif facts["loss"] == "sum":
        yield "loss: the whole batch's, the sum of the microbatches' losses"

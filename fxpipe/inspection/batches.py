"""How a build treats batches: how it cuts them, what their loss is, which shapes they have, and how it pads them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fxpipe.observe.rates import samples_of
from fxpipe.plan.spec import LeafSpec, Plan
from fxpipe.task.batch import said

FEW_SAMPLES = 8
"""With fewer, batch norm costs accuracy: in benchmarks/accuracy 0.5 to 2 points with 4 images, 2 to 4 with 2."""


def microbatch_facts(plan: Plan) -> dict[str, Any] | None:
    """How batches are cut into microbatches, and what their losses add up to; None for one microbatch."""
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
    """`microbatch_facts` in words, without what every user expects."""
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
        yield "loss: the whole batch's; worker 0 sums its divisor, such as the number of labels (totals.py)"
    elif facts["loss"] == "sum":
        yield "loss: the whole batch's, the sum of the microbatches' losses"


def shape_facts(plan: Plan) -> list[dict[str, Any]]:
    """For each shape: its files, and the leaves in which microbatches of other shapes differ, each as text."""
    plans = plan.of_shapes
    texts = [{leaf.name: _text(leaf) for leaf in of_shape.given} for of_shape in plans]
    names = dict.fromkeys(name for text in texts for name in text)
    differing = [name for name in names if len({text.get(name) for text in texts}) > 1]
    return [
        {
            "files": [stage.file for stage in of_shape.stages],
            "batch": {name: text[name] for name in differing if name in text},
        }
        for of_shape, text in zip(plans, texts, strict=True)
    ]


def shape_lines(plan: Plan) -> Iterator[str]:
    """Shapes and padding in words; nothing for a build of one shape without padding."""
    if plan.padding:
        rules = ", ".join(f"{rule.leaf} with {rule.value}" for rule in plan.padding)
        yield f"padding: to multiples of {plan.padding[0].multiple}: {rules}"
    if not plan.shapes:
        return
    for number, facts in enumerate(shape_facts(plan)):
        batch = ", ".join(f"{name} {text}" for name, text in facts["batch"].items())
        yield f"shape {number}: {batch or 'another structure'} in {facts['files'][0]}, …"


def _text(leaf: LeafSpec) -> str:
    if not leaf.read:
        return "not read"
    return said(leaf.constant) if leaf.tensor is None else f"{leaf.tensor.dtype}{list(leaf.tensor.shape)}"

"""The shapes of batches that a build has stages for, and how batches are padded to them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from fxpipe.plan.spec import LeafSpec, Plan
from fxpipe.task.batch import said


def shape_facts(plan: Plan) -> list[dict[str, Any]]:
    """For each shape its files, and what distinguishes its microbatches: sizes of tensors, or constants, by leaf."""
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


def padding_facts(plan: Plan) -> list[dict[str, Any]]:
    """Which leaves get what appended, along which dimensions, to multiples of what."""
    return [dataclasses.asdict(rule) for rule in plan.padding]


def shape_lines(plan: Plan) -> Iterator[str]:
    """The same in words; nothing for a build of one shape without padding."""
    if plan.padding:
        rules = ", ".join(f"{rule.leaf} with {rule.value}" for rule in plan.padding)
        yield f"padding: to multiples of {plan.padding[0].multiple}: {rules}"
    if not plan.shapes:
        return
    for number, facts in enumerate(shape_facts(plan)):
        batch = ", ".join(f"{name} {text}" for name, text in facts["batch"].items())
        yield f"shape {number}: {batch or 'another structure'} in {facts['files'][0]}, …"


def _text(leaf: LeafSpec) -> str:
    return said(leaf.constant) if leaf.tensor is None else f"{leaf.tensor.dtype}{list(leaf.tensor.shape)}"

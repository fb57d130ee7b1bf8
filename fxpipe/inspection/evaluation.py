"""How a build evaluates in its pipeline."""

from __future__ import annotations

from typing import Any

from fxpipe.plan.spec import Plan
from fxpipe.runtime.wires.addresses import moves


def evaluation_facts(plan: Plan) -> dict[str, Any] | None:
    """The metrics, and each shape of batch with its files; or the reason why the pipeline does not evaluate.

    None without validation hooks. `moved_bytes` of weights and buffers go to workers that do not hold them before the
    first batch of an evaluation; `crossing_bytes` of values cross with every batch.
    """
    if not plan.evaluations and not plan.not_evaluated:
        return None
    return {
        "metrics": list(dict.fromkeys(n for e in plan.evaluations for n in (e.numbers if e.of_all else e.metrics))),
        "shapes": [
            {
                "files": [stage.file for stage in evaluation.stages],
                "batch": {leaf.name: list(leaf.tensor.shape) for leaf in evaluation.batch if leaf.tensor},
                "crossing_bytes": sum(edge.tensor.bytes for edge in evaluation.edges),
            }
            for evaluation in plan.evaluations
        ],
        "moved_bytes": sum(move.spec.bytes for move in moves(plan)),
        "reason": plan.not_evaluated or None,
    }


def evaluation_text(facts: dict[str, Any] | None) -> str:
    """One line: the metrics and their files, or why the pipeline does not evaluate; empty without validation hooks."""
    if facts is None:
        return ""
    if facts["reason"]:
        return f"evaluation: of the final weights only, in one process: {facts['reason']}"
    shapes = facts["shapes"]
    many = f", and for {len(shapes) - 1} more shapes of batches" if len(shapes) > 2 else ""
    many = ", and for one more shape of batches" if len(shapes) == 2 else many
    return f"evaluation: {', '.join(facts['metrics'])} in {', '.join(shapes[0]['files'])}{many}"

"""What a build says of its batches, codecs, evaluations and stale weights: facts, and their sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fxpipe.codecs import CODECS
from fxpipe.codecs.packs import outer_bytes
from fxpipe.inspection.table import plural
from fxpipe.observe.rates import samples_of
from fxpipe.plan.cost_records import EngineTime
from fxpipe.plan.plan import Plan
from fxpipe.plan.spec import LeafSpec
from fxpipe.planner.costs_file import BuildCosts
from fxpipe.planner.quantity import size
from fxpipe.planner.separate_cuts import moved_text
from fxpipe.policy.base import Policy
from fxpipe.policy.costs import delay
from fxpipe.runtime.wires.addresses import moves
from fxpipe.schedule.versions import Versions
from fxpipe.task.batch import said

FEW_SAMPLES = 8
"""With fewer, batch norm costs accuracy: in benchmarks/accuracy 0.5 to 2 points with 4 images, 2 to 4 with 2."""


def cuts_text(kind: str, rows: Sequence[dict[str, Any]], refused: str) -> str:
    """`bidirectional, 0.980 of ideal for 25.3 GiB a minibatch more between workers (same 0.956)`.

    Args:
        rows: as `partition_rows`; with more than one, `refused` says why faster ones were not taken.
    """
    if not rows:
        return kind
    (chosen,), others = ([row for row in rows if row["chosen"] is took] for took in (True, False))
    more = chosen["moved_bytes"] - next((row["moved_bytes"] for row in others), chosen["moved_bytes"])
    text = f"{kind}, {chosen['efficiency']:.3f} of ideal{moved_text(more) if kind != 'same' else ''}"
    if not others:
        return text
    for row in others:
        text += f" ({row['mode']} {row['efficiency']:.3f}"
        slower = kind != "same" and row["simulated_ms"]
        text += f", {row['simulated_ms'] / chosen['simulated_ms'] - 1:.1%} slower)" if slower else ")"
    return f"{text}; {refused}" if refused else text


def microbatch_facts(plan: Plan) -> dict[str, Any] | None:
    """How batches are cut into microbatches, and what their losses add up to; None for one microbatch."""
    if plan.microbatches == 1:
        return None
    return {
        "loss": plan.loss.of_microbatches,
        "totals": list(plan.step.totals.metrics) if plan.step.totals else [],
        "weighed": plan.loss.weighted,
        "differs": plan.step.differs_from_whole,
        "batch_norm": plan.loss.batch_norm,
        "cut": {leaf.name: leaf.dim for leaf in plan.step.given if leaf.tensor is not None},
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
        samples = samples_of(plan) // plan.microbatches
        advice = "; larger minibatches or group norm train better than so few" if samples < FEW_SAMPLES else ""
        yield f"batch norm: normalises each microbatch by itself, {samples} samples ({facts['batch_norm']}){advice}"
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
    texts = [{leaf.name: _text(leaf) for leaf in of_shape.step.given} for of_shape in plans]
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
    if len(plan.steps) == 1:
        return
    for number, facts in enumerate(shape_facts(plan)):
        batch = ", ".join(f"{name} {text}" for name, text in facts["batch"].items())
        yield f"shape {number}: {batch or 'another structure'} in {facts['files'][0]}, …"


def _text(leaf: LeafSpec) -> str:
    if not leaf.read:
        return "not read"
    return said(leaf.constant) if leaf.tensor is None else f"{leaf.tensor.dtype}{list(leaf.tensor.shape)}"


def codec_facts(plan: Plan, costs: BuildCosts | None = None) -> dict[str, Any] | None:
    """The packed edges of the first shape, and a minibatch's bytes and seconds; None for a build without codecs."""
    packed = [edge for edge in plan.edges if edge.codec]
    if not packed and not plan.weights_codec:
        return None
    counts: dict[str, int] = {}
    for edge in packed:
        counts[edge.codec] = counts.get(edge.codec, 0) + 1
    edges = [edge for edge in plan.edges if edge.kind != "token"]
    readers = {(p.owner, worker) for p in plan.parameters if p.trained for worker, _ in p.readers if worker != p.owner}
    return {
        "edges": counts,
        "of_edges": len(edges),
        "weights": plan.weights_codec if readers else "",
        "bytes": plan.own_microbatches * sum(edge.sent.bytes for edge in edges),
        "plain_bytes": plan.own_microbatches * sum(edge.tensor.bytes for edge in edges),
        "ways": sorted({f"{edge.kind} {edge.src} → {edge.dst}" for edge in packed}),
        "plain_seconds": None if costs is None else costs.without_codecs,
        "seconds": None if costs is None else costs.with_codecs,
    }


def codec_text(facts: dict[str, Any]) -> str:
    """One line: `codecs: int8 on 4 of 6 edges, …`."""
    counts = [f"{name} on {count}" for name, count in facts["edges"].items()]
    if counts:
        counts[-1] += f" of {facts['of_edges']} edges"
    share = facts["bytes"] / facts["plain_bytes"] if facts["plain_bytes"] else 1.0
    text = f"codecs: {', '.join(counts) or 'no edge'}; values take {share:.2f} of their bytes"
    return text + (f"; copies of weights as {facts['weights']} differences" if facts["weights"] else "")


def outer_facts(plan: Plan) -> dict[str, float] | None:
    """The bytes that all workers of a replica send in an outer step; None if there are none, or if only the model file
    knows their codec."""
    if plan.outer is None or (plan.outer.codec and plan.outer.codec.partition(":")[0] not in CODECS):
        return None
    return {
        name: sum(outer_bytes(plan, worker, text) for worker in range(plan.workers))
        for name, text in (("bytes", plan.outer.codec), ("plain_bytes", ""))
    }


def outer_text(facts: dict[str, float]) -> str:
    """One line: `in an outer step each replica sends 1.2 MiB, …`."""
    text = f"in an outer step each replica sends {size(facts['bytes'])}"
    if not 0 < facts["bytes"] < facts["plain_bytes"]:
        return text
    return f"{text}, {facts['plain_bytes'] / facts['bytes']:.0f} times fewer bytes than without a codec"


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


@dataclass(frozen=True)
class Staleness:
    """How stale the weights are under a schedule and a policy."""

    updates: int  # how many updates a forward misses at most, on any worker and in any microbatch
    predicted: bool  # whether some forwards see predictions, which start from these weights
    repaired: str  # how updates correct for late gradients: 'error feedback', or ''

    def __str__(self) -> str:
        if not self.updates:
            return "no weights are stale"
        how = ["predicted"] if self.predicted else []
        how += [f"with {self.repaired}"] if self.repaired else []
        return f"weights are at most {plural(self.updates, 'update')} old{''.join(f', {way}' for way in how)}"


def staleness_of(policy: Policy, versions: Versions) -> Staleness:
    """The staleness under a policy and the versions of a schedule, in steady state."""
    updates = max(delay(policy, versions, worker) for worker in range(versions.schedule.workers))
    return Staleness(updates, policy.predicts, " and ".join(repair.what for repair in policy.repairs))


def engines_left_out(times: Sequence[EngineTime]) -> Iterator[str]:
    """Why engines were left out: a line for each reason, with the parts of stages where it does not hold for all."""
    reasons: dict[str, list[str]] = {}
    for time in times:
        if time.reason:
            reasons.setdefault(f"{time.engine} left out: {time.reason}", []).append(time.part)
    count = len({time.part for time in times})
    for reason, parts in reasons.items():
        yield reason if len(parts) == count else f"{', '.join(parts)}: {reason}"

"""What codecs pack on edges and in outer steps, how many bytes travel, and what that gains."""

from __future__ import annotations

from typing import Any

from fxpipe.codecs import CODECS
from fxpipe.codecs.outer_message import outer_bytes
from fxpipe.plan.spec import Plan
from fxpipe.planner.costs_file import BuildCosts
from fxpipe.planner.quantity import size


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

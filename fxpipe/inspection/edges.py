"""The edges: every value that crosses workers, and the weights that cross after every update."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fxpipe.inspection.subject import Subject
from fxpipe.passes.analysis.summary import Traffic
from fxpipe.plan.spec import PHASES, ParameterSpec


def edge_rows(subject: Subject, traffic: Traffic | None = None) -> list[dict[str, Any]]:
    """A row for each edge of the plan, in its order; then one for each owner of weights and reader of copies.

    Args:
        traffic: knows how many versions of the weights are sent; without it, each weight counts once.
    """
    sends = subject.nodes.sends
    rows = []
    for edge in subject.plan.edges:
        node = subject.nodes.rows[sends[edge.name]] if edge.name in sends else None
        rows.append(
            {
                "name": edge.name,
                "kind": edge.kind,
                "shape": list(edge.tensor.shape),
                "dtype": edge.tensor.dtype,
                "bytes": edge.sent.bytes,
                "codec": edge.codec,
                "plain_bytes": edge.tensor.bytes,
                "src": edge.src,
                "src_phase": edge.src_phase,
                "dst": edge.dst,
                "dst_phase": edge.dst_phase,
                "module": node.module if node and node.module else None,
                "source": node.source if node else None,
                "names": [],
            }
        )
    return [*rows, *_weights(subject, traffic)]


def _weights(subject: Subject, traffic: Traffic | None) -> Iterator[dict[str, Any]]:
    found: dict[tuple[int, int], dict[str, ParameterSpec]] = {}
    phases: dict[tuple[int, int], set[str]] = {}
    for parameter in subject.plan.parameters:
        for reader, phase in parameter.readers if parameter.trained else ():
            if reader != parameter.owner:
                found.setdefault((parameter.owner, reader), {})[parameter.name] = parameter
                phases.setdefault((parameter.owner, reader), set()).add(phase)
    for (owner, reader), parameters in sorted(found.items()):
        once = sum(p.tensor.bytes for p in parameters.values())
        dtypes = {p.tensor.dtype for p in parameters.values()}
        yield {
            "name": f"weights of worker {owner}",
            "kind": "weights",
            "shape": [],
            "dtype": " ".join(sorted(dtypes)),
            "bytes": traffic.weights[owner, reader] if traffic else once,
            "codec": subject.plan.weights_codec,
            "plain_bytes": once,
            "src": owner,
            "src_phase": "update",
            "dst": reader,
            "dst_phase": "".join(phase for phase in PHASES if phase in phases[owner, reader]),
            "module": None,
            "source": None,
            "names": list(parameters),
        }

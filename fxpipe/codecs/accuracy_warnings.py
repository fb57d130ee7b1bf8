"""What a build's codecs lost in the accuracy study: warns of large losses, and notes codecs that were not studied."""

from __future__ import annotations

from collections.abc import Collection

from fxpipe.codecs import codec
from fxpipe.codecs.accuracy import HARMLESS, KINDS, STUDIED, keeps_the_result, worst
from fxpipe.codecs.encoding import Encoding
from fxpipe.errors import listed
from fxpipe.plan.plan import Plan

Used = Collection[tuple[str, str]]
"""Kinds of edges, with their lossy codecs."""


def used_by(plan: Plan) -> Used:
    """What a plan packs with lossy codecs; 'weights' for copies of weights, if there are any."""
    uses: list[tuple[str, str]] = [(edge.kind, edge.codec) for edge in plan.edges]
    if any(p.trained and any(worker != p.owner for worker, _ in p.readers) for p in plan.parameters):
        uses.append(("weights", plan.weights_codec))
    return tuple(dict.fromkeys((kind, text) for kind, text in uses if text and not codec(text).lossless))


def warning(used: Used) -> str | None:
    """One sentence for codecs that lost more than a standard deviation in the study, else None."""
    lost = [text for text in STUDIED if not keeps_the_result(text) and any(_studied_as(*use) == text for use in used)]
    if not lost:
        return None
    texts = []
    for text in lost:
        workload, share, deviation = worst(text)
        texts.append(
            f"codec {text} lost {share:.1%} of the result without a codec on {workload}, where a standard deviation is "
            f"{deviation:.1%}"
        )
    better = f"; {' and '.join(HARMLESS)} lost less than one" if HARMLESS else ""
    return f"{'; '.join(texts)} (benchmarks/accuracy){better}"


def not_studied(used: Used) -> str | None:
    """One sentence on codecs that were not studied, else None."""
    kinds: dict[str, list[str]] = {}
    for kind, text in used:
        if _studied_as(kind, text) is None:
            kinds.setdefault(text, []).append(kind)
    if not kinds:
        return None
    named = listed([f"{text} for {' and '.join(those)}" for text, those in kinds.items()])
    return f"the loss of accuracy was not studied (benchmarks/accuracy): {named}"


def _studied_as(kind: str, text: str) -> str | None:
    """The studied codec that packs edges of this kind in the same way."""
    if kind not in KINDS:
        return None
    if text in STUDIED and getattr(Encoding.parse(text), kind) == text:
        return text
    return None

"""What the processes of a run do before its first step is over, in words."""

from __future__ import annotations

from collections.abc import Sequence

from fxpipe.errors import listed
from fxpipe.observe.pulse import Signs

PAUSE = 5.0
"""Seconds between two lines about it in a log."""


def starting_text(signs: Sequence[Signs], noun: str) -> str:
    """`loading the build, the model and the data`, or of several `worker 0: reading the first batch; …`."""
    found: dict[str, list[str]] = {}
    for place, sign in enumerate(signs):
        found.setdefault(_words(sign), []).append(str(place))
    if len(found) == 1:
        return next(iter(found))
    return "; ".join(
        f"{noun}{'' if len(places) == 1 else 'es' if noun[-1] == 's' else 's'} {listed(places, 8)}: {words}"
        for words, places in found.items()
    )


def _words(sign: Signs) -> str:
    match sign.phase:
        case "starting" | "importing":
            return "importing torch"
        case "loading":
            return "loading the build, the model and the data"
        case "training":
            told = {"data": "reading the first batch", "wait": "waiting for the first batch"}
            return told.get(sign.doing or "", "computing the first batch")
        case phase:
            return phase

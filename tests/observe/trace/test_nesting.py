"""Of nested events the innermost counts."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from traces import busy, written

from fxpipe.observe.trace import Event
from fxpipe.observe.trace.reader import flatten, read_trace


def test_the_innermost_counts(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path / "trace.json"))
    assert [(p.worker, p.kind, p.begin, p.end) for p in flatten(trace.events)] == [
        (0, "data", 0, 500),
        (0, "F", 500, 8_000),
        (0, "send", 8_000, 9_000),
        (0, "F", 9_000, 10_000),
        (0, "wait", 10_000, 40_000),
        (0, "B", 40_000, 55_000),
        (0, "update", 55_000, 60_000),
        (1, "F", 100, 150),
        (1, "receive", 150, 200),
        (1, "wait", 200, 9_500),
        (1, "receive", 9_500, 9_600),
        (1, "F", 9_600, 20_000),
        (1, "B", 20_000, 38_000),
        (1, "send", 38_000, 39_000),
        (1, "B", 39_000, 50_000),
    ]
    found = busy(trace)
    assert found[0] == pytest.approx(
        {
            "F": 8.5e-6,
            "B": 1.5e-5,
            "W": 0,
            "predict": 0,
            "update": 5e-6,
            "send": 1e-6,
            "receive": 0,
            "wait": 3e-5,
            "data": 5e-7,
            "save": 0,
            "evaluate": 0,
        }
    )
    assert sum(found[1].values()) == pytest.approx((50_000 - 100) / 1e9)


@given(
    st.lists(st.tuples(st.integers(-20, 60), st.integers(0, 30), st.sampled_from(["F", "wait", "send"])), max_size=12)
)
def test_flattening_against_brute_force(spans: list[tuple[int, int, str]]) -> None:
    """At every nanosecond the event begun last counts, once all are cut to nest."""
    nested: list[Event] = []
    order = sorted(spans, key=lambda s: (s[0], -s[1], s[2] != "F"))
    for begin, length, kind in order:
        around = [e.end for e in nested if e.begin <= begin < e.end]
        nested.append(Event(0, kind, str(len(nested)), 0, 0, begin, min([begin + length, *around])))
    owner: dict[int, str] = {}
    for event in nested:
        owner.update(dict.fromkeys(range(event.begin, event.end), event.name))
    pieces = flatten([e._replace(end=b + n) for e, (b, n, _) in zip(nested, order, strict=True)])
    found: dict[int, str] = {}
    for piece in pieces:
        assert piece.begin < piece.end
        assert not found.keys() & range(piece.begin, piece.end)
        found.update(dict.fromkeys(range(piece.begin, piece.end), piece.name))
    assert found == owner
    assert pieces == sorted(pieces, key=lambda p: p.begin)

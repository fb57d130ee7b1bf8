"""What is written is read back, and what is not whole is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from traces import TWO, Row, written

from fxpipe.observe.trace import Event
from fxpipe.observe.trace.reader import read_trace
from fxpipe.typed_json import Malformed


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path / "trace.json", seconds=2.0))
    assert (trace.minibatches, trace.other["seconds"]) == (1, 2.0)
    expected = sorted(Event(w, *row) for w, rows in enumerate(TWO) for row in rows)
    assert sorted(trace.events) == expected


def test_what_is_no_whole_trace_is_refused(tmp_path: Path) -> None:
    whole = written(tmp_path / "trace.json").read_text()
    path = tmp_path / "cut.json"
    for length in range(len(whole) - 1):
        path.write_text(whole[:length])
        with pytest.raises(Malformed):
            read_trace(path)
    lines = whole.splitlines()
    path.write_text("\n".join([*lines[:8], lines[8][:30], *lines[9:]]))
    with pytest.raises(Malformed, match="line 9 is not an event"):
        read_trace(path)
    for text in ("nonsense", '{"a": 1}', "3", "\0\xff"):
        path.write_text(text)
        with pytest.raises(Malformed, match="not a trace of fxpipe"):
            read_trace(path)


def test_only_the_wanted_minibatches_are_kept(tmp_path: Path) -> None:
    rows: list[Row] = [("F", f"F{i}", i, 0, 10 * i, 10 * i + 5) for i in range(20)]
    trace = read_trace(written(tmp_path / "trace.json", [rows]), minibatches=3)
    assert [e.minibatch for e in trace.events] == [0, 1, 2]
    assert trace.minibatches == 20

"""What is written is read back, and what is cut off as far as it goes."""

from __future__ import annotations

from pathlib import Path

from traces import TWO, Row, written

from fxpipe.observe.trace import Event
from fxpipe.observe.trace.reader import read_trace


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path / "trace.json", seconds=2.0))
    assert trace.problems == ()
    assert (trace.workers, trace.minibatches, trace.other["seconds"]) == (2, 1, 2.0)
    expected = sorted(Event(w, *row) for w, rows in enumerate(TWO) for row in rows)
    assert sorted(trace.events) == expected


def test_a_truncated_file_is_read_up_to_its_last_whole_event(tmp_path: Path) -> None:
    whole = written(tmp_path / "trace.json").read_text()
    events = read_trace(tmp_path / "trace.json").events
    path = tmp_path / "cut.json"
    for length in range(whole.index("\n") + 1, len(whole) - 1):
        path.write_text(whole[:length])
        trace = read_trace(path)
        assert trace.events == events[: len(trace.events)]
        lines = whole[:length].split("\n")[1:]
        complete = sum(line.endswith("}}") or line.endswith("}},") for line in lines if line.startswith('{"ph":"X"'))
        assert len(trace.events) == complete
        assert len(trace.problems) == 1
        assert "cut.json ends " in trace.problems[0]
    path.write_text(whole[: whole.index('"dur"')])
    assert read_trace(path).problems == (
        "cut.json ends in the middle of line 8: what follows its first 0 events is missing",
    )


def test_a_broken_line_is_left_out(tmp_path: Path) -> None:
    path = written(tmp_path / "trace.json")
    lines = path.read_text().splitlines()
    lines[8] = lines[8][:30]
    path.write_text("\n".join(lines))
    trace = read_trace(path)
    assert len(trace.events) == sum(len(rows) for rows in TWO) - 1
    assert trace.problems == ("trace.json: line 9 is not an event: left out",)
    assert trace.other == {"workers": 2}


def test_what_is_no_trace_says_so(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    for text in ("", "nonsense", '{"a": 1}', "3", '{"traceEvents": [', "\0\xff"):
        path.write_text(text)
        trace = read_trace(path)
        assert trace.events == ()
        assert len(trace.problems) == 1
        assert trace.problems[0].startswith("trace.json")


def test_only_the_wanted_minibatches_are_kept(tmp_path: Path) -> None:
    rows: list[Row] = [("F", f"F{i}", i, 0, 10 * i, 10 * i + 5) for i in range(20)]
    path = written(tmp_path / "trace.json", [rows])
    trace = read_trace(path, minibatches=3)
    assert [e.minibatch for e in trace.events] == [0, 1, 2]
    assert trace.minibatches == 20
    text = path.read_text()
    path.write_text(text[: text.index('"F15"')])
    trace = read_trace(path, minibatches=3)
    assert (len(trace.events), trace.minibatches) == (3, 15)
    assert "its first 15 events" in trace.problems[0]

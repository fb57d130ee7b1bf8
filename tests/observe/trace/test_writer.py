"""What is written is what Perfetto expects: events that nest, and links between the right ones."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from pathlib import Path

import pytest
from traces import TWO, Row, columns, written

from fxpipe.errors import FxpipeError, RunError
from fxpipe.observe.trace.reader import read_trace
from fxpipe.observe.trace.writer import TraceWriter, check_trace


def test_a_file_of_one_event_a_line(tmp_path: Path) -> None:
    path = written(tmp_path / "trace.json", seconds=1.5)
    body = json.loads(path.read_text())
    assert set(body) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert body["otherData"] == {"workers": 2, "seconds": 1.5}
    lines = path.read_text().splitlines()
    assert [json.loads(line.removesuffix(",")) for line in lines[1:-1]] == body["traceEvents"]
    names = [(e["pid"], e["name"]) for e in body["traceEvents"] if e["ph"] == "M"]
    assert names == [(w, name) for w in (0, 1) for name in ("process_name", "process_sort_index", "thread_name")]
    wait = next(e for e in body["traceEvents"] if e.get("cat") == "wait")
    assert wait == {
        "ph": "X",
        "cat": "wait",
        "name": "wait for d_a from worker 1",
        "pid": 0,
        "tid": 0,
        "ts": 10.0,
        "dur": 30.0,
        "args": {"minibatch": 0, "microbatch": 0},
    }
    assert [p.name for p in tmp_path.iterdir()] == ["trace.json"]


def test_ranks_with_several_workers_have_a_row_for_each(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with TraceWriter(path, 4, placement=(0, 1, 1, 0)) as writer:
        for worker in range(4):
            writer.add(worker, ["F"], [f"F{worker}"], [0], [0], [worker], [worker + 1])
        writer.close({})
    events = json.loads(path.read_text())["traceEvents"]
    places = [(e["pid"], e["tid"]) for e in events if e["ph"] == "X"]
    assert places == [(0, 0), (1, 1), (1, 2), (0, 3)]
    named = {(e["pid"], e["tid"], e["name"]): e["args"].get("name") for e in events if e["ph"] == "M"}
    assert (named[1, 2, "process_name"], named[1, 2, "thread_name"]) == ("rank 1", "worker 2")
    found = read_trace(path)
    assert [(e.worker, e.name) for e in found.events] == [(w, f"F{w}") for w in range(4)]


def links(path: Path) -> dict[int, list[tuple[str, int, bool, bool]]]:
    """By link, the actions that have it: name, worker, whether an arrow comes in, whether one goes out."""
    found = defaultdict(list)
    for e in json.loads(path.read_text())["traceEvents"]:
        if "bind_id" in e:
            found[e["bind_id"]].append((e["name"], e["pid"], e.get("flow_in", False), e.get("flow_out", False)))
    return dict(found)


def test_arrows_lead_along_a_microbatch(tmp_path: Path) -> None:
    assert links(written(tmp_path / "trace.json")) == {
        0: [("F0", 0, False, True), ("B0", 0, True, False), ("F0", 1, True, True), ("B0", 1, True, True)]
    }


def test_microbatches_have_arrows_of_their_own(tmp_path: Path) -> None:
    rows: list[Row] = []
    for minibatch in range(3):
        for phase, shift in (("F", 0), ("B", 2_000)):
            for micro in range(2):
                at = 10_000 * minibatch + shift + 1_000 * micro
                rows.append((phase, f"{phase}{minibatch}.{micro}", minibatch, micro, at, at + 900))
    path = written(tmp_path / "trace.json", [rows], microbatches=2)
    assert links(path) == {
        2 * b + m: [(f"F{b}.{m}", 0, False, True), (f"B{b}.{m}", 0, True, False)] for b in range(3) for m in range(2)
    }


def test_events_that_end_too_late_are_cut_to_nest(tmp_path: Path) -> None:
    rows: list[Row] = [("wait", "w", 0, 0, 50, 120), ("F", "F0", 0, 0, 10, 100), ("B", "B0", 0, 0, 100, 200)]
    trace = read_trace(written(tmp_path / "trace.json", [rows]))
    assert [(e.name, e.begin, e.end) for e in trace.events] == [("F0", 10, 100), ("w", 50, 100), ("B0", 100, 200)]


def test_names_and_times_survive(tmp_path: Path) -> None:
    late = 400 * 3600 * 10**9 + 1  # 400 hours, to the nanosecond
    rows: list[Row] = [("F", 'F"\\\n0', 0, 0, -1_500, -1), ("B", "B0 → π", 0, 0, late, late + 7)]
    trace = read_trace(written(tmp_path / "trace.json", [rows]))
    assert [tuple(e)[1:] for e in trace.events] == [(row[0], row[1], row[2], row[3], row[4], row[5]) for row in rows]


def test_without_close_nothing_is_left(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("an earlier one")
    with TraceWriter(path, 1) as writer:
        writer.add(0, *columns(TWO[0]))
    assert [p.name for p in tmp_path.iterdir()] == ["trace.json"]
    assert path.read_text() == "an earlier one"


def test_columns_of_different_lengths_are_refused(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "trace.json", 1) as writer, pytest.raises(ValueError, match="length"):
        writer.add(0, ["F"], ["F0"], [0], [0], [0], [])


def test_a_path_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file" / "trace.json"):
        with pytest.raises(FxpipeError, match="cannot be written"):
            check_trace(path)
        with pytest.raises(RunError, match="cannot be written"):
            TraceWriter(path, 1).close({})
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    check_trace(tmp_path / "deeper" / "trace.json")
    written(tmp_path / "deeper" / "trace.json")


def test_what_is_no_plain_file_is_left_alone(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(RunError, match="no plain file"):
        check_trace(tmp_path / "pipe")


def test_each_replica_has_a_row_and_arrows_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with TraceWriter(path, 2, placement=(), replicas=2) as writer:
        for replica in range(2):
            for worker in range(2):
                begins = [1000 * worker, 1000 * (3 - worker)]
                ends = [begin + 500 for begin in begins]
                writer.add(worker, ["F", "B"], ["F0", "B0"], [0, 0], [0, 0], begins, ends, replica)
        writer.close({})
    events = json.loads(path.read_text())["traceEvents"]
    named = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}
    assert list(named) == [f"worker {worker}, replica {replica}" for worker in range(2) for replica in range(2)]
    assert len(set(named.values())) == 4
    linked = {event["pid"]: event["bind_id"] for event in events if "bind_id" in event}
    places = [named[f"worker {worker}, replica {replica}"] for replica in (0, 1) for worker in (0, 1)]
    assert [linked[place] for place in places] == [0, 0, 1, 1]
    assert [event["cat"] for event in events if event["ph"] == "X"] == ["F", "B"] * 4
    trace = read_trace(path)
    assert [(event.worker, event.kind) for event in trace.events] == [(0, "F"), (0, "B"), (1, "F"), (1, "B")]

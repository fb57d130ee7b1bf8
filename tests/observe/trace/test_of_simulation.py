"""A simulation as a trace for Perfetto."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from typing import Any

from fxpipe.observe.trace.of_simulation import chrome_trace
from fxpipe.planner.links import Links
from fxpipe.schedule import make
from fxpipe.simulator import Message, Scenario, Simulation, StageTime, simulate


def run() -> Simulation:
    """Three workers, messages to several at once, times that are no round numbers of nanoseconds."""
    messages = (
        Message(0, "F", 1, "F", 1, made=0.3, needed=0.2),
        Message(0, "F", 2, "B", 3),
        Message(1, "F", 2, "F", 2),
        Message(2, "B", 1, "B", 1, made=0.7),
    )
    workers = tuple(StageTime(0.1 * (w + 1), 0.2, 0.01) for w in range(3))
    return simulate(make("async", 3), Scenario(workers, messages, (), Links(7.0, 0.001, 0.003)), 6)


def threads(trace: dict[str, Any]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    """The events with a duration, by process and thread, in order."""
    found = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            found[event["pid"], event["tid"]].append(event)
    return {key: sorted(events, key=lambda e: (e["ts"], e["dur"])) for key, events in found.items()}


def test_the_trace_is_json_without_overlaps() -> None:
    simulation = run()
    trace = json.loads(json.dumps(chrome_trace(simulation), allow_nan=False))
    found = threads(trace)
    assert set(found) == {(0, 0), (1, 0), (2, 0), (0, 2), (0, 3), (1, 3), (2, 2)}
    for events in found.values():
        whole = [(round(e["ts"] * 1e3), round((e["ts"] + e["dur"]) * 1e3)) for e in events]
        assert all(a[1] <= b[0] for a, b in pairwise(whole))
        assert all(start <= end for start, end in whole)
    for worker, spans in enumerate(simulation.spans):
        assert len(found[worker, 0]) == len(spans)
        assert sum(e["dur"] for e in found[worker, 0]) * 1e-6 - simulation.busy[worker] < 1e-6
    assert sum(len(events) for key, events in found.items() if key[1]) == len(simulation.transfers)


def test_the_traces_events() -> None:
    workers = (StageTime(1, 2, 0.5), StageTime(1, 2))
    message = Message(0, "F", 1, "F", 4)
    simulation = simulate(make("1f1b", 2), Scenario(workers, (message,), (), Links(bandwidth=8)), 1)
    events = chrome_trace(simulation)["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {(0, 0): "compute", (1, 0): "compute", (0, 2): "to worker 1"}
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["worker 0", "worker 1"]
    assert [(e["name"], e["cat"], e["pid"], e["tid"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"] == [
        ("F0", "F", 0, 0, 0, 1e6),
        ("B0", "B", 0, 0, 4.5e6, 2e6),
        ("update 0", "update", 0, 0, 6.5e6, 0.5e6),
        ("F0", "F", 1, 0, 1.5e6, 1e6),
        ("B0", "B", 1, 0, 2.5e6, 2e6),
        ("F0 to worker 1", "message", 0, 2, 1e6, 0.5e6),
    ]
    assert events[-1]["args"] == {"bytes": 4}


def test_messages_that_take_no_time_are_no_events() -> None:
    scenario = Scenario((StageTime(1, 2),) * 2, (Message(0, "F", 1, "F", 4),))
    simulation = simulate(make("1f1b", 2), scenario, 1)
    assert len(simulation.transfers) == 1
    assert set(threads(chrome_trace(simulation))) == {(0, 0), (1, 0)}

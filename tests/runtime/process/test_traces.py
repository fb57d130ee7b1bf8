"""`--trace`: the run stays what it was, and the file says what the summary says."""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from traces import busy

from fxpipe.errors import RunError
from fxpipe.observe.trace import Event
from fxpipe.observe.trace.reader import Trace, read_trace
from fxpipe.observe.trace.writer import partial
from fxpipe.observe.watch import Spans, _OpenSpan
from fxpipe.plan.build_folder import read_plan
from fxpipe.plan.plan import Plan
from fxpipe.policy.recipe import choose
from fxpipe.runtime.options import RunOptions
from fxpipe.runtime.process.launch import launch
from fxpipe.runtime.process.start import run_local
from fxpipe.runtime.process.timelines import WorkerTrace, write_trace
from fxpipe.runtime.wires.exchange import ClockOffset

MIXED = {"forward": (0, 0, 1, 2, 2), "backward": (0, 1, 1, 1, 2), "tied": True, "policy": "spectrain"}
CLIPPED = {"microbatches": 2, "schedule": "1f1b", "forward": (0, 1, 2), "backward": (0, 1, 2)}
STEPS = 12


def spent(summary: dict[str, Any], rank: int) -> float:
    """The seconds in which a worker was busy, by the summary."""
    row = summary["workers"][rank]
    return float(row["seconds"] - sum(row["spent"][kind] for kind in ("wait", "data", "other")))


@pytest.fixture(
    params=[
        pytest.param((MIXED, {}), id="async"),
        pytest.param((CLIPPED, {"clip_norm": 0.1}), id="1f1b, clipped", marks=pytest.mark.slow),
    ]
)
def runs(request: pytest.FixtureRequest, toy: Any, tmp_path: Path) -> Callable[[Any], tuple[Any, RunOptions]]:
    """Runs a build with a trace, by `launch` or locally; the summary and what was asked for."""
    built, more = request.param
    folder = toy(**built).save(tmp_path / "build")
    options = RunOptions(
        str(folder), steps=STEPS, out=str(tmp_path / "out"), trace=str(tmp_path / "trace.json"), **more
    )

    def run(how: Any) -> tuple[Any, RunOptions]:
        return (launch(options, read_plan(folder).workers) if how is launch else run_local(options)), options

    return run


@pytest.mark.slow
@pytest.mark.multiproc
def test_the_trace_says_what_the_summary_says(runs: Any, tmp_path: Path) -> None:
    summary, options = runs(launch)
    plain = launch(dataclasses.replace(options, trace=None, out=None), 3)
    assert plain["losses"] == summary["losses"], "to the last bit"
    trace = read_trace(tmp_path / "trace.json")
    assert trace.minibatches == STEPS
    plan = read_plan(options.build)
    assert trace.other["build"] == plan.digest == summary["build"]["digest"]
    assert trace.other["seconds"] == pytest.approx(summary["workers"][0]["seconds"], rel=1e-6)
    assert all(error < 50_000 for error in trace.other["clock_error_us"])
    for rank, kinds in busy(trace).items():
        mine = sum(seconds for kind, seconds in kinds.items() if kind not in ("wait", "data"))
        assert mine == pytest.approx(spent(summary, rank), rel=0.01)
        row = summary["workers"][rank]
        for kind, seconds in kinds.items():
            assert seconds == pytest.approx({**row["spent"], **row}[kind], rel=0.01, abs=1e-5)
    schedule = {(e.worker, e.kind, e.minibatch, e.microbatch) for e in trace.events if e.kind in ("F", "B")}
    wanted = [(w, k, m, q) for w in range(3) for k in "FB" for m in range(STEPS) for q in range(plan.microbatches)]
    assert schedule == set(wanted)
    assert sum(e.kind in ("F", "B") for e in trace.events) == len(wanted)
    said = json.loads((tmp_path / "out" / "run.json").read_text())
    assert said["trace"] == "../trace.json"

    check_messages(trace, plan)


def check_messages(trace: Trace, plan: Plan) -> None:
    """Nothing is received before it is sent, by clocks that are aligned as well as the trace says."""
    error = 1000 * max(trace.other["clock_error_us"])
    sent: dict[tuple[Any, ...], Event] = {}
    received: dict[tuple[Any, ...], list[Event]] = defaultdict(list)
    for event in trace.events:
        words = event.name.split()
        if event.kind == "send" and words[1] != "weights":
            sent[words[1], int(words[-1]), event.minibatch, event.microbatch] = event
        if event.kind == "receive" and words[1] != "weights":
            received[words[1], event.worker, event.minibatch, event.microbatch].append(event)
    edges = {(edge.name, edge.dst) for edge in plan.edges}
    assert {key[:2] for key in sent} == {key[:2] for key in received} == edges
    assert sent.keys() == received.keys()
    for key, (event,) in received.items():
        assert event.end >= sent[key].begin - 2 * error, key


def test_a_run_in_one_process_is_traced_too(runs: Any, tmp_path: Path) -> None:
    summary, _ = runs(run_local)
    trace = read_trace(tmp_path / "trace.json")
    for rank, kinds in busy(trace).items():
        mine = sum(seconds for kind, seconds in kinds.items() if kind not in ("wait", "data"))
        assert mine == pytest.approx(spent(summary, rank), rel=0.01)
    assert sum(spent(summary, rank) for rank in range(3)) <= summary["seconds"], "one process does one thing at a time"


def test_without_the_option_nothing_is_kept(toy: Any, tmp_path: Path) -> None:
    folder = toy().save(tmp_path / "build")
    summary = run_local(RunOptions(str(folder), steps=2, out=str(tmp_path / "out")))
    assert summary["trace"] is None
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["metrics.jsonl", "model.safetensors", "run.json"]


@pytest.mark.slow
@pytest.mark.parametrize("how", [run_local, pytest.param(launch, marks=pytest.mark.multiproc)])
def test_a_trace_that_cannot_be_written_costs_nothing_else(toy: Any, tmp_path: Path, how: Any, capfd: Any) -> None:
    """What the run asked for at its begin is gone at its end: the trace's folder became a file."""
    folder = tmp_path / "file"
    folder.mkdir()
    lost = f"import pathlib; p = pathlib.Path({str(folder)!r}); p.is_dir() and (p.rmdir() or p.write_text(''))"
    built = toy(forward=(0, 1), backward=(0, 1), spoil={1: ("    loss = (", f"    {lost}\n    loss = (")})
    options = RunOptions(str(built.save(tmp_path / "build")), steps=2, out=str(tmp_path / "out"))
    options = dataclasses.replace(options, trace=str(folder / "trace.json"))
    summary = launch(options, 2) if how is launch else run_local(options)
    assert "warning: the trace is lost: " in capfd.readouterr().err
    assert summary["trace"] is None
    assert json.loads((tmp_path / "out" / "run.json").read_text())["trace"] is None
    assert (tmp_path / "out" / "model.safetensors").exists()
    left = {p.name for p in tmp_path.iterdir()} - {"__pycache__"}  # of the model file, where Python writes it
    assert left == {"build", "file", "model.py", "out"}


@pytest.mark.slow
def test_what_a_killed_writer_left_is_removed(toy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = toy(spoil={1: ("loss = (", "raise ValueError\n    loss = (")}).save(tmp_path / "build")
    trace = tmp_path / "trace.json"
    partial(trace).write_text("half")
    with pytest.raises(RunError):
        launch(RunOptions(str(folder), steps=2, trace=str(trace)), 2)
    assert not partial(trace).exists()


def test_another_clock_is_told_in_worker_0s_time(toy: Any, tmp_path: Path) -> None:
    """Worker 1's clock is 1000 s behind, and falls behind by another 10 µs while it runs."""
    plan = read_plan(toy().save(tmp_path / "build"))
    late, drift, end = 10**12, 10_000, 10**9

    def recorded(worker: int) -> WorkerTrace:
        spans = Spans()
        offset = -late * worker
        for begin in (0, end):
            spans.add(_OpenSpan(0, 0, None, begin // end, 0), begin + offset, begin + offset + 1000)
        before = ClockOffset(offset, -offset, 7 * worker)
        return WorkerTrace(spans, before, ClockOffset(end + offset, -offset + drift * worker, 5 * worker))

    write_trace(str(tmp_path / "trace.json"), plan, choose(plan), 1.0, [recorded(worker) for worker in range(2)])
    trace = read_trace(tmp_path / "trace.json")
    assert [(e.worker, e.begin) for e in trace.events] == [(0, 0), (0, end), (1, 0), (1, end + drift)]
    assert trace.other["clock_error_us"] == [0.0, 0.007]

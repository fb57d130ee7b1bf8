"""A simulation as a trace, to look at a forecast in ui.perfetto.dev."""

from __future__ import annotations

from typing import Any

from fxpipe.observe.trace.writer import worker_metadata
from fxpipe.simulator.result import Simulation, Span


def chrome_trace(simulation: Simulation) -> dict[str, Any]:
    """The run in the Trace Event format, ready for `json.dump`; ui.perfetto.dev and chrome://tracing read it.

    Each worker is a process. It has a thread for its actions and updates, and a thread for each worker that it sends
    to, because messages to several may be on their way at once. Messages that take no time on a link are left out.
    """
    events: list[dict[str, Any]] = []
    for worker, spans in enumerate(simulation.spans):
        events += worker_metadata(worker)
        events += [_event(_title(span), span.kind, worker, 0, span.start, span.end) for span in spans]
    sent = [transfer for transfer in simulation.transfers if transfer.end > transfer.start]
    for src, dst in sorted({(transfer.src, transfer.dst) for transfer in sent}):
        name = {"name": f"to worker {dst}"}
        events.append({"ph": "M", "name": "thread_name", "pid": src, "tid": 1 + dst, "args": name})
    for t in sent:
        event = _event(f"{t.action} to worker {t.dst}", "message", t.src, 1 + t.dst, t.start, t.end)
        events.append({**event, "args": {"bytes": t.bytes}})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _title(span: Span) -> str:
    return f"update {span.action.minibatch}" if span.kind == "update" else str(span.action)


def _event(name: str, kind: str, process: int, thread: int, start: float, end: float) -> dict[str, Any]:
    # Whole nanoseconds, so that what does not overlap stays so; sums of fractions of a microsecond would not ensure
    # that.
    first, last = round(start * 1e9), round(end * 1e9)
    times = {"ts": first / 1e3, "dur": (last - first) / 1e3}
    return {"ph": "X", "name": name, "cat": kind, "pid": process, "tid": thread, **times}

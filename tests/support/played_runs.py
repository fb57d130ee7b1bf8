"""Runs that are played, not run: what a pipeline with a known fault leaves in `run.json`."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fxpipe.observe.time_losses import time_losses
from fxpipe.schedule import make
from fxpipe.schedule.action import Action


@dataclass(frozen=True)
class Played:
    """A pipeline to play: milliseconds by worker; `link` is what a message between k and k + 1 takes.

    `predict` is of a forward, `send` of every action, `copy` of every message at either of its ends.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    link: tuple[float, ...] = ()
    data: float = 0.0
    update: float = 0.0
    send: tuple[float, ...] = ()
    predict: tuple[float, ...] = ()
    copy: float = 0.0
    schedule: str = "async"
    microbatches: int = 1
    steps: int = 200
    jitter: float = 0.0
    """An action takes at most so many times longer, now and then."""


def play(case: Played) -> tuple[list[dict[str, Any]], float]:
    """The workers' rows as `run.json` has them, and the run's seconds."""
    n = len(case.forward)
    link, send = case.link or (0.0,) * n, case.send or (0.0,) * n
    predict = case.predict or (0.0,) * n
    schedule = make(case.schedule, n, case.microbatches)
    queues = [list(schedule.until(k, case.steps)) for k in range(n)]
    place, clock = [0] * n, [0.0] * n
    spent: list[dict[str, float]] = [defaultdict(float) for _ in range(n)]
    took: list[dict[str, float]] = [dict.fromkeys(("F", "B", "update"), 0.0) for _ in range(n)]
    waits: list[dict[tuple[str, int], float]] = [defaultdict(float) for _ in range(n)]
    fill = [0.0] * n
    sent: dict[tuple[int, Action], float] = {}
    dice = random.Random(0)
    progress = True
    while progress:
        progress = False
        for k in range(n):
            while place[k] < len(queues[k]):
                action = queues[k][place[k]]
                source = k - 1 if action.phase == "F" else k + 1
                waited = 0.0
                if 0 <= source < n:
                    if (source, action) not in sent:
                        break
                    waited = max(sent[source, action] + link[min(k, source)] - clock[k], 0.0)
                    what = "activation" if action.phase == "F" else "gradient"
                    waits[k][what, source] += waited
                    if not took[k]["B"]:
                        fill[k] += waited
                    clock[k] += waited
                    spent[k]["wait"] += waited
                does = {action.phase: case.forward[k] if action.phase == "F" else case.backward[k]}
                if k == 0 and action.phase == "F":
                    does["data"] = case.data
                if action.phase == "F":
                    does["predict"] = predict[k]
                if action.phase == "B" and action.microbatch == case.microbatches - 1:
                    does["update"] = case.update
                to = k + 1 if action.phase == "F" else k - 1
                does["send"] = send[k] + case.copy * (0 <= to < n)
                does["receive"] = case.copy * (0 <= source < n)
                if case.jitter and dice.random() < 0.2:
                    does[action.phase] *= 1 + case.jitter * dice.random()
                for kind, duration in does.items():
                    spent[k][kind] += duration
                    clock[k] += duration
                    if kind not in ("data", "receive"):
                        took[k]["update" if kind == "update" else action.phase] += duration
                sent[k, action] = clock[k]
                place[k] += 1
                progress = True
    assert all(place[k] == len(queues[k]) for k in range(n)), "the schedule hangs"
    rows = [
        {
            "worker": k,
            "rank": k,
            "seconds": clock[k] / 1e3,
            "spent": {kind: value / 1e3 for kind, value in spent[k].items()},
            "took": {kind: value / 1e3 for kind, value in took[k].items()},
            "waits": [{"what": w, "from": s, "seconds": t / 1e3} for (w, s), t in waits[k].items()],
            "fill": fill[k] / 1e3,
        }
        for k in range(n)
    ]
    return rows, max(clock) / 1e3


def planned(case: Played) -> dict[str, Any]:
    """What a forecast says of it: times as `fxpipe.measure.stages` measures them, and the steady state."""
    n = len(case.forward)
    few, many = (play(replace(case, steps=steps))[1] for steps in (20, 50))
    step = 1e3 * (many - few) / 30
    send, predict = case.send or (0.0,) * n, case.predict or (0.0,) * n
    rows = [
        {
            "forward_ms": case.forward[k] + predict[k] + send[k],
            "backward_ms": case.backward[k] + send[k],
            "update_ms": case.update,
            "copy_ms": case.microbatches * case.copy * 2 * ((k > 0) + (k < n - 1)),
        }
        for k in range(n)
    ]
    busy = [case.microbatches * (r["forward_ms"] + r["backward_ms"]) + r["update_ms"] + r["copy_ms"] for r in rows]
    bubble = 1 - sum(busy) / n / step
    return {"bubble": bubble, "samples_per_second": 1e3 / step, "milliseconds": step, "workers": rows}


def losses(
    case: Played, plan: Played | None = None, host: tuple[Any, ...] | None = None, **options: Any
) -> list[dict[str, Any]]:
    """What time_losses says.

    Args:
        host: processes, threads, cores, and the share of its computing in which a worker's thread runs on a core.
    """
    rows, seconds = play(case)
    for row in rows if host is not None else ():
        *counts, share = host if len(host) == 4 else (*host, 1.0)
        computes = sum(row["spent"].get(kind, 0.0) for kind in ("F", "B", "predict", "update"))
        row["host"] = dict(zip(("processes", "threads", "cores"), counts, strict=True))
        row["host"]["cpu_seconds"] = None if share is None else share * computes
    forecast = None if plan is None else planned(plan)
    return time_losses(rows, forecast, seconds, case.steps, case.microbatches, **options)


EVEN = Played((2.0, 2.0), (4.0, 4.0))
FOUR = Played((2.0,) * 4, (4.0,) * 4)


def texts(found: Sequence[dict[str, Any]]) -> list[str]:
    return [row["text"] for row in found]


def row(rank: int, **spent: float) -> dict[str, Any]:
    took = {kind: spent.get(kind, 0.0) for kind in ("F", "B", "update")}
    return {"worker": rank, "rank": rank, "seconds": 10.0, "spent": spent, "took": took, "waits": [], "fill": 0.0}

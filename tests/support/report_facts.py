"""Facts of pipelines that would take long to build: what `fxpipe inspect --json` prints, made up."""

from __future__ import annotations

import itertools
import math
from dataclasses import asdict
from typing import Any

from fxpipe.plan.cost_records import ScheduleForecast
from fxpipe.policy import make as make_policy
from fxpipe.policy.base import sees
from fxpipe.schedule import make as make_schedule

Facts = dict[str, Any]
OPS = ("aten.addmm", "aten.addmm", "aten._softmax", "aten.add", "aten.mm")


def made_facts(
    workers: int = 4, blocks: int = 8, inner: int = 6, steps: int = 60, run: bool = True, name: str = "gpt.py"
) -> Facts:
    """A model of `blocks` blocks with `inner` operators in each of three layers, cut apart for `workers` workers."""
    modules, nodes, units = _model(workers, blocks, inner)
    microbatch = [
        {"forward": sum(u["forward_ms"] for u in units if u["forward"] == w),
         "backward": sum(u["backward_ms"] for u in units if u["backward"] == w)}
        for w in range(workers)
    ]  # fmt: skip
    simulated = _timeline(microbatch, 12, 1.0)
    table = [_worker(w, units, microbatch[w]) for w in range(workers)]
    facts: Facts = {
        "fxpipe": "0.1.0",
        "build": {
            "folder": "build", "model": name, "digest": "5d41402abc4b2a76b9719d911017c592", "workers": workers,
            "ranks": workers, "replicas": [], "outer": None, "outer_step": None,
            "microbatches": 1, "schedule": "async", "policy": "spectrain", "autocast": None, "params": None,
            "codec": "none", "device": "cpu",
            "torch": "2.13.0", "samples": 32, "loss_worker": workers - 1, "cuts": "bidirectional", "cuts_refused": "",
            "efficiency": 0.95, "costs": "measured", "speeds": [],
            "links": {"bandwidth": "3000000000.0", "latency": "5e-05", "copy": 3.3e-10}, "optimizer_bytes": 1.0,
            "packed": {},
            "edited": [], "stale": [], "settings": {}, "arguments": [],
            "evaluation": None, "graph": [], "passes": [], "microbatch_loss": None,
            "shapes": [{"files": [f"stage_{k}.py" for k in range(workers)], "batch": {}}],
            "padding": [],
        },
        "modules": modules, "nodes": nodes, "units": units, "workers": table, "edges": _edges(workers, blocks),
        "partitions": [_partition(mode, microbatch) for mode in ("same", "bidirectional", "three-way")],
        "schedules": [],
        "forecast": {
            "schedule": "async", "policy": "spectrain", "samples_per_second": 412.5, "milliseconds": 77.6,
            "bubble": 0.043, "busy": [0.96 for _ in range(workers)],
        },
        "timeline": simulated, "grid": _grid(workers), "run": None,
    }  # fmt: skip
    if run:
        facts["run"] = _run(workers, steps, microbatch)
    return facts


def made_schedules() -> list[Facts]:
    """What was compared: one that was taken, one that is slower, one that does not fit, one that cannot be."""
    rows = [
        ScheduleForecast("async", "spectrain", 1, "bidirectional", 0.0776, 0.043, 47e6, staleness=1),
        ScheduleForecast("zb-h1", "latest", 4, "three-way", 0.1, 0.21, 61e6, why="bubble 21% against 4%"),
        ScheduleForecast("gpipe", "latest", 4, enough_bytes=3e9, why="does not fit: 2.80 GiB would be enough"),
        ScheduleForecast("", "", 8, why="the batch has 12 samples"),
    ]
    return [asdict(row) for row in rows]


def _model(workers: int, blocks: int, inner: int) -> tuple[list[Facts], Facts, list[Facts]]:
    layers = ["tok", *(f"blocks.{b}" for b in range(blocks)), "head", None]
    modules: list[Facts] = []
    rows: list[list[Any]] = []
    units: list[Facts] = []

    def module(path: str | None, parent: int | None, depth: int) -> int:
        modules.append({
            "path": path, "name": "(loss)" if path is None else path.rsplit(".", 1)[-1], "depth": depth,
            "parent": parent, "forward": {}, "backward": {}, "parameters": 0, "parameter_bytes": 0, "owners": [],
            "nodes": 0, "apart": 0,
        })  # fmt: skip
        return len(modules) - 1

    def node(at: int, phase: str, worker: int, cost: float) -> None:
        number = len(rows)
        path = modules[at]["path"] or "loss"
        prefix = "d_" if phase == "B" else ""
        rows.append([
            f"{prefix}{path.replace('.', '_')}_{number}", phase, at, OPS[number % len(OPS)], "f32[512, 384]", 786432,
            cost, worker, len(units), False, f"gpt.py:{40 + number % 30}", "q, k, v = self.qkv(self.norm1(x))",
            [number - 1] if number else [],
        ])  # fmt: skip
        up: int | None = at
        while up is not None:
            entry = modules[up]["forward" if phase == "F" else "backward"].setdefault(worker, [0.0, 0])
            entry[0] += cost
            entry[1] += 1
            modules[up]["nodes"] += 1
            up = modules[up]["parent"]

    root = module("", None, 0)
    holder: int | None = None
    for place, layer in enumerate(layers):
        f = min(workers - 1, place * workers // len(layers))
        b = min(workers - 1, max(f, (place + 1) * workers // len(layers)))
        parent = root
        if layer is not None and layer.startswith("blocks."):
            holder = module("blocks", root, 1) if holder is None else holder
            parent = holder
        at = module(layer, parent, modules[parent]["depth"] + 1)
        inside = ["norm", "attention", "mlp"] if parent == holder else [""]
        for part in inside:
            own = module(f"{layer}.{part}", at, modules[at]["depth"] + 1) if part else at
            cost = 0.6 + 0.35 * math.sin(len(units))
            for k in range(inner):
                node(own, "F" if k % 2 == 0 else "B", f if k % 2 == 0 else b, cost / inner)
            modules[own]["parameters"] = 0 if layer is None else 2
            modules[own]["parameter_bytes"] = 0 if layer is None else 590_000
            units.append({
                "module": modules[own]["path"], "forward": f, "backward": b, "weights": b,
                "forward_ms": cost, "backward_ms": 1.9 * cost, "weight_ms": 0.0,
                "apart": f != b,
            })  # fmt: skip
            modules[own]["apart"] = int(f != b)
    for entry in reversed(modules):
        if entry["parent"] is not None:
            modules[entry["parent"]]["apart"] += entry["apart"]
            modules[entry["parent"]]["parameters"] += entry["parameters"]
            modules[entry["parent"]]["parameter_bytes"] += entry["parameter_bytes"]
    for entry in modules:
        for phase in ("forward", "backward"):
            entry[phase] = [[w, time, n] for w, (time, n) in sorted(entry[phase].items())]
        entry["owners"] = [w for w, *_ in entry["backward"]] if entry["parameters"] else []
    columns = [
        "name", "phase", "module", "op", "type", "bytes", "ms", "worker", "unit", "weight", "source", "text", "inputs",
    ]  # fmt: skip
    return modules, {"columns": columns, "rows": rows, "gradients": {}, "names": {}}, units


def _worker(rank: int, units: list[Facts], cost: Facts) -> Facts:
    def reach(phase: str) -> list[int]:
        places = [i for i, unit in enumerate(units) if unit[phase] == rank]
        return [places[0], places[-1] + 1] if places else [0, 0]

    forward, backward = reach("forward"), reach("backward")
    return {
        "worker": rank, "rank": rank, "forward_from": units[forward[0]]["module"],
        "backward_from": units[backward[0]]["module"],
        "forward_units": forward, "backward_units": backward, "weight_units": backward,
        "forward_ms": cost["forward"], "backward_ms": cost["backward"], "update_ms": 0.4, "owned": 24,
        "owned_bytes": 6_291_456, "copies": 3, "copy_bytes": 1_048_576, "bytes_in": 786_432, "bytes_out": 790_000,
        "again": 0, "again_ms": 0.0, "spared_bytes": 0,
        "saved_bytes": 9_437_184, "deferred_bytes": None, "weight_ms": None, "in_flight": rank + 1,
        "memory_bytes": 41_943_040 + rank * 5_000_000,
        "engines": ["eager", "eager"], "buckets": [], "owned_names": [f"blocks.{rank}.qkv.weight"], "copy_names": [],
        "file": f"stage_{rank}.py", "edited": False, "speed": 1.0,
    }  # fmt: skip


def _edges(workers: int, blocks: int) -> list[Facts]:
    def edge(name: str, kind: str, ends: tuple[int, str, int, str], size: int, names: tuple[str, ...] = ()) -> Facts:
        return {
            "name": name, "kind": kind, "shape": None if names else [8, 64, 128], "dtype": "float32", "bytes": size,
            "codec": "", "plain_bytes": size, "src": ends[0], "src_phase": ends[1], "dst": ends[2],
            "dst_phase": ends[3], "module": "blocks.3", "source": "gpt.py:51", "names": list(names),
        }  # fmt: skip

    found = [edge("batch_1", "input", (0, "F", workers - 1, "F"), 4096)] if workers > 1 else []
    for w in range(workers - 1):
        found.append(edge(f"blocks_{w}_add_1", "activation", (w, "F", w + 1, "F"), 262_144))
        found += [edge(f"blocks_{w}_qkv_{k}", "saved", (w, "F", w + 1, "B"), 98_304) for k in range(2 + blocks // 16)]
        found.append(edge(f"d_blocks_{w}_mm", "gradient", (w + 1, "B", w, "B"), 262_144))
        found.append(edge(f"weights of worker {w + 1}", "weights", (w + 1, "update", w, "F"), 196_608, ("blocks.0.w",)))
    return found


def _partition(mode: str, cost: list[Facts]) -> Facts:
    uneven = {"same": 0.16, "bidirectional": 0.04, "three-way": 0.01}[mode]
    each = sum(c["forward"] + c["backward"] for c in cost) / len(cost)
    workers = []
    for w in range(len(cost)):
        total = each * (1 + uneven * math.cos(2.1 * w))
        part = {"forward_ms": 0.31, "backward_ms": 0.38, "weight_ms": 0.22, "update_ms": 0.03, "recompute_ms": 0.02}
        row = {name: share * total for name, share in part.items()} | {"exposed_ms": 0.04 * total}
        workers.append(row | {"total_ms": sum(row.values()), "memory_bytes": 40_000_000 + 1000 * w})
    slowest = max(row["total_ms"] for row in workers)
    return {
        "mode": mode, "chosen": mode == "bidirectional", "efficiency": each / slowest, "exact": True,
        "bottleneck_ms": slowest, "ideal_ms": each, "workers": workers,
        "moved_bytes": 3e6 * (1 + 10 * uneven), "simulated_ms": None,
    }  # fmt: skip


def _timeline(cost: list[Facts], minibatches: int, pace: float) -> Facts:
    """1F1B as it comes: every action as early as its worker and what it needs allow."""
    workers = len(cost)
    schedule = make_schedule("async", workers, 1)
    rows = [list(schedule.until(w, minibatches)) for w in range(workers)]
    free, place = [0.0] * workers, [0] * workers
    done: dict[tuple[int, str], float] = {}
    spans: list[list[Any]] = []
    while any(place[w] < len(rows[w]) for w in range(workers)):
        for w in range(workers):
            if place[w] == len(rows[w]):
                continue
            action = rows[w][place[w]]
            if action.phase == "F":
                needs = (w - 1, str(action)) if w else None
            else:
                needs = (w + 1, str(action)) if w < workers - 1 else (w, f"F{action.minibatch}")
            if needs is not None and needs not in done:
                continue
            start = max(free[w], done[needs] if needs else 0.0)
            stop = start + pace * cost[w]["forward" if action.phase == "F" else "backward"] / 1e3
            spans.append([w, action.phase, action.minibatch, 0, start, stop])
            done[w, str(action)] = free[w] = stop
            if action.phase == "B":
                spans.append([w, "update", action.minibatch, 0, stop, stop + 0.0004])
                free[w] = stop + 0.0004
            place[w] += 1
    memory = []
    for w in range(workers):
        changes = sorted((s[5], 1 if s[1] == "F" else -1) for s in spans if s[0] == w and s[1] in "FB")
        held = list(itertools.accumulate(c for _, c in changes))
        at = [0.0, *(t for t, _ in changes)]
        memory.append({"worker": w, "seconds": at, "bytes": [20_000_000 + 9_437_184 * n for n in (0, *held)]})
    return {"seconds": max(free), "minibatches": minibatches, "spans": spans, "memory": memory}


def _grid(workers: int) -> Facts:
    schedule = make_schedule("async", workers, 1)
    rows = [line.split(":", 1)[1].split() for line in sees(make_policy("spectrain"), schedule, 8).splitlines()]
    return {"schedule": "async", "policy": "spectrain", "rows": rows}


def _run(workers: int, steps: int, cost: list[Facts]) -> Facts:
    measured = _timeline(cost, 20, 1.07)
    spans = measured["spans"]
    for w in range(workers):
        own = sorted((s for s in spans if s[0] == w), key=lambda s: s[4])
        for before, after in itertools.pairwise(own):
            if after[4] - before[5] > 1e-5:
                spans.append([w, "wait", after[2], 0, before[5], after[4]])
    spent = {
        "F": 3.1, "B": 5.4, "predict": 0.11, "update": 0.2, "send": 0.08, "receive": 0.05, "wait": 0.62, "data": 0.03,
        "save": 0.04, "other": 0.2,
    }  # fmt: skip
    rows = [
        {
            "worker": w, "rank": w, "engines": ["eager", "eager"], "busy": 0.93 - 0.01 * w, "forward_ms": 12.1,
            "backward_ms": 22.9, "wait_ms": 2.4,
            "planned": {"forward_ms": 11.8, "backward_ms": 22.0, "wait_ms": 1.9},
            "seconds": sum(spent.values()), "spent": dict(spent), "fill": 0.02,
            "waits": [
                {"what": what, "from": max(w - 1, 0), "seconds": 0.41 / 3**place}
                for place, what in enumerate(("activation", "gradient", "weights", "loss"))
            ],
            "staleness": [
                {"group": 0, "stale": workers - w, "ahead": 1, "samples": 9, "rmse": 2e-4 * (workers - w), "rms": 0.05}
            ],
        }
        for w in range(workers)
    ]  # fmt: skip
    step = list(range(1, steps + 1))
    return {
        "format": 1, "build": {"folder": "build", "digest": "5d41402abc4b2a76b9719d911017c592"}, "schedule": "async",
        "policy": "spectrain", "microbatches": 1, "seed": 0, "clip_norm": None, "threads": 1, "transport": "gloo",
        "device": "cpu", "steps": steps, "samples": 32, "seconds": 9.79, "samples_per_second": 385.2, "bubble": 0.06,
        "forecast": None, "efficiency": 0.934, "workers": rows, "trace": "trace.json", "out": "run",
        "time_losses": [
            {"worker": 1, "share": 0.062, "cause": "uneven", "text": "worker 1 has 7% more to do than the mean"}
        ],
        "folder": "run", "problems": [],
        "metrics": {
            "step": step, "loss": [4.2 * math.exp(-s / (steps / 2)) + 1.3 + 0.1 * math.sin(s) for s in step],
            "lr": [1e-3] * steps, "grad_norm": [None] * steps, "seconds": [0.08 * s for s in step],
            "samples_per_second": [380 + 9 * math.cos(s) for s in step],
        },
        "timeline": {"seconds": measured["seconds"], "minibatches": 20, "of": 40, "spans": spans},
    }  # fmt: skip

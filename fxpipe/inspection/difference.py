"""What differs between two builds, as plain JSON: settings, cuts, workers, edges, parameters, files.

It compares their facts (`fxpipe.inspection.facts`). Units match by their place within their module, so that builds of
two similar models can be compared, too.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fxpipe.inspection.subject import Subject, read_subject
from fxpipe.ir.program import unit_name

Json = dict[str, Any]
Files = Mapping[str, Mapping[str, str]]

NOTICEABLE = 0.02
"""Times that differ by a smaller fraction count as equal."""

_SETTINGS = (
    "model", "workers", "replicas", "outer", "schedule", "policy", "microbatches", "samples", "autocast", "params",
    "codec", "device", "cuts", "costs", "loss_worker", "torch", "speeds", "links", "optimizer_bytes",
)  # fmt: skip
TIMES = ("forward_ms", "backward_ms", "update_ms")
BYTES = ("memory_bytes", "bytes_in", "bytes_out")
_SIZES = (*BYTES, "owned_bytes", "copy_bytes", "saved_bytes")


def difference_of_folders(first: Path, second: Path) -> Json:
    """`difference` of two build folders."""
    from fxpipe.inspection.facts import facts

    one, two = read_subject(first), read_subject(second)
    return difference(facts(one), facts(two), _files(one), _files(two), (str(first), str(second)))


def difference(
    first: Json,
    second: Json,
    first_files: Files | None = None,
    second_files: Files | None = None,
    names: tuple[str, str] = ("the first", "the second"),
) -> Json:
    """What differs between two builds, by their facts, and by the digests and code of their files (`_files`).

    "identical": whether only times differ;
    "settings": rows of "name", "first", "second";
    "moved": units whose "phase" (forward, backward, weights) moved "from" one worker "to" another: their "modules",
    number of "units", and "ms"; the phase "weights" only where W has its own cuts;
    "owners": parameters that moved "from" one owner "to" another;
    "workers": for each, its facts in "first" and "second" (None if that build has no such worker), and the names of
    those that "changed";
    "edges": for each kind and route, the names of the edges that "came", "went" or "changed" their value, and their
    bytes "before" and "after";
    "parameters", "sources", "code": names that only the "first" or the "second" has, and those that "changed";
    "weights": whether the initial weights differ; None if unknown;
    "edited": stages that were edited, "stale": sources that changed after compiling, of both builds;
    "units", "nodes", "balance", "forecast": of both builds.
    """
    apart = any(unit["weights"] != unit["backward"] for facts in (first, second) for unit in facts["units"])
    phases = ("forward", "backward", *(["weights"] if apart else []))
    moved = [row for phase in phases for row in _moved(first, second, phase)]
    files, others = first_files or {}, second_files or {}
    differences: Json = {
        "first": names[0],
        "second": names[1],
        "settings": _settings(first, second),
        "moved": moved,
        "owners": [{"from": a, "to": b, "names": names} for a, b, names in _ways(_owned(first), _owned(second))],
        "workers": _workers(first, second),
        "edges": _edges(first, second),
        "parameters": _names(_owned(first), _owned(second)),
        "sources": _names(files.get("sources", {}), others.get("sources", {})),
        "code": _names(files.get("code", {}), others.get("code", {})),
        "weights": None if not (files and others) else files["weights"] != others["weights"],
        "edited": [facts["build"]["edited"] for facts in (first, second)],
        "stale": [facts["build"]["stale"] for facts in (first, second)],
        "units": [len(facts["units"]) for facts in (first, second)],
        "nodes": [len(facts["nodes"]["rows"]) for facts in (first, second)],
        "balance": [_balance(facts) for facts in (first, second)],
        "forecast": [
            forecast and {name: forecast[name] for name in ("samples_per_second", "bubble")}
            for forecast in (first["forecast"], second["forecast"])
        ],
    }
    return {"identical": _identical(differences), **differences}


def _files(subject: Subject) -> Files:
    """A build's stages without their headers, which have the command line; digests of its sources and weights."""
    return {
        "sources": subject.plan.model_file.sources,
        "code": {name: source.partition('\n"""\n')[2] or source for name, source in subject.files.items()},
        "weights": {subject.plan.weights.file: subject.plan.weights.digest},
    }


def _identical(differences: Json) -> bool:
    lists = (differences["settings"], differences["moved"], differences["owners"], differences["edges"])
    names = (differences["parameters"], differences["sources"], differences["code"])
    return (
        not any(lists)
        and not any(n for group in names for n in group.values())
        and not any(set(w["changed"]) - set(TIMES) for w in differences["workers"])
        and not differences["weights"]
        and differences["units"][0] == differences["units"][1]
        and differences["nodes"][0] == differences["nodes"][1]
    )


def _settings(first: Json, second: Json) -> list[Json]:
    pairs = [("fxpipe", first["fxpipe"], second["fxpipe"])]
    pairs += [(name, first["build"][name], second["build"][name]) for name in _SETTINGS]
    settings = [{name: row["value"] for name, row in facts["build"]["settings"].items()} for facts in (first, second)]
    pairs += [(f"setting {n}", settings[0].get(n), settings[1].get(n)) for n in {**settings[0], **settings[1]}]
    return [{"name": name, "first": a, "second": b} for name, a, b in pairs if a != b]


def _keyed(facts: Json) -> dict[tuple[str, int], Json]:
    """Units by their module and their place in it."""
    seen: Counter[str] = Counter()
    keyed = {}
    for unit in facts["units"]:
        path = unit["module"] or ""
        keyed[path, seen[path]] = unit
        seen[path] += 1
    return keyed


def _ways(before: Mapping[Any, int], now: Mapping[Any, int]) -> list[tuple[int, int, list[Any]]]:
    """What is on another worker now, as (from, to, keys)."""
    ways: dict[tuple[int, int], list[Any]] = defaultdict(list)
    for key in before:
        if now.get(key, before[key]) != before[key]:
            ways[before[key], now[key]].append(key)
    return [(*way, keys) for way, keys in sorted(ways.items())]


def _moved(first: Json, second: Json, phase: str) -> Iterator[Json]:
    before, now = _keyed(first), _keyed(second)
    cost = {"forward": "forward_ms", "backward": "backward_ms", "weights": "weight_ms"}[phase]
    for source, target, keys in _ways(*({key: unit[phase] for key, unit in side.items()} for side in (before, now))):
        yield {
            "phase": phase,
            "from": source,
            "to": target,
            "modules": list(dict.fromkeys(unit_name(path) for path, _ in keys)),
            "units": len(keys),
            "ms": sum(now[key][cost] for key in keys),
        }


def _owned(facts: Json) -> dict[str, int]:
    """Parameters with their owners."""
    return {name: worker["worker"] for worker in facts["workers"] for name in worker["owned_names"]}


def _workers(first: Json, second: Json) -> list[Json]:
    before, now = ({w["worker"]: w for w in facts["workers"]} for facts in (first, second))
    fields = (*TIMES, *_SIZES, "owned", "copies", "in_flight", "engines", "speed")
    rows = []
    for worker in sorted(before.keys() | now.keys()):
        sides = [side.get(worker) for side in (before, now)]
        one, two = ({name: side[name] for name in fields} if side else None for side in sides)
        changed = [name for name in fields if one is None or two is None or _differ(name, one[name], two[name])]
        rows.append({"worker": worker, "first": one, "second": two, "changed": changed})
    return rows


def _differ(name: str, one: Any, two: Any) -> bool:
    if name not in TIMES:
        return bool(one != two)
    return abs(one - two) > NOTICEABLE * max(one, two)


def _edges(first: Json, second: Json) -> list[Json]:
    """The rows of "edges", see `difference`."""
    before, now = ({_edge_key(e): e for e in facts["edges"]} for facts in (first, second))
    rows: dict[tuple[Any, ...], Json] = {}
    for key in before | now:
        one, two = before.get(key), now.get(key)
        if one and two and _value(one) == _value(two):
            continue
        edge: Json = before[key] if two is None else two
        way = {name: edge[name] for name in ("kind", "src", "src_phase", "dst", "dst_phase")}
        names: Json = {"went": [], "came": [], "changed": []}
        row = rows.setdefault(tuple(way.values()), way | names | {"before": 0, "after": 0})
        row["went" if two is None else "came" if one is None else "changed"].append(edge["name"].partition(":")[0])
        row["before"] += one["bytes"] if one else 0
        row["after"] += two["bytes"] if two else 0
    return list(rows.values())


def _edge_key(edge: Json) -> tuple[Any, ...]:
    """What identifies an edge: its route, and the name of its value, without the `:2` of a second route.

    All weights from one owner to one reader are one edge, whichever phases read them.
    """
    if edge["kind"] == "weights":
        return "weights", edge["src"], edge["dst"]
    name = edge["name"].partition(":")[0]
    return name, edge["kind"], edge["src"], edge["src_phase"], edge["dst"], edge["dst_phase"]


def _value(edge: Json) -> tuple[Any, ...]:
    """What an edge carries."""
    return edge["bytes"], edge["shape"], edge["dtype"], set(edge["names"])


def _names(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, list[str]]:
    """Names that only one of them has; and, if the values are digests, names whose digests differ."""
    both = [name for name in first if name in second]
    return {
        "first": [name for name in first if name not in second],
        "second": [name for name in second if name not in first],
        "changed": [n for n in both if isinstance(first[n], str) and first[n] != second[n]],
    }


def _balance(facts: Json) -> float:
    """The workers' mean time for a minibatch, divided by the slowest worker's."""
    workers, microbatches = facts["workers"], facts["build"]["microbatches"]
    totals = [microbatches * (w["forward_ms"] + w["backward_ms"]) + w["update_ms"] for w in workers]
    return sum(totals) / len(totals) / (max(totals) or 1.0)

"""Profiles: what every unit costs, in an order in which the units can run.

fxpipe's own form is JSON:

    {"units": [{"name": "blocks.0", "forward_ms": 1.5, "backward_ms": 3.0, "output_bytes": 4096,
                "parameter_bytes": 8192}, ...],
     "edges": [["blocks.0", "blocks.1"], ...]}

PipeDream's published profiles are text: a line a node, then a line an edge, indented by a tab:

    node2 -- Conv2d(3, 64) -- forward_compute_time=1.5, backward_compute_time=3.0, activation_size=4096.0, parameter_size=8192.0
        node1 -- node2

Sizes are bytes; an activation of several tensors is a list, `[6291456.0; 131072.0]`. The time of an Input node is the
data loader's: no worker computes it, so it counts as nothing.
"""  # noqa: E501

from __future__ import annotations

import heapq
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from fxpipe.errors import ProfileError

_NODE = re.compile(r"(?P<id>\S+) -- (?P<name>.*) -- (?P<costs>forward_compute_time=.*)")
_COSTS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")


@dataclass(frozen=True)
class Unit:
    """What one unit costs a microbatch. Times are milliseconds, sizes bytes."""

    name: str
    forward_ms: float
    backward_ms: float
    output_bytes: float = 0.0
    parameter_bytes: float = 0.0


@dataclass(frozen=True)
class Profile:
    """Units in a topological order, and the edges between them as pairs of positions."""

    units: tuple[Unit, ...]
    edges: tuple[tuple[int, int], ...]

    @property
    def total_ms(self) -> float:
        return sum(u.forward_ms + u.backward_ms for u in self.units)


def read_profile(path: str | Path) -> Profile:
    """A profile in either form; units come out in the order of their names' numbers as far as the edges allow.

    Raises:
        ProfileError: no such file, a malformed line, an edge to nowhere, or a cycle; names the line.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ProfileError(f"the profile {str(path)!r} cannot be read: {error}") from error
    if text.lstrip().startswith("{"):
        return _from_json(text, path.name)
    return _from_pipedream(text, path.name)


def _from_json(text: str, where: str) -> Profile:
    try:
        body = json.loads(text)
    except ValueError as error:
        raise ProfileError(f"not JSON: {error}", where=where) from error
    units = {}
    for i, row in enumerate(body.get("units", [])):
        units[str(row.get("name", i))] = _unit(row, f"{where}, unit {i}")
    edges = [tuple(edge) for edge in body.get("edges", [])]
    if not edges:
        names = list(units)
        edges = list(pairwise(names))
    return _sorted(units, edges, where, {name: i for i, name in enumerate(units)})


def _unit(row: Any, where: str) -> Unit:
    try:
        return Unit(
            str(row["name"]),
            _cost(row["forward_ms"]),
            _cost(row["backward_ms"]),
            _cost(row.get("output_bytes", 0.0)),
            _cost(row.get("parameter_bytes", 0.0)),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ProfileError(
            f"malformed unit: {error!r}", where=where, hint="a unit has name, forward_ms and backward_ms"
        ) from error


def _cost(value: Any) -> float:
    number = float(value)
    if not 0 <= number < float("inf"):
        raise ValueError(f"{value!r} is no time or size")
    return number


def _from_pipedream(text: str, where: str) -> Profile:
    units: dict[str, Unit] = {}
    edges: list[tuple[str, ...]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        place = f"{where}:{number}"
        if not line.strip():
            continue
        if line[0].isspace():
            ends = tuple(part.strip() for part in line.split(" -- "))
            if len(ends) != 2 or not all(ends):
                raise ProfileError(f"not an edge: {line.strip()!r}", where=place, hint="an edge is `node1 -- node2`")
            edges.append(ends)
            continue
        found = _NODE.fullmatch(line.strip())
        if found is None:
            raise ProfileError(f"not a node: {line.strip()[:80]!r}", where=place, hint="see PipeDream's graph.txt")
        units[found["id"]] = _pipedream_unit(found["name"], found["costs"], place)
    return _sorted(units, edges, where, {name: (len(name), name) for name in units})


def _pipedream_unit(name: str, text: str, where: str) -> Unit:
    costs = dict(part.split("=", 1) for part in text.split(", ") if "=" in part)
    try:
        forward, backward, output, parameters = (
            sum(_cost(v) for v in costs[key].strip("[]").split(";") if v.strip()) for key in _COSTS
        )
    except (KeyError, ValueError) as error:
        raise ProfileError(f"malformed costs: {error}", where=where, hint=f"a node has {', '.join(_COSTS)}") from error
    if re.fullmatch(r"Input\d*", name):
        forward = backward = 0.0
    return Unit(name, forward, backward, output, parameters)


def _sorted(units: dict[str, Unit], edges: Sequence[tuple[str, ...]], where: str, rank: dict[str, Any]) -> Profile:
    """Kahn's algorithm; of several units that could come next, the one of the least rank."""
    if not units:
        raise ProfileError("the profile has no units", where=where)
    waiting = dict.fromkeys(units, 0)
    behind: dict[str, list[str]] = {name: [] for name in units}
    for edge in edges:
        if len(edge) != 2 or any(end not in units for end in edge):
            raise ProfileError(f"the edge {' -- '.join(map(str, edge))} leads to no unit", where=where)
        behind[edge[0]].append(edge[1])
        waiting[edge[1]] += 1
    ready = [(rank[name], name) for name, count in waiting.items() if not count]
    heapq.heapify(ready)
    order: list[str] = []
    while ready:
        name = heapq.heappop(ready)[1]
        order.append(name)
        for follower in behind[name]:
            waiting[follower] -= 1
            if not waiting[follower]:
                heapq.heappush(ready, (rank[follower], follower))
    if len(order) < len(units):
        stuck = sorted(name for name, count in waiting.items() if count)
        raise ProfileError(f"the edges go round in a circle through {', '.join(stuck[:5])}", where=where)
    position = {name: i for i, name in enumerate(order)}
    return Profile(tuple(units[n] for n in order), tuple((position[a], position[b]) for a, b in edges))

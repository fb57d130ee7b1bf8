"""Profiles: what every unit costs, in an order in which the units can run.

fxpipe's own form is JSON (`fxpipe compile --save-profile`, `fxpipe plan`):

    {"units": [{"name": "blocks.0", "forward_ms": 1.5, "backward_ms": 2.0, "weight_ms": 1.0,
                "output_bytes": 4096, "saved_bytes": 16384, "parameter_bytes": 8192}, ...],
     "edges": [["blocks.0", "blocks.1"], ...]}

All costs are those of one microbatch. Only `name`, `forward_ms` and `backward_ms` must be there; what the others mean,
and what they are when left out, says `Unit`. Without `edges` each unit feeds the next. A unit's output travels along
its edges. Where it has several outputs with readers of their own, `activations` and `gradients` say so in place of
`edges`:

    "activations": [{"unit": "blocks.0", "bytes": 4096, "readers": ["blocks.1", "head"]}, ...]
    "gradients":   [{"unit": "head", "bytes": 4096, "readers": ["blocks.1"]}, ...]

`no_forward_cut` has units in front of which forward must not be cut, each with the reason (a buffer that is updated).
PipeDream's published profiles are read too: see `pipedream`.
"""

from __future__ import annotations

import dataclasses
import heapq
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from fxpipe.errors import ProfileError, near


@dataclass(frozen=True)
class Unit:
    """What one unit costs a microbatch. Times are milliseconds, sizes bytes.

    Attributes:
        forward_ms: F.
        backward_ms: B: the gradients of its inputs (and of its weights, where `weight_ms` is 0).
        weight_ms: W: the gradients of its weights.
        update_ms: the optimizer's update of its weights, once a minibatch.
        output_bytes: what it hands on in forward.
        gradient_bytes: the gradient of its output; as large as the output unless given.
        saved_bytes: what its B and W read of forward; as large as the output unless given, 0 if it takes no time.
        weight_saved_bytes: the part of `saved_bytes` that W alone reads.
        fixed_bytes: the part of `saved_bytes` that cannot be computed again (random masks).
        parameter_bytes: its weights; a worker that reads those of another is sent them after every update.
        frozen_bytes: weights that are not trained: every worker that reads them has them from the start.
        temporary_bytes: the most it holds while it runs, beside inputs and saved values.
    """

    name: str
    forward_ms: float
    backward_ms: float
    weight_ms: float = 0.0
    update_ms: float = 0.0
    output_bytes: float = 0.0
    gradient_bytes: float = -1.0
    saved_bytes: float = -1.0
    weight_saved_bytes: float = 0.0
    fixed_bytes: float = 0.0
    parameter_bytes: float = 0.0
    frozen_bytes: float = 0.0
    temporary_bytes: float = 0.0

    def __post_init__(self) -> None:
        if self.gradient_bytes < 0:
            object.__setattr__(self, "gradient_bytes", self.output_bytes)
        if self.saved_bytes < 0:
            works = self.forward_ms + self.backward_ms + self.weight_ms > 0
            object.__setattr__(self, "saved_bytes", self.output_bytes if works else 0.0)
        if self.weight_saved_bytes > self.saved_bytes:
            raise ProfileError(
                f"unit {self.name} saves {self.saved_bytes:g} bytes, of which weight_saved_bytes cannot be more"
            )

    @property
    def free(self) -> bool:
        """Whether it may run anywhere: it takes no time and holds nothing; it only hands values on."""
        names = {f.name for f in dataclasses.fields(self)} - {"name", "output_bytes", "gradient_bytes"}
        return not any(getattr(self, name) for name in names)


@dataclass(frozen=True)
class Value:
    """A value that one unit makes and others read: positions, and bytes."""

    producer: int
    bytes: float
    readers: tuple[int, ...]


@dataclass(frozen=True)
class Profile:
    """Units in a topological order, and the values that travel between them.

    Attributes:
        activations: forward values; readers lie behind their producer.
        gradients: backward values; readers lie in front of their producer.
        uncut: positions (in front of that unit) where forward must not be cut, each with the reason.
    """

    units: tuple[Unit, ...]
    activations: tuple[Value, ...]
    gradients: tuple[Value, ...]
    uncut: Mapping[int, str] = field(default_factory=dict)

    def total_ms(self, microbatches: int = 1) -> float:
        """All work of a microbatch: F + B + W, and its share of the update."""
        return sum(u.forward_ms + u.backward_ms + u.weight_ms + u.update_ms / microbatches for u in self.units)

    def split_backward(self, fraction: float) -> Profile:
        """The same with W a fraction of each backward that has parameters and no W yet."""
        if not 0 <= fraction < 1:
            raise ProfileError(f"the fraction of W is {fraction}, it must lie between 0 and 1")
        units = tuple(
            dataclasses.replace(u, backward_ms=u.backward_ms * (1 - fraction), weight_ms=u.backward_ms * fraction)
            if u.parameter_bytes and not u.weight_ms
            else u
            for u in self.units
        )
        return dataclasses.replace(self, units=units)

    def to_json(self) -> str:
        """The documented form; `from_json` reads it back to an equal profile."""
        names = [u.name for u in self.units]

        def rows(values: Sequence[Value]) -> list[dict[str, Any]]:
            return [
                {"unit": names[v.producer], "bytes": v.bytes, "readers": [names[r] for r in v.readers]} for v in values
            ]

        edges = sorted({(v.producer, r) for v in self.activations for r in v.readers})
        body = {
            "units": [dataclasses.asdict(u) for u in self.units],
            "edges": [[names[a], names[b]] for a, b in edges],
            "activations": rows(self.activations),
            "gradients": rows(self.gradients),
            "no_forward_cut": {names[p]: self.uncut[p] for p in sorted(self.uncut)},
        }
        return json.dumps(body, indent=1) + "\n"


def from_json(text: str, where: str) -> Profile:
    """Read the documented form.

    Raises:
        ProfileError: not JSON, a malformed unit, an edge to nowhere, or a cycle; names the line or the unit.
    """
    try:
        body = json.loads(text)
    except ValueError as error:
        line = getattr(error, "lineno", None)
        raise ProfileError(f"not JSON: {error}", where=f"{where}:{line}" if line else where) from error
    if isinstance(body, dict):
        _check_form(body, where)
    rows = body.get("units") if isinstance(body, dict) else None
    if not isinstance(rows, list) or not rows:
        raise ProfileError("the profile has no units", where=where, hint='it is {"units": [...], "edges": [...]}')
    units: dict[str, Unit] = {}
    for i, row in enumerate(rows):
        unit = _unit(row, f"{where}, unit {i}")
        if unit.name in units:
            raise ProfileError(f"two units are called {unit.name!r}", where=f"{where}, unit {i}")
        units[unit.name] = unit
    rank = {name: i for i, name in enumerate(units)}
    if "activations" in body:
        outputs = _values(body["activations"], units, f"{where}, activations")
    else:
        outputs = values_of_edges(units, _edges(body.get("edges"), units, where))
    order = in_order(units, outputs, where, rank)
    activations = tuple(located(outputs, order))
    if "gradients" in body:
        gradients = tuple(located(_values(body["gradients"], units, f"{where}, gradients"), order))
        for v in gradients:
            if any(r > v.producer for r in v.readers):
                raise ProfileError(
                    f"a gradient runs forward, from {list(order)[v.producer]!r}", where=f"{where}, gradients"
                )
    else:
        gradients = backward_values([units[n] for n in order], activations)
    reasons = body.get("no_forward_cut", {})
    uncut = {order[_known(name, units, f"{where}, no_forward_cut")]: str(reasons[name]) for name in reasons}
    return Profile(tuple(units[n] for n in order), activations, gradients, uncut)


_FORM = {"units": list, "edges": list, "activations": list, "gradients": list, "no_forward_cut": dict}


def _check_form(body: Mapping[str, Any], where: str) -> None:
    for key, found in body.items():
        if key not in _FORM:
            raise ProfileError(f"a profile has no {key!r}{near(key, _FORM)}", where=where)
        if not isinstance(found, _FORM[key]):
            kind = "a list" if _FORM[key] is list else "an object"
            raise ProfileError(f"{key} is {str(found)[:40]}, not {kind}", where=f"{where}, {key}")


Output = tuple[str, float, Sequence[str]]  # producer, bytes, readers; by name


def values_of_edges(units: Mapping[str, Unit], edges: Sequence[tuple[str, str]]) -> list[Output]:
    """One value a unit: its output, read along all its edges."""
    readers: dict[str, list[str]] = {}
    for source, target in edges:
        readers.setdefault(source, []).append(target)
    return [(name, units[name].output_bytes, names) for name, names in readers.items()]


def backward_values(units: Sequence[Unit], activations: Sequence[Value]) -> tuple[Value, ...]:
    """The gradients of activations: each reader's passes on to the reader before it, where they are added up."""
    found = []
    for v in activations:
        whole = units[v.producer].output_bytes
        size = units[v.producer].gradient_bytes * (v.bytes / whole if whole else 1.0)
        stops = sorted({v.producer, *v.readers})
        found += [Value(after, size, (before,)) for before, after in pairwise(stops)]
    return tuple(in_turn(found))


def in_order(
    units: Mapping[str, Unit], outputs: Sequence[Output], where: str, rank: Mapping[str, Any]
) -> dict[str, int]:
    """Positions by name, in a topological order; of several units that could come next, the one of the least rank.

    Kahn's algorithm. Raises ProfileError for a cycle.
    """
    waiting = dict.fromkeys(units, 0)
    behind: dict[str, list[str]] = {name: [] for name in units}
    for source, _, readers in outputs:
        for target in readers:
            behind[source].append(target)
            waiting[target] += 1
    ready = [(rank[name], name) for name, count in waiting.items() if not count]
    heapq.heapify(ready)
    order: dict[str, int] = {}
    while ready:
        name = heapq.heappop(ready)[1]
        order[name] = len(order)
        for follower in behind[name]:
            waiting[follower] -= 1
            if not waiting[follower]:
                heapq.heappush(ready, (rank[follower], follower))
    if len(order) < len(units):
        stuck = sorted(name for name, count in waiting.items() if count)
        raise ProfileError(f"the edges go round in a circle through {', '.join(stuck[:5])}", where=where)
    return order


def located(outputs: Sequence[Output], order: Mapping[str, int]) -> list[Value]:
    """Values by position instead of by name, in the order of their producers."""
    found = [Value(order[name], size, tuple(sorted({order[r] for r in readers}))) for name, size, readers in outputs]
    return in_turn(found)


def in_turn(values: Iterable[Value]) -> list[Value]:
    """Values in the order in which a profile has them."""
    return sorted(values, key=lambda v: (v.producer, v.readers, v.bytes))


MOST = 1e30
"""No time and no size is larger: sums of them stay numbers."""

_FIELDS = {f.name for f in dataclasses.fields(Unit)}


def _unit(row: Any, where: str) -> Unit:
    if not isinstance(row, dict):
        raise ProfileError(f"malformed unit: {row!r}", where=where, hint="a unit is an object with name and costs")
    unknown = next((key for key in row if key not in _FIELDS), None)
    if unknown is not None:
        raise ProfileError(f"a unit has no {unknown!r}{near(unknown, _FIELDS)}", where=where)
    missing = [key for key in ("name", "forward_ms", "backward_ms") if key not in row]
    if missing:
        raise ProfileError(
            f"the unit lacks {' and '.join(missing)}", where=where, hint="a unit has name, forward_ms and backward_ms"
        )
    costs = {key: cost(v, f"{where}, {key}") for key, v in row.items() if key != "name"}
    try:
        return Unit(str(row["name"]), **costs)
    except ProfileError as error:
        error.where = where
        raise


def cost(value: Any, where: str) -> float:
    """A time or a size: a finite number not below zero."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = -1.0
    if isinstance(value, bool) or not 0 <= number < MOST:
        raise ProfileError(f"{value!r} is no time or size", where=where)
    return number


def _edges(rows: Any, units: Mapping[str, Unit], where: str) -> list[tuple[str, str]]:
    if not rows:
        return list(pairwise(units))
    edges = []
    for i, row in enumerate(rows):
        place = f"{where}, edge {i}"
        if not isinstance(row, list) or len(row) != 2:
            raise ProfileError(f"not an edge: {row!r}", where=place, hint='an edge is ["from", "to"]')
        edges.append((_known(row[0], units, place), _known(row[1], units, place)))
    return edges


def _values(rows: Any, units: Mapping[str, Unit], where: str) -> list[Output]:
    found: list[Output] = []
    for i, row in enumerate(rows):
        place = f"{where}, row {i}"
        try:
            producer, size, readers = row["unit"], row["bytes"], list(row["readers"])
        except (TypeError, KeyError) as error:
            raise ProfileError(
                f"malformed value: {row!r}", where=place, hint="a value has unit, bytes and readers"
            ) from error
        found.append((_known(producer, units, place), cost(size, place), [_known(r, units, place) for r in readers]))
    return found


def _known(name: Any, units: Mapping[str, Unit], where: str) -> str:
    if not isinstance(name, str) or name not in units:
        raise ProfileError(f"there is no unit {name!r}{near(str(name), units)}", where=where)
    return str(name)

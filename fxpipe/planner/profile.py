"""Profiles: the costs of units, in an order in which the units can run.

fxpipe's own form is JSON, a build's `profile.json`, which `fxpipe plan` reads:

    {"units": [{"name": "blocks.0", "forward_ms": 1.5, "backward_ms": 2.0, "weight_ms": 1.0,
                "output_bytes": 4096, "saved_bytes": 16384, "parameter_bytes": 8192}, ...],
     "edges": [["blocks.0", "blocks.1"], ...]}

All costs are per microbatch. Only `name`, `forward_ms` and `backward_ms` are required; `Unit` says what the others mean
and what their defaults are. Without `edges`, each unit feeds the next. A unit's output travels along its edges. If a
unit has several outputs with different readers, use `activations` and `gradients` instead of `edges`:

    "activations": [{"unit": "blocks.0", "bytes": 4096, "readers": ["blocks.1", "head"]}, ...]
    "gradients":   [{"unit": "head", "bytes": 4096, "readers": ["blocks.1"]}, ...]

An activation with `"batch": true` is the batch's own: it belongs to the first unit, and no reader waits for that unit.

`no_forward_cut` has units before which forward must not be cut, each with the reason (a buffer that is updated).
`device` is the device of the times. `pipedream` reads PipeDream's published profiles.
"""

from __future__ import annotations

import dataclasses
import heapq
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fxpipe.errors import FxpipeError, ProfileError, near
from fxpipe.plan.cost_records import OptimizerCosts
from fxpipe.typed_json import Malformed, convert, explained, parse

if TYPE_CHECKING:
    from fxpipe.planner.sums_over_runs import Places

MOST = 1e30
"""Times and sizes are below this, so that sums stay finite."""


@dataclass(frozen=True)
class SavingLevel:
    """What a unit saves if its worker's backward computes some of its forward again, and what that costs.

    Attributes:
        saved_bytes: what its forward still saves for its B and W.
        again_ms: how long its backward computes again, in milliseconds.
        made_bytes: the recomputed values that it reads.
        alive_bytes: the most recomputed values that a backward of all units holds while it is at this unit.
        deferred_bytes: the recomputed values that its W reads; a backward with a separate W passes them on.
    """

    saved_bytes: float
    again_ms: float
    made_bytes: float = 0.0
    alive_bytes: float = 0.0
    deferred_bytes: float = 0.0


@dataclass(frozen=True)
class Unit:
    """What one unit costs per microbatch. Times are milliseconds, sizes bytes.

    Attributes:
        forward_ms: F.
        backward_ms: B: the gradients of its inputs (and of its weights, if `weight_ms` is 0).
        weight_ms: W: the gradients of its weights.
        update_ms: the optimizer's update of its weights, once per minibatch.
        output_bytes: what it passes on in forward.
        gradient_bytes: the gradient of its output; by default as large as the output.
        saved_bytes: what its B and W read from forward; by default as large as the output, or 0 if it takes no time.
        weight_saved_bytes: the part of `saved_bytes` that only W reads.
        fixed_bytes: the part of `saved_bytes` that cannot be computed again (random masks).
        parameter_bytes: its weights; a worker that reads those of another receives them after every update.
        frozen_bytes: weights that are not trained; every worker that reads them has them from the start.
        temporary_bytes: the most it holds while it runs, in addition to inputs and saved values.
        levels: what it saves instead as more and more is computed again; a worker uses one level for all its units, and
            also keeps what enters it. If no unit has levels, there is one: each unit keeps its inputs and is computed
            again.
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
    levels: tuple[SavingLevel, ...] = ()

    def __post_init__(self) -> None:
        if self.gradient_bytes < 0:
            object.__setattr__(self, "gradient_bytes", self.output_bytes)
        if self.saved_bytes < 0:
            works = self.forward_ms + self.backward_ms + self.weight_ms > 0
            object.__setattr__(self, "saved_bytes", self.output_bytes if works else 0.0)
        if self.weight_saved_bytes > self.saved_bytes:
            raise ProfileError(f"weight_saved_bytes of unit {self.name} is above its saved_bytes, {self.saved_bytes:g}")

    @property
    def free(self) -> bool:
        """Whether it may run anywhere: it takes no time, holds nothing, and only passes values on."""
        names = {f.name for f in dataclasses.fields(self)} - {"name", "output_bytes", "gradient_bytes"}
        return not any(getattr(self, name) for name in names)


@dataclass(frozen=True)
class Value:
    """A value that one unit makes and others read: positions, and bytes.

    Attributes:
        batch: it is the batch's own, which worker 0 has from the start; its producer is unit 0.
    """

    producer: int
    bytes: float
    readers: tuple[int, ...]
    batch: bool = False


@dataclass(frozen=True)
class Profile:
    """Units in a topological order, and the values that travel between them.

    Attributes:
        activations: forward values; readers come after their producer.
        gradients: backward values; readers come before their producer.
        uncut: positions (before that unit) where forward must not be cut, each with the reason.
        device: the device of the times, such as `cuda: NVIDIA H200`, or `h100, computed`; '' if unknown.
        spread: the largest share of all work that two halves of the measurements put on different sides of a cut.
        doubt: how far the sum of the parts' times is from the whole's, as a share; 0 if that is not too far.
    """

    units: tuple[Unit, ...]
    activations: tuple[Value, ...]
    gradients: tuple[Value, ...]
    uncut: Mapping[int, str] = field(default_factory=dict)
    device: str = ""
    spread: float = 0.0
    doubt: float = 0.0

    @cached_property
    def reads(self) -> tuple[Places, Places, Places]:
        """Who reads what others make: a row (unit, later reader) for each activation, the readers of the batch's own
        values, and a row (earlier reader, unit) for each gradient."""
        import numpy as np  # --help must be instant

        own = [(v.producer, reader) for v in self.activations if not v.batch for reader in v.readers]
        batch = [reader for v in self.activations if v.batch for reader in v.readers]
        sums = [(reader, v.producer) for v in self.gradients for reader in v.readers]
        pairs = (np.array(sorted(set(some)), dtype=np.int64).reshape(-1, 2) for some in (own, sums))
        forward, backward = pairs
        return forward, np.unique(np.array(batch, dtype=np.int64)), backward

    def noise(self, workers: int) -> float:
        """How far a worker's time may be off, as a share of it, if `workers` share the work."""
        return min(1.0, max(self.doubt, workers * self.spread))

    def total_ms(self, microbatches: int = 1) -> float:
        """All work of a microbatch: F + B + W, and its share of the update."""
        return sum(u.forward_ms + u.backward_ms + u.weight_ms + u.update_ms / microbatches for u in self.units)

    def split_backward(self, fraction: float) -> Profile:
        """The same profile with W as a fraction of each backward that has parameters but no W yet."""
        if not 0 <= fraction < 1:
            raise ProfileError(f"the weight gradients' share of backward must be from 0 to below 1, not {fraction}")
        units = tuple(
            dataclasses.replace(u, backward_ms=u.backward_ms * (1 - fraction), weight_ms=u.backward_ms * fraction)
            if u.parameter_bytes and not u.weight_ms
            else u
            for u in self.units
        )
        return dataclasses.replace(self, units=units)

    def to_json(self) -> str:
        """The documented form; `read_profile_json` reads it back to an equal profile."""
        names = [u.name for u in self.units]

        def rows(values: Sequence[Value]) -> list[dict[str, Any]]:
            return [
                {"unit": names[v.producer], "bytes": v.bytes, "readers": [names[r] for r in v.readers]}
                | ({"batch": True} if v.batch else {})
                for v in values
            ]

        body = {
            "units": [dataclasses.asdict(u) for u in self.units],
            "activations": rows(self.activations),
            "gradients": rows(self.gradients),
            "no_forward_cut": {names[p]: self.uncut[p] for p in sorted(self.uncut)},
            "device": self.device,
            "spread": self.spread,
            "doubt": self.doubt,
        }
        return json.dumps(body, indent=1) + "\n"


@dataclass(frozen=True)
class PlanInput:
    """What the planner plans: the costs of a model, or of a profile from a file.

    Attributes:
        whole: the profile for cuts that leave W with B.
        separate: the profile for three-way cuts: calls that make both input and weight gradients are split in two. The
            same object as `whole` if there are none.
        microbatches: of a minibatch.
        samples: of a minibatch; None for a profile from a file.
        optimizer: its costs.
        device: 'cpu' or 'cuda'.
        warnings: of capture and costs, for the user.
        batch_norm: where batch norms normalise each microbatch separately; '' if there are none.
    """

    whole: Profile
    separate: Profile
    microbatches: int
    samples: int | None
    optimizer: OptimizerCosts
    device: str = "cpu"
    warnings: tuple[str, ...] = ()
    batch_norm: str = ""

    def profiles(self, modes: Sequence[str]) -> list[tuple[Profile, list[str]]]:
        """Each profile with the modes that it serves."""
        if self.separate is self.whole:
            return [(self.whole, list(modes))]
        groups = [(p, [m for m in modes if self.of(m) is p]) for p in (self.whole, self.separate)]
        return [(profile, wanted) for profile, wanted in groups if wanted]

    def of(self, mode: str) -> Profile:
        """The profile of a mode."""
        return self.separate if mode == "three-way" else self.whole


@dataclass(frozen=True)
class _ValueJson:
    unit: str
    bytes: float
    readers: tuple[str, ...]
    batch: bool = False


@dataclass(frozen=True)
class _ProfileJson:
    """The documented form."""

    units: tuple[Unit, ...]
    edges: tuple[tuple[str, str], ...] = ()
    activations: tuple[_ValueJson, ...] | None = None
    gradients: tuple[_ValueJson, ...] | None = None
    no_forward_cut: dict[str, str] = field(default_factory=dict)
    device: str = ""
    spread: float = 0.0
    doubt: float = 0.0


_FORM = 'write {"units": [{"name": "a", "forward_ms": 1, "backward_ms": 2}, ...], "edges": [["a", "b"], ...]}'


def read_profile_json(source: Path | str, where: str = "", *, error: type[FxpipeError], hint: str = _FORM) -> Profile:
    """Read the documented form, from a file, or from a text whose errors name `where`.

    Raises:
        error: not JSON, a malformed unit, an edge to nothing, or a cycle; names the line or the unit.
    """
    with explained(where or source, error=error, hint=hint):
        body = parse(source)
        file = convert(body, _ProfileJson)
        check_amounts(body)
        return _profile(file)


def check_amounts(found: Any, place: str = ", $") -> None:
    """Raise Malformed unless all numbers in JSON are times or sizes, counts or ratios."""
    for key, value in found.items() if isinstance(found, dict) else ():
        check_amounts(value, f"{place}.{key[:80]}")
    for i, value in enumerate(found) if isinstance(found, list | tuple) else ():
        check_amounts(value, f"{place}[{i}]")
    if isinstance(found, int | float) and not 0 <= found < MOST:
        raise Malformed(f"{found:g} is not a time or size", place)


def _profile(file: _ProfileJson) -> Profile:
    units: dict[str, Unit] = {}
    for i, unit in enumerate(file.units):
        if unit.name in units:
            raise Malformed(f"two units are called {unit.name!r}", f", $.units[{i}]")
        units[unit.name] = unit
    if not units:
        raise Malformed("the profile has no units", ", $.units")
    for i, edge in enumerate(file.edges):
        _check_known(edge, units, f", $.edges[{i}]")
    if file.activations is None:
        outputs = values_of_edges(units, file.edges or list(pairwise(units)))
    else:
        outputs = _outputs(file.activations, units, "activations")
    rank = {name: i for i, name in enumerate(units)}
    order = in_order(units, outputs, rank)
    activations = tuple(located(outputs, order))
    if batch := [row for row in file.activations or () if row.batch]:
        others = [row for row in file.activations or () if not row.batch]
        own = [dataclasses.replace(v, batch=True) for v in located(_outputs(batch, units, "activations"), order)]
        activations = tuple(in_turn([*own, *located(_outputs(others, units, "activations"), order)]))
    if file.gradients is None:
        gradients = backward_values([units[n] for n in order], activations)
    else:
        gradients = tuple(located(_outputs(file.gradients, units, "gradients"), order))
        for v in gradients:
            if any(r > v.producer for r in v.readers):
                raise Malformed(f"a gradient of {list(order)[v.producer]!r} goes to a later unit", ", $.gradients")
    _check_known(file.no_forward_cut, units, ", $.no_forward_cut")
    uncut = {order[name]: reason for name, reason in file.no_forward_cut.items()}
    return Profile(tuple(units[n] for n in order), activations, gradients, uncut, file.device, file.spread, file.doubt)


def _outputs(rows: Sequence[_ValueJson], units: Mapping[str, Unit], name: str) -> list[Output]:
    for i, row in enumerate(rows):
        _check_known((row.unit, *row.readers), units, f", $.{name}[{i}]")
    return [(row.unit, row.bytes, row.readers) for row in rows]


def _check_known(names: Iterable[str], units: Mapping[str, Unit], place: str) -> None:
    for name in names:
        if name not in units:
            raise Malformed(f"there is no unit {name!r}{near(name, units)}", place)


Output = tuple[str, float, Sequence[str]]  # producer, bytes, readers; by name


def values_of_edges(units: Mapping[str, Unit], edges: Sequence[tuple[str, str]]) -> list[Output]:
    """One value per unit: its output, read along all its edges."""
    readers: dict[str, list[str]] = {}
    for source, target in edges:
        readers.setdefault(source, []).append(target)
    return [(name, units[name].output_bytes, names) for name, names in readers.items()]


def backward_values(units: Sequence[Unit], activations: Sequence[Value]) -> tuple[Value, ...]:
    """The gradients of activations: each reader passes its gradient to the reader before it, which adds its own."""
    found = []
    for v in activations:
        whole = units[v.producer].output_bytes
        size = units[v.producer].gradient_bytes * (v.bytes / whole if whole else 1.0)
        stops = sorted({v.producer, *v.readers})
        found += [Value(after, size, (before,)) for before, after in pairwise(stops)]
    return tuple(in_turn(found))


def in_order(units: Mapping[str, Unit], outputs: Sequence[Output], rank: Mapping[str, Any]) -> dict[str, int]:
    """Positions by name, in a topological order; among units that could come next, the one with the lowest rank.

    Kahn's algorithm. Raises Malformed for a cycle.
    """
    waiting = dict.fromkeys(units, 0)
    after: dict[str, list[str]] = {name: [] for name in units}
    for source, _, readers in outputs:
        for target in readers:
            after[source].append(target)
            waiting[target] += 1
    ready = [(rank[name], name) for name, count in waiting.items() if not count]
    heapq.heapify(ready)
    order: dict[str, int] = {}
    while ready:
        name = heapq.heappop(ready)[1]
        order[name] = len(order)
        for follower in after[name]:
            waiting[follower] -= 1
            if not waiting[follower]:
                heapq.heappush(ready, (rank[follower], follower))
    if len(order) < len(units):
        stuck = sorted(name for name, count in waiting.items() if count)
        raise Malformed(f"the edges form a cycle through {', '.join(stuck[:5])}")
    return order


def located(outputs: Sequence[Output], order: Mapping[str, int]) -> list[Value]:
    """Values by position instead of by name, in the order of their producers."""
    found = [Value(order[name], size, tuple(sorted({order[r] for r in readers}))) for name, size, readers in outputs]
    return in_turn(found)


def in_turn(values: Iterable[Value]) -> list[Value]:
    """Values in the order of a profile."""
    return sorted(values, key=lambda v: (v.producer, v.readers, v.bytes))

"""The costs of every unit of a costed program: the planner's view of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import fx

from fxpipe.ir.aten import is_getitem, is_random, is_view, viewed
from fxpipe.ir.program import Program, info, is_call_of, size_of, unit_name, value
from fxpipe.passes.analysis.levels import levels_of_units
from fxpipe.passes.analysis.sources import sources_of
from fxpipe.planner.profile import Profile, Unit, Value, in_turn


def profile_of(program: Program, update_seconds_per_byte: float = 0.0, levels: bool = False) -> Profile:
    """The profile of a program whose nodes have their costs, for one microbatch.

    What `rematerialize` will compute where it is used (masks, casts of weights, checkpoint regions) is neither sent nor
    saved. With `levels`, units list what they save at each level of recomputation. Linear in the graph.
    """
    return _Profiler(program, update_seconds_per_byte).profile(levels)


class _Profiler:
    def __init__(self, program: Program, update_seconds_per_byte: float) -> None:
        self.program = program
        self.rate = update_seconds_per_byte
        self.count = len(program.units)
        self.inputs = {b.node for b in program.batch if b.node}
        self.updated = set(program.updates())
        self.nodes = list(program)
        sources = sources_of(program)
        self.anywhere = sources.cheap | sources.fixed  # the worker or backward that needs them makes them
        # What the program lacks is 0, not the default for profiles that leave it out.
        nothing = dict.fromkeys(("forward_ms", "backward_ms", "saved_bytes", "gradient_bytes"), 0.0)
        self.rows: list[dict[str, Any]] = [{**nothing} for _ in range(self.count)]

    def profile(self, levels: bool) -> Profile:
        """Everything, unit by unit."""
        self._times()
        self._saved()
        self._weights()
        names: dict[str, int] = {}
        units = []
        savings = levels_of_units(self.program) if levels else [()] * self.count
        for path, row, saving in zip(self.program.units, self.rows, savings, strict=True):
            name = unit_name(path)
            names[name] = names.get(name, 0) + 1
            units.append(Unit(name if names[name] == 1 else f"{name} #{names[name]}", **row, levels=saving))
        glued = glued_positions(self.program)
        activations, gradients = in_turn(self._activations()), in_turn(self._gradients())
        return Profile(tuple(units), tuple(activations), tuple(gradients), glued)

    def _add(self, unit: int, key: str, amount: float) -> None:
        row = self.rows[max(unit, 0)]
        row[key] = row.get(key, 0.0) + amount

    def _times(self) -> None:
        for node in self.nodes:
            record = info(node)
            key = "forward_ms" if record.phase == "F" else "weight_ms" if record.weight else "backward_ms"
            self._add(record.unit, key, 1e3 * (record.seconds or 0.0))
            if record.phase == "F" and record.region is not None and node not in self.anywhere:
                self._add(record.unit, "backward_ms", 1e3 * (record.seconds or 0.0))  # a checkpoint computes it again
            held = size_of(value(node)) + sum(size_of(value(n)) for n in node.all_input_nodes if n.op != "placeholder")
            row = self.rows[record.unit]
            row["temporary_bytes"] = max(row.get("temporary_bytes", 0.0), 0.0 if is_view(node) else held)

    def _activations(self) -> Iterable[Value]:
        """Forward values that other units read, and the batch's own, which are on worker 0."""
        for node in self.program.graph.nodes:
            if node.op == "call_function" and (info(node).phase != "F" or node in self.anywhere):
                continue
            if node.op != "call_function" and node.name not in self.inputs:
                continue
            unit = info(node).unit if node.op == "call_function" else 0
            readers = _units(n for n in node.users if is_call_of(n, "F") and n not in self.anywhere)
            later = tuple(sorted(r for r in readers if r > unit))
            if later:
                yield Value(unit, size_of(value(node)), later, batch=node.op != "call_function")

    def _gradients(self) -> Iterable[Value]:
        for node in self.nodes:
            if info(node).phase != "B":
                continue
            unit = info(node).unit
            readers = _units(n for n in node.users if is_call_of(n, "B") and not info(n).weight)
            earlier = tuple(sorted(r for r in readers if r < unit))
            if earlier and not info(node).weight:
                yield Value(unit, size_of(value(node)), earlier)

    def _saved(self) -> None:
        """For every unit what its B and W read from forward, and the gradients that its W reads from B.

        A value that several units' backwards read counts for the last of them, whose backward runs first.
        """
        readers: dict[fx.Node, list[fx.Node]] = {}
        for node in self.nodes:
            again = info(node).phase == "F" and info(node).region is not None  # a checkpoint reads in backward, too
            if info(node).phase == "F" and not again:
                continue
            for source in node.all_input_nodes:
                if self._is_saved(source, node):
                    readers.setdefault(viewed(source), []).append(node)
        for root, users in readers.items():
            last = max(users, key=lambda n: info(n).unit)
            size = size_of(value(root))
            self._add(info(last).unit, "saved_bytes", size)
            if all(info(n).weight for n in users):
                self._add(info(last).unit, "weight_saved_bytes", size)
            if root.op == "call_function" and _by_chance(root):
                self._add(info(last).unit, "fixed_bytes", size)
        handed: set[tuple[fx.Node, int]] = set()
        for node in self.nodes:
            if not info(node).weight:
                continue
            for source in node.all_input_nodes:
                of_b = is_call_of(source, "B") and not info(source).weight
                key = (viewed(source), info(node).unit)
                if of_b and key not in handed:
                    handed.add(key)
                    self._add(info(node).unit, "gradient_bytes", size_of(value(source)))

    def _is_saved(self, source: fx.Node, reader: fx.Node) -> bool:
        if source.op != "call_function":
            return source.name in self.inputs
        record = info(source)
        if record.phase != "F" or source in self.anywhere:
            return False
        if record.region is None or _by_chance(source):
            return True
        return info(reader).phase == "F" and info(reader).region != record.region

    def _weights(self) -> None:
        gradients = self.program.gradients()
        placeholders = self.program.placeholders
        for parameter in self.program.parameters:
            node = placeholders[parameter.node]
            size = size_of(value(node))
            gradient = gradients.get(parameter.node)
            if gradient is not None and gradient.op == "call_function":
                self._add(info(gradient).unit, "parameter_bytes", size)
                self._add(info(gradient).unit, "update_ms", 1e3 * self.rate * size)
                continue
            units = [info(n).unit for n in node.users if n.op == "call_function"]
            self._add(min(units, default=0), "frozen_bytes", size)


def glued_positions(program: Program) -> dict[int, str]:
    """Positions where forward must not be cut, each with the updated buffer that forbids it."""
    glued: dict[int, str] = {}
    placeholders = program.placeholders
    for name, new in program.updates().items():
        readers = [n for n in placeholders[name].users if is_call_of(n, "F")]
        units = [info(n).unit for n in readers]
        if new.op == "call_function":
            units.append(info(new).unit)
        for position in range(min(units, default=0) + 1, max(units, default=0) + 1):
            glued.setdefault(position, name)
    return glued


def _units(nodes: Iterable[fx.Node]) -> set[int]:
    return {info(n).unit for n in nodes}


def _by_chance(node: fx.Node) -> bool:
    return is_random(node) or (is_getitem(node) and is_random(node.all_input_nodes[0]))

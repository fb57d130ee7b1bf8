"""The module tree in a terminal: where each module's forward and backward run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console

from fxpipe.cli.output import print_columns
from fxpipe.inspection.tables import APART as DIFFER
from fxpipe.inspection.tables import modules

OWN = "(own code)"

Module = dict[str, Any]


def print_modules(rows: Sequence[Module], console: Console, depth: int | None = None) -> None:
    """The tree, with a line for each module or group of equal siblings, `depth` levels deep. By default a module is
    open if its inside is on different workers."""
    lines = list(_Tree(rows, depth).lines())
    print_columns(modules(lines), console)
    if any(line["apart"] for line in lines):
        console.print(DIFFER + " forward, backward and weight gradients on different workers")


def _line(label: str, rows: Sequence[Module], opened: bool = False) -> Module:
    """A line of the tree, as a row of `modules`; if it is open, the lines below it have the mark instead."""
    numbers = ("parameters", "parameter_bytes", "nodes", "apart")
    line: Module = {name: sum(row[name] for row in rows) for name in numbers}
    for phase in ("forward", "backward"):
        line[phase] = [place for row in rows for place in row[phase]]
    owners = sorted({owner for row in rows for owner in row["owners"]})
    return line | {"label": label, "owners": owners} | ({"apart": 0} if opened else {})


class _Tree:
    def __init__(self, modules: Sequence[Module], depth: int | None) -> None:
        self.modules = modules
        self.depth = depth
        self.children: list[list[int]] = [[] for _ in modules]
        for i, module in enumerate(modules):
            if module["parent"] is not None:
                self.children[module["parent"]].append(i)

    def lines(self) -> Iterator[Module]:
        """The lines in their order, with the branches in front of the names."""
        yield _line("(model)", [self.modules[0]], self._opens(0))
        if self._opens(0):
            yield from self._below(0, "")

    def _below(self, number: int, indent: str) -> Iterator[Module]:
        rows: list[tuple[str, tuple[int, ...]]] = [(self._name(group), group) for group in self._groups(number)]
        own_code = self._own(number)
        for i, (name, group) in enumerate(rows):
            loss = self.modules[group[0]]["path"] is None
            if loss and own_code is not None:
                yield _line(f"{indent}├ {OWN}", [own_code])
                own_code = None
            last = i == len(rows) - 1 and own_code is None
            opened = len(group) == 1 and self._opens(group[0])
            yield _line(f"{indent}{'└' if last else '├'} {name}", [self.modules[m] for m in group], opened)
            if opened:
                yield from self._below(group[0], f"{indent}{' ' if last else '│'} ")
        if own_code is not None:
            yield _line(f"{indent}└ {OWN}", [own_code])

    def _name(self, group: tuple[int, ...]) -> str:
        """The module's own name; if that is a number, with its parent's name before it."""
        names = []
        for number in dict.fromkeys((group[0], group[-1])):
            module = self.modules[number]
            parent = self.modules[module["parent"]]["name"] if module["name"].isdigit() else ""
            names.append(f"{parent}.{module['name']}" if parent else module["name"])
        return " … ".join(names)

    def _opens(self, number: int) -> bool:
        module = self.modules[number]
        if not self.children[number]:
            return False
        if self.depth is not None:
            return bool(module["depth"] < self.depth)
        return number == 0 or _parted(module)

    def _groups(self, number: int) -> Iterator[tuple[int, ...]]:
        """The children. Neighbours form a group if their names are numbers and their workers the same."""
        group: list[int] = []
        for child in self.children[number]:
            if group and not (self._folds(group[-1], child)):
                yield tuple(group)
                group = []
            group.append(child)
        if group:
            yield tuple(group)

    def _folds(self, one: int, other: int) -> bool:
        a, b = self.modules[one], self.modules[other]
        if self.depth is not None or not (a["name"].isdigit() and b["name"].isdigit()):
            return False
        return not _parted(a) and not _parted(b) and _places(a) == _places(b)

    def _own(self, number: int) -> Module | None:
        """The part of a module's own code that is in none of its children, if that is on different workers."""
        module = self.modules[number]
        own_code: Module = {"path": OWN, "parameters": 0, "parameter_bytes": 0, "owners": []}
        for name in ("nodes", "apart"):
            own_code[name] = module[name] - sum(self.modules[child][name] for child in self.children[number])
        for phase in ("forward", "backward"):
            left = {worker: [ms, nodes] for worker, ms, nodes in module[phase]}
            for child in self.children[number]:
                for worker, ms, nodes in self.modules[child][phase]:
                    left[worker][0] -= ms
                    left[worker][1] -= nodes
            own_code[phase] = [[worker, max(ms, 0.0), nodes] for worker, (ms, nodes) in left.items() if nodes]
        runs = own_code["forward"] or own_code["backward"]
        return own_code if runs and (own_code["apart"] or (number and _parted(own_code))) else None


def _places(module: Module) -> tuple[list[int], ...]:
    """The module's workers in forward and in backward."""
    return tuple([place[0] for place in module[phase]] for phase in ("forward", "backward"))


def _parted(module: Module) -> bool:
    """Whether a cut goes through the module."""
    return any(len(workers) > 1 for workers in _places(module))

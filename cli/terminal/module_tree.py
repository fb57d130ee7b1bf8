"""The module tree in a terminal: where each module's forward and backward run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fxpipe.cli.output import TextColumn, TimeUnit, print_columns, size
from fxpipe.cli.terminal.worker_marks import ranks

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

APART = "≠"
"""Marks distinct cuts: a unit there has forward, backward and weight gradients on different workers."""

OWN = "(own code)"

Module = dict[str, Any]


@dataclass(frozen=True)
class Line:
    """A line of the tree: a module, or a run of like siblings."""

    label: str
    modules: tuple[Module, ...]
    opened: bool = False

    def workers(self, phase: str) -> list[int]:
        return sorted({place[0] for module in self.modules for place in module[phase]})

    def milliseconds(self, phase: str) -> float | None:
        """None if not known."""
        spent = [place[1] for module in self.modules for place in module[phase]]
        return None if None in spent else sum(spent)

    def total(self, name: str) -> int:
        return sum(module[name] for module in self.modules)

    @property
    def apart(self) -> bool:
        """Whether units are cut apart, which no line below shows."""
        return not self.opened and self.total("apart") > 0


def print_modules(modules: Sequence[Module], console: Console, depth: int | None = None) -> None:
    """The tree, a line a module or a run of like siblings.

    Args:
        depth: shows every module down to there; by default, modules are open if their insides are on different workers.
    """
    lines = list(_Tree(modules, depth).lines())
    phases = ("forward", "backward")
    times = TimeUnit(line.milliseconds(phase) for line in lines for phase in phases)
    columns = [
        TextColumn("module", elastic=True),
        TextColumn("F on"),
        TextColumn("B on"),
        TextColumn(""),
        TextColumn(f"F {times.unit}", right=True),
        TextColumn(f"B {times.unit}", right=True),
        TextColumn("parameters", right=True),
        TextColumn("", right=True),
        TextColumn("owned by", spare=2),
        TextColumn("nodes", right=True, spare=1),
    ]
    rows = []
    for line in lines:
        owners = sorted({owner for module in line.modules for owner in module["owners"]})
        parameters = line.total("parameters")
        rows.append([
            line.label,
            ranks(line.workers("forward")),
            ranks(line.workers("backward"), backward=True),
            _yellow(APART if line.apart else ""),
            *(times(line.milliseconds(phase)) for phase in phases),
            str(parameters) if parameters else "–",
            size(line.total("parameter_bytes")) if parameters else "",
            ranks(owners) if owners else "",
            str(line.total("nodes") or "–"),
        ])  # fmt: skip
    print_columns(columns, rows, console)
    if any(line.apart for line in lines):
        console.print(f"{APART} cut apart: forward, backward and weight gradients on different workers")


def _yellow(text: str) -> Text:
    from rich.text import Text

    return Text(text, style="bold yellow")


class _Tree:
    def __init__(self, modules: Sequence[Module], depth: int | None) -> None:
        self.modules = modules
        self.depth = depth
        self.children: list[list[int]] = [[] for _ in modules]
        for i, module in enumerate(modules):
            if module["parent"] is not None:
                self.children[module["parent"]].append(i)

    def lines(self) -> Iterator[Line]:
        """The lines in their order, with the branches in front of the names."""
        yield Line("(model)", (self.modules[0],), self._opens(0))
        if self._opens(0):
            yield from self._below(0, "")

    def _below(self, number: int, indent: str) -> Iterator[Line]:
        rows: list[tuple[str, tuple[int, ...]]] = [(self._name(group), group) for group in self._groups(number)]
        own = self._own(number)
        for i, (name, group) in enumerate(rows):
            loss = self.modules[group[0]]["path"] is None
            if loss and own is not None:
                yield Line(f"{indent}├ {OWN}", (own,))
                own = None
            last = i == len(rows) - 1 and own is None
            opened = len(group) == 1 and self._opens(group[0])
            yield Line(f"{indent}{'└' if last else '├'} {name}", tuple(self.modules[m] for m in group), opened)
            if opened:
                yield from self._below(group[0], f"{indent}{' ' if last else '│'} ")
        if own is not None:
            yield Line(f"{indent}└ {OWN}", (own,))

    def _name(self, group: tuple[int, ...]) -> str:
        """Its own name; after its parent's if it is a number."""
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
        """The children; neighbours with numbers as names and on the same workers form one group."""
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
        found: Module = {"path": OWN, "parameters": 0, "parameter_bytes": 0, "owners": []}
        for name in ("nodes", "apart"):
            found[name] = module[name] - sum(self.modules[child][name] for child in self.children[number])
        for phase in ("forward", "backward"):
            left = {worker: [ms, nodes] for worker, ms, nodes in module[phase]}
            for child in self.children[number]:
                for worker, ms, nodes in self.modules[child][phase]:
                    left[worker][1] -= nodes
                    if ms is not None:
                        left[worker][0] -= ms
            found[phase] = [[worker, ms and max(ms, 0.0), nodes] for worker, (ms, nodes) in left.items() if nodes]
        runs = found["forward"] or found["backward"]
        return found if runs and (found["apart"] or (number and _parted(found))) else None


def _places(module: Module) -> tuple[list[int], ...]:
    """Its workers in forward and in backward."""
    return tuple([place[0] for place in module[phase]] for phase in ("forward", "backward"))


def _parted(module: Module) -> bool:
    """Whether a cut goes through it."""
    return any(len(workers) > 1 for workers in _places(module))

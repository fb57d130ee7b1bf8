"""The model's module tree: which workers run each module, and how long that takes; its units and nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from fxpipe.inspection.subject import Subject
from fxpipe.ir.program_table import Row
from fxpipe.plan.spec import Phase
from fxpipe.planner.cuts import Cuts

COLUMNS = list(Row._fields)

LOSS = "(loss)"
"""The name of the row for the code after the last module; its path is None."""

WIRES = ("send", "recv", "all_reduce", "reduce_scatter")
"""Operators that only communicate. An idle worker has such nodes, too: it passes on tokens."""


class ModuleTree:
    """Module rows, parents before their children, and which row a node belongs to.

    Code outside submodules, such as the model's own forward, belongs to the whole model. The code after the last module
    in forward, and its backward, belongs to the loss function, whose row has path None. Sends and receives are nodes of
    their module, but the module does not run on workers that have no other nodes of it.
    """

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        units = subject.plan.step.units
        self._last = max((i for i, path in enumerate(units) if path), default=len(units))
        self._index: dict[str | None, int] = {}
        # as `fxpipe.inspection.facts` describes them
        self.rows = [self._row(path, parent) for path, parent in self._walk(self._paths())]
        apart = (self.of(units[i], i) for i, apart in enumerate(units_apart(subject)) if apart)
        self._add_counts("apart", Counter(apart))
        self._add_nodes()
        for row in self.rows:
            for phase in ("forward", "backward"):
                row[phase] = [[worker, *spent] for worker, spent in sorted(row[phase].items())]
        self._add_parameters()

    def of(self, module: str, unit: int | None) -> int:
        """The row of a node. Outside all modules, its unit decides whether it belongs to the model or to the loss."""
        if not module and unit is not None and unit > self._last:
            return self._index[None]
        return self._index[module]

    def _paths(self) -> Iterator[str | None]:
        """The module of every node, unit and parameter, those with forward nodes first, in their order."""
        subject = self._subject
        yield ""
        yield from (row.module for row in subject.nodes.rows if row.phase == "F")
        yield from (row.module for row in subject.nodes.rows)
        yield from subject.plan.step.units
        yield from (name.rpartition(".")[0] for p in subject.plan.parameters for name in p.names)
        if self._last < len(subject.plan.step.units) - 1:
            yield None

    def _walk(self, paths: Iterable[str | None]) -> Iterator[tuple[str | None, int | None]]:
        """Each module once, before its children, with its parent's row."""
        children: dict[str | None, dict[str | None, None]] = {}
        for path in dict.fromkeys(paths):
            child = path
            while child != "":
                parent = "" if child is None else child.rpartition(".")[0]
                siblings = children.setdefault(parent, {})
                if child in siblings:
                    break
                siblings[child] = None
                child = parent
        waiting: list[tuple[str | None, int | None]] = [("", None)]
        while waiting:
            path, parent_row = waiting.pop()
            self._index[path] = len(self._index)
            yield path, parent_row
            waiting += [(child, self._index[path]) for child in reversed(children.get(path, {}))]

    def _row(self, path: str | None, parent: int | None) -> dict[str, Any]:
        return {
            "path": path,
            "name": LOSS if path is None else path.rpartition(".")[2],
            "depth": 0 if path == "" else 1 if path is None else path.count(".") + 1,
            "parent": parent,
            "forward": {},
            "backward": {},
            "parameters": 0,
            "parameter_bytes": 0,
            "owners": set(),
            "nodes": 0,
            "apart": 0,
        }

    def _up(self, row: int | None) -> Iterator[dict[str, Any]]:
        while row is not None:
            yield self.rows[row]
            row = self.rows[row]["parent"]

    def _add_nodes(self) -> None:
        spent: dict[tuple[int, Phase, int], tuple[float, int]] = {}
        nodes = Counter[int]()
        for node in self._subject.nodes.rows:
            if node.phase is None:
                continue
            module = self.of(node.module, node.unit)
            nodes[module] += 1
            if node.op not in WIRES:
                key = module, node.phase, node.worker
                ms, count = spent.get(key, (0.0, 0))
                spent[key] = ms + (node.ms or 0.0), count + 1
        self._add_counts("nodes", nodes)
        for (module, phase, worker), (ms, count) in spent.items():
            for row in self._up(module):
                places = row["forward" if phase == "F" else "backward"]
                before = places.get(worker, (0.0, 0))
                places[worker] = before[0] + ms, before[1] + count

    def _add_counts(self, column: str, counts: Counter[int]) -> None:
        """Add counts to their rows and to all parents of these."""
        for module, count in counts.items():
            for row in self._up(module):
                row[column] += count

    def _add_parameters(self) -> None:
        for parameter in self._subject.plan.parameters:
            size = parameter.tensor.bytes
            modules = (self._index[name.rpartition(".")[0]] for name in parameter.names)
            for row in {id(row): row for module in modules for row in self._up(module)}.values():  # tied: once
                row["parameters"] += 1
                row["parameter_bytes"] += size
                row["owners"].add(parameter.owner)
        for row in self.rows:
            row["owners"] = sorted(row["owners"])


def unit_rows(subject: Subject) -> list[dict[str, Any]]:
    """A row for each unit, in order: its workers, whether they differ, and its costs."""
    plan, cuts = subject.plan, Cuts.of(subject.plan)
    rows = zip(plan.step.units, subject.profile.units, units_apart(subject), strict=True)
    return [
        {
            "module": path,
            "forward": cuts.worker("F", i),
            "backward": cuts.worker("B", i),
            "weights": cuts.worker("B", i, weight=True),
            "forward_ms": unit.forward_ms,
            "backward_ms": unit.backward_ms,
            "weight_ms": unit.weight_ms,
            "apart": apart,
        }
        for i, (path, unit, apart) in enumerate(rows)
    ]


def units_apart(subject: Subject) -> list[bool]:
    """For each unit, whether its forward, backward and weight gradients are not all on one worker.

    A kind without nodes does not count, nor does what other workers compute again.
    """
    cuts = Cuts.of(subject.plan)
    places: list[set[int]] = [set() for _ in subject.plan.step.units]
    for node in subject.nodes.rows:
        if node.phase is None or node.op in WIRES or node.unit is None or not 0 <= node.unit < len(places):
            continue
        if node.worker == cuts.worker(node.phase, node.unit, node.weight):
            places[node.unit].add(node.worker)
    return [len(workers) > 1 for workers in places]


def node_table(subject: Subject, tree: ModuleTree) -> dict[str, Any]:
    """The program's nodes, with the columns of `fxpipe.ir.program_table.Row`; `module` is a row of the tree.

    By the name of a parameter's node, `gradients` has the row that makes its gradient, and `names` its names in the
    model. `names` has buffers and inputs, too.
    """
    rows, place = [], COLUMNS.index("module")
    for node in subject.nodes.rows:
        row: list[Any] = [*node[:-1], list(node.inputs)]
        row[place] = tree.of(node.module, node.unit)
        rows.append(row)
    names = {row: list(labels) for row, labels in subject.nodes.names.items()}
    return {"columns": COLUMNS, "rows": rows, "gradients": dict(subject.nodes.gradients), "names": names}

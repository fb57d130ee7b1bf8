"""Where a value comes from and where it goes: of a node, parameter, module or edge, found by its name.

It needs only the facts (`fxpipe.inspection.facts`), takes time linear in the nodes, and returns plain JSON.
`fxpipe.inspection.value_text` writes that in words.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fxpipe.errors import BuildError, near

LEVELS = 3
"""How many steps back the inputs of a value are followed."""

MOST = 40
"""A list has at most this many lines; the rest is counted."""

PLACEHOLDERS = ("parameter", "buffer", "input")
"""The operators of nodes that are not calls but inputs of the step."""

Json = dict[str, Any]


def trace(facts: Json, name: str) -> Json:
    """What is known of a value, by its name.

    Args:
        facts: all of them, or `fxpipe.inspection.facts.value_facts`.
        name: of a node, as the emitted code has it; of a parameter, buffer or batch input, as the model has it;
            of an edge, for its value; or the path of a module.

    Returns:
        By "kind":
        "node": "value", "readers", "kept" (the workers that keep or receive it for backward) and "inputs": the steps
        back, each with its "level", and "more" if it has inputs that are not listed after it.
        "parameter": "value", "names", "owner", "copies", "edges", "readers" and "gradient" (the node that makes it;
        None if it is not trained).
        "module": the module's row with "nodes", the first 40 of its "of" nodes.
        A value, a reader and a step back have "name", "op", "phase", "module", "type", "bytes", "ms", "worker",
        "unit", "weight", "source" and "text"; "via" is the edge between a reader and what it reads, or None.

    Raises:
        BuildError: nothing has that name.
    """
    graph = _ValueGraph(facts)
    row = graph.row(name)
    if row is None and name in graph.edges:
        row = graph.row(name.rpartition(":")[0])
    if row is not None:
        return graph.parameter(row) if graph.op[row] == "parameter" else graph.node(row)
    module = next(
        (m for m in facts["modules"] if name and name in (m["path"], m["name"] if not m["path"] else "")), None
    )
    if module is not None:
        return graph.module(module)
    raise BuildError(
        f"no node, parameter, module or edge is called {name!r}{near(name, graph.known())}",
        where="--node",
        hint="`fxpipe inspect BUILD --stage 0` shows the nodes of worker 0, `--json` all of them",
    )


class _ValueGraph:
    """The nodes of the facts with their readers."""

    def __init__(self, facts: Json) -> None:
        self.facts = facts
        self.rows = [dict(zip(facts["nodes"]["columns"], row, strict=True)) for row in facts["nodes"]["rows"]]
        self.op, self.phase, self.worker = ([row[c] for row in self.rows] for c in ("op", "phase", "worker"))
        self.names: list[str] = [row["name"] for row in self.rows]
        self.inputs: list[list[int]] = [row["inputs"] for row in self.rows]
        self.users: list[list[int]] = [[] for _ in self.rows]
        for reader, inputs in enumerate(self.inputs):
            for source in dict.fromkeys(inputs):
                self.users[source].append(reader)
        self.edges: dict[str, list[Json]] = {}
        for edge in facts["edges"]:
            if edge["kind"] != "weights":
                self.edges.setdefault(edge["name"], []).append(edge)

    def row(self, name: str) -> int | None:
        """The row of a name: a node's own, or the model's for a parameter, buffer or batch input."""
        own = {found: i for i, found in enumerate(self.names)}
        if name in own:
            return own[name]
        return next((i for i, found in self._model_names() if found == name), None)

    def _model_names(self) -> Iterator[tuple[int, str]]:
        for i, op in enumerate(self.op):
            if op in PLACEHOLDERS:
                yield from ((i, found) for found in self.model_names(i))

    def model_names(self, row: int) -> list[str]:
        """What the model calls a placeholder; all names of a tied parameter."""
        return self.facts["nodes"]["names"].get(self.names[row]) or [self.rows[row]["text"] or ""]

    def known(self) -> list[str]:
        """Every name that can be asked for."""
        found = [*self.names, *(name for _, name in self._model_names())]
        found += [_path(m) for m in self.facts["modules"]]
        return [name for name in dict.fromkeys((*found, *self.edges)) if name]

    def value(self, row: int) -> Json:
        """A row by its columns' names, with its module's path, and without its inputs."""
        found = self.rows[row] | {"module": _path(self.facts["modules"][self.rows[row]["module"]])}
        del found["inputs"]
        return found

    def node(self, row: int) -> Json:
        return {
            "kind": "node",
            "value": self.value(row),
            "inputs": self._steps(row),
            "readers": [{**self.value(reader), "via": via} for reader, via in self._readers(row)],
            "kept": self._kept(row),
        }

    def parameter(self, row: int) -> Json:
        names = self.model_names(row)
        workers = self.facts["workers"]
        owner = next((w["worker"] for w in workers if names[0] in w["owned_names"]), self.worker[row])
        made = self.facts["nodes"]["gradients"].get(self.names[row])
        return {
            "kind": "parameter",
            "value": self.value(row),
            "names": names,
            "owner": owner,
            "copies": [w["worker"] for w in workers if names[0] in w["copy_names"]],
            "edges": [e for e in self.facts["edges"] if e["kind"] == "weights" and names[0] in e["names"]],
            "readers": [{**self.value(reader), "via": via} for reader, via in self._readers(row)],
            "gradient": None if made is None else self.value(made),
        }

    def module(self, module: Json) -> Json:
        inside: list[bool] = []
        for m in self.facts["modules"]:  # parents come before their children
            inside.append(m is module or (m["parent"] is not None and inside[m["parent"]]))
        rows = [i for i, row in enumerate(self.rows) if inside[row["module"]] and row["op"] not in PLACEHOLDERS]
        return {"kind": "module", **module, "nodes": [self.value(i) for i in rows[:MOST]], "of": len(rows)}

    def _sources(self, row: int) -> Iterator[tuple[int, Json | None]]:
        """What a row reads, each value with the edge that it crosses, if any."""
        for source in dict.fromkeys(self.inputs[row]):
            if self.op[source] == "recv":
                send = self.inputs[source][0]
                yield self.inputs[send][0], self._via(send, source)
            elif self.op[source] == "send":  # the row is a recv itself
                yield self.inputs[source][0], self._via(source, row)
            else:
                yield source, None

    def _readers(self, row: int) -> Iterator[tuple[int, Json | None]]:
        """The readers of a row on all workers, each with the edge to it, if any."""
        for user in self.users[row]:
            if self.op[user] == "send":
                for received in self.users[user]:
                    via = self._via(user, received)
                    yield from ((reader, via) for reader in self.users[received])
            elif self.op[user] == "recv":  # the row is a send itself
                via = self._via(row, user)
                yield from ((reader, via) for reader in self.users[user])
            else:
                yield user, None

    def _via(self, send: int, recv: int) -> Json:
        """The edge between a Send and its Recv."""
        value = self.names[recv].rpartition("_recv_")[0]
        name = next((n for n in (value, f"{value}:{self.worker[recv]}") if n in self.edges), value)
        edge = self.edges[name][0] if name in self.edges else {"kind": "value", "bytes": self.value(send)["bytes"]}
        return {
            "edge": name,
            "kind": edge["kind"],
            "bytes": edge["bytes"],
            "src": self.worker[send],
            "src_phase": self.phase[send],
            "dst": self.worker[recv],
            "dst_phase": self.phase[recv],
        }

    def _steps(self, row: int) -> list[Json]:
        """The inputs, their inputs, …, depth first. A value's own inputs come once, where the value is nearest."""
        level, layer = {row: 0}, [row]
        for depth in range(1, LEVELS + 1):
            found = dict.fromkeys(source for reader in layer for source, _ in self._sources(reader))
            layer = [source for source in found if source not in level]
            level.update(dict.fromkeys(layer, depth))
        steps: list[Json] = []
        opened: set[int] = set()

        def walk(reader: int, depth: int) -> None:
            for source, via in self._sources(reader):
                opens = depth < LEVELS and level[source] == depth and source not in opened
                more = not opens and any(True for _ in self._sources(source))
                steps.append({"level": depth, **self.value(source), "via": via, "more": more})
                if opens:
                    opened.add(source)
                    walk(source, depth + 1)

        walk(row, 1)
        return steps

    def _kept(self, row: int) -> list[Json]:
        """The workers that keep or receive a forward value for backward."""
        if self.phase[row] != "F" and self.op[row] != "input":
            return []
        found: dict[int, Json] = {}
        for reader, via in self._readers(row):
            if self.phase[reader] in ("B", "W") and self.op[reader] != "send":
                worker, sent = self.worker[reader], via is not None and via["dst_phase"] != "F"
                found.setdefault(worker, {"worker": worker, "sent": sent, "readers": []})
                found[worker]["readers"].append(self.names[reader])
        return [found[worker] for worker in sorted(found)]


def _path(module: Json) -> str:
    """A module's path, or the name of code outside all modules, which has none."""
    return str(module["name"] if module["path"] is None else module["path"])

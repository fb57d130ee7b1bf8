"""Where a value comes from and where it goes, in words for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from fxpipe.errors import listed
from fxpipe.inspection.formats import plural
from fxpipe.inspection.values import MOST, PLACEHOLDERS, Json, trace
from fxpipe.planner.quantity import size


def describe(facts: Json, name: str) -> str:
    """`fxpipe.inspection.values.trace` in words.

    Raises:
        BuildError: as `trace`.
    """
    found = trace(facts, name)
    lines = {"node": _node_lines, "parameter": _parameter_lines, "module": _module_lines}
    return "\n".join(lines[found["kind"]](found)) + "\n"


def _node_lines(found: Json) -> Iterator[str]:
    value = found["value"]
    yield from _heading(value)
    yield from _section("comes from", (line for step in found["inputs"] for line in _step_lines(step)), "nothing else")
    yield from _section("goes to", _reader_lines(found["readers"]), "no other node: it is a result of the step")
    kept = (
        f"  worker {k['worker']} {'gets it' if k['sent'] else 'keeps it'} for {listed(k['readers'], 3)}"
        for k in found["kept"]
    )
    if found["kept"]:
        yield from _section("kept for backward", kept)


def _parameter_lines(found: Json) -> Iterator[str]:
    value = found["value"]
    yield f"{', '.join(found['names'])}  parameter  {value['type']}  {size(value['bytes'])}"
    copies = f", copies on {_workers(found['copies'])}" if found["copies"] else ""
    yield f"  owned by worker {found['owner']}{copies} · {value['name']} in the code"
    crossing = (
        f"  from worker {e['src']} after its update, for worker {e['dst']}'s {_phase(e['dst_phase'])}"
        for e in found["edges"]
    )
    if found["edges"]:
        yield from _section("crosses", crossing)
    yield from _section("read by", _reader_lines(found["readers"]), "no node")
    made = found["gradient"]
    yield from _section("gradient made by", [] if made is None else [_line(made)], "no node: it is not trained")


def _module_lines(found: Json) -> Iterator[str]:
    path = found["path"] or found["name"] or "the whole model"
    yield f"{path}  module  {plural(found['of'], 'node')}"
    for title in ("forward", "backward"):
        parts = (f"worker {worker} {_ms(ms)} ({plural(nodes, 'node')})" for worker, ms, nodes in found[title])
        yield f"  {title:<8}  {', '.join(parts) or 'nothing'}"
    if found["parameters"]:
        owners = f", owned by {_workers(found['owners'])}"
        yield f"  {plural(found['parameters'], 'parameter')}, {size(found['parameter_bytes'])}{owners}"
    lines = [_line(value) for value in found["nodes"]]
    yield from _section("nodes", lines, more=found["of"] - len(lines))


def _heading(value: Json) -> Iterator[str]:
    yield f"{value['name']}  {value['op']}  {value['type']}"
    if value["op"] in PLACEHOLDERS:
        parts = [size(value["bytes"]), f"worker {value['worker']}", f"{value['text']} in the model"]
    else:
        phase = "W" if value["weight"] else value["phase"]
        parts = [
            f"{phase} on worker {value['worker']}",
            *([] if value["unit"] is None or value["unit"] < 0 else [f"unit {value['unit']}"]),
            *([value["module"]] if value["module"] else []),
            size(value["bytes"]),
            *([] if value["ms"] is None else [_ms(value["ms"])]),
        ]
    yield "  " + " · ".join(parts)
    if value["source"]:
        yield f"  {value['source']}: {value['text']}"


def _step_lines(step: Json) -> Iterator[str]:
    if step["via"]:
        yield f"{'  ' * step['level']}{_sent(step['via'])}:"
    yield _line(step, "  " * step["level"], " …" if step["more"] else "")


def _reader_lines(readers: Sequence[Json]) -> Iterator[str]:
    """First the readers that no edge leads to, then those of each edge."""
    ways: dict[str, list[Json]] = {}
    for reader in readers:
        ways.setdefault(f"{_sent(reader['via'])}, for:" if reader["via"] else "", []).append(reader)
    for way in sorted(ways, key=bool):
        if way:
            yield f"  {way}"
        yield from (_line(reader, "    " if way else "  ") for reader in ways[way])


def _sent(via: Json) -> str:
    return (
        f"sent by worker {via['src']}'s {via['src_phase']} to worker {via['dst']}'s {via['dst_phase']} "
        f"({via['kind']}, {size(via['bytes'])})"
    )


def _line(value: Json, indent: str = "  ", remark: str = "") -> str:
    if value["op"] in PLACEHOLDERS:
        owned = "owned by " if value["op"] == "parameter" else ""
        return f"{indent}{value['text']}  {value['op']}, {owned}worker {value['worker']}"
    phase = "W" if value["weight"] else value["phase"]
    source = f"  {value['source']}" if value["source"] else ""
    return f"{indent}{value['name']}  {phase} on worker {value['worker']}{source}{remark}"


def _section(title: str, lines: Iterable[str], empty: str = "", more: int = 0) -> Iterator[str]:
    yield ""
    yield title
    found = list(lines)
    yield from found[:MOST] or [f"  {empty}"]
    hidden = len(found[MOST:]) + more
    if hidden:
        yield f"  … and {hidden} more"


def _workers(ranks: Sequence[int]) -> str:
    return f"worker{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _phase(written: str) -> str:
    """`B`, `F and B`, `update`."""
    return written if written == "update" else " and ".join(written)


def _ms(ms: float) -> str:
    return f"{ms:.3g} ms"

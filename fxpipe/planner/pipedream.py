"""PipeDream's published profiles, `graph.txt`: a line for each node, then a line for each edge, indented by a tab.

    node2 -- Conv2d(3, 64) -- forward_compute_time=1.5, backward_compute_time=3.0, activation_size=4096.0, parameter_size=8192.0
        node1 -- node2

Times are milliseconds, sizes bytes. An activation of several tensors is a list, `[6291456.0; 131072.0]`: a reader
`__getitem__(i)` takes one of them, any other reader takes all. The fourth part of nodes that PipeDream's planner has
partitioned, ` -- stage_id=0`, is not read. The time of an Input is that of the data loader, which no worker runs, so it
counts as 0. Backward is one number and counts as B (`Profile.split_backward` turns a part of it into W).
"""  # noqa: E501

from __future__ import annotations

import re
from pathlib import Path

from fxpipe.errors import ProfileError
from fxpipe.planner.profile import MOST, Output, Profile, Unit, backward_values, in_order, located, read_profile_json
from fxpipe.typed_json import Malformed, explained, read_text

_NODE = re.compile(r"(?P<id>\S+) -- (?P<name>.*) -- (?P<costs>forward_compute_time=.*)")
_COSTS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
_ELEMENT = re.compile(r"__getitem__\((?P<index>\d+)\)")
_STAGE = re.compile(r" -- stage_id=\d+$")  # of a partition by PipeDream's planner
_INPUT = re.compile(r"Input\d*")
_NODE_FORM = "a node is `node1 -- NAME -- forward_compute_time=…, …`; an edge is indented: `node1 -- node2`"


def read_profile(path: str | Path) -> Profile:
    """Read a profile in fxpipe's JSON or PipeDream's text.

    PipeDream's units have the order of their numbers, as far as the edges allow it.

    Raises:
        ProfileError: no such file, a malformed line, an edge to nowhere, or a cycle; the error names the line.
    """
    path = Path(path)
    hint = "give a build's profile.json, or a graph.txt of PipeDream's"
    with explained(path.name, error=ProfileError, hint=hint):
        text = read_text(path)
    if text.lstrip()[:1] in ("{", "["):
        return read_profile_json(text, path.name, error=ProfileError)
    with explained(path.name, error=ProfileError, hint=_NODE_FORM):
        return from_pipedream(text)


def from_pipedream(text: str) -> Profile:
    """Read the text of a `graph.txt`; see the module's docstring. Raises Malformed."""
    units: dict[str, Unit] = {}
    names: dict[str, str] = {}
    sizes: dict[str, list[float]] = {}
    edges: list[tuple[str, str, str]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        place = f":{number}"
        if not line.strip():
            continue
        if line[0].isspace():
            ends = tuple(part.strip() for part in line.split(" -- "))
            if len(ends) != 2 or not all(ends):
                raise Malformed(f"not an edge: {line.strip()!r}", place)
            edges.append((ends[0], ends[1], place))
            continue
        found = _NODE.fullmatch(_STAGE.sub("", line.strip()))
        if found is None:
            raise Malformed(f"not a node: {line.strip()[:80]!r}", place)
        if found["id"] in units:
            raise Malformed(f"{found['id']} occurs twice", place)
        names[found["id"]] = found["name"]
        units[found["id"]], sizes[found["id"]] = _unit(found["id"], found["name"], found["costs"], place)
    if not units:
        raise Malformed("the profile has no units")
    outputs = _outputs(names, sizes, edges)
    order = in_order(units, outputs, {name: (len(name), name) for name in units})
    in_turn = tuple(units[n] for n in order)
    activations = tuple(located(outputs, order))
    return Profile(in_turn, activations, backward_values(in_turn, activations), device="cuda")  # its profiler needs one


def _unit(node: str, name: str, text: str, place: str) -> tuple[Unit, list[float]]:
    costs = dict(part.split("=", 1) for part in text.split(", ") if "=" in part)
    missing = [key for key in _COSTS if key not in costs]
    if missing:
        raise Malformed(f"the node lacks {' and '.join(missing)}", place)
    forward, backward, sizes, parameters = (
        [_cost(v.strip(), f"{place}, {key}") for v in costs[key].strip("[]").split(";") if v.strip()] for key in _COSTS
    )
    free = _INPUT.fullmatch(name) is not None
    unit = Unit(
        f"{node} {name.split('(')[0]}".rstrip(),
        0.0 if free else sum(forward),
        0.0 if free else sum(backward),
        output_bytes=sum(sizes),
        parameter_bytes=sum(parameters),
    )
    return unit, sizes


def _cost(text: str, place: str) -> float:
    """A time or a size: a finite number not below zero."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < MOST:
        raise Malformed(f"{text!r} is not a time or size", place)
    return number


def _outputs(names: dict[str, str], sizes: dict[str, list[float]], edges: list[tuple[str, str, str]]) -> list[Output]:
    readers: dict[tuple[str, int], list[str]] = {}
    for source, target, place in edges:
        for end in (source, target):
            if end not in names:
                raise Malformed(f"there is no node {end!r}", place)
        element = _ELEMENT.fullmatch(names[target])
        count = len(sizes[source])
        taken = [int(element["index"])] if element and int(element["index"]) < count else range(max(count, 1))
        for i in taken:
            readers.setdefault((source, i), []).append(target)
    return [(source, sizes[source][i] if sizes[source] else 0.0, found) for (source, i), found in readers.items()]

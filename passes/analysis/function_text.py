"""The text of a stage's functions: of its parts, and of what they call several times."""

from __future__ import annotations

import builtins
import keyword
import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any

from torch import fx

from fxpipe.ir.printer import argument_text, bucket_text, call_text, heading, type_text
from fxpipe.ir.program import AGAIN, ONE_DRAW, info, inputs_of, value
from fxpipe.ir.stage import Function, FunctionCall, Part, last_uses
from fxpipe.ir.wire import TAKEN, free_name, is_recv, is_reduce, is_send, variable
from fxpipe.plan.spec import EdgeSpec

WIDTH = 110


class _Text:
    """Writes calls, and drops values after their last use."""

    def __init__(self, graph: fx.Graph, lasting: int, taken: set[str], again: frozenset[str]) -> None:
        self.graph = graph
        self.again = again
        self.taken = taken
        self.names: dict[fx.Node, str] = {}
        self.dying = last_uses(graph, lasting)

    def unique(self, name: str) -> str:
        """The name, with `_` after it if another thing has it."""
        while name in self.taken or keyword.iskeyword(name) or hasattr(builtins, name):
            name += "_"
        self.taken.add(name)
        return name

    def calls(self, nodes: Sequence[fx.Node], inside: str = "") -> Iterator[str]:
        """The lines of calls; the paths of their modules are shown without `inside`."""
        last = ""
        for node in nodes:
            if node.op != "call_function":
                continue
            title = self._title(node, inside)
            if title != last and title:
                yield _comment(title)
                last = title
            yield from self.call(node)
            dying = (each for each in self.dying.get(node, ()) if not isinstance(value(each), (int, float)))
            yield from self.dropped(self.names[each] for each in dying)

    def call(self, node: fx.Node) -> Iterator[str]:
        """The lines of one call."""
        yield f"    {self.statement(node)}"

    def statement(self, node: fx.Node) -> str:
        """One call on a line, with its type."""
        return f"{self.names[node]} = {call_text(node, self.name, short=True)}  # {type_text(value(node))}"

    def name(self, node: fx.Node) -> str:
        """The name of a value."""
        return self.names[node]

    def _title(self, node: fx.Node, inside: str) -> str:
        """Where a call comes from, and whether it is a call of forward that is computed again to save memory."""
        title = heading(info(node), inside)
        return f"again, to save memory: {title}".rstrip(": ") if node.meta.get(AGAIN) in self.again else title

    @staticmethod
    def dropped(names: Iterator[str]) -> Iterator[str]:
        """The line that drops values, if there are any."""
        if some := ", ".join(dict.fromkeys(names)):
            yield f"    del {some}"


class OutlinedText(_Text):
    """A function that parts call."""

    def __init__(self, function: Function, taken: set[str], again: frozenset[str]) -> None:
        super().__init__(function.graph, function.weights + function.buffers, {*taken, *TAKEN}, again)
        self.function = function
        self.names = {node: self.unique(node.name) for node in function.graph.nodes if node.op != "output"}

    def lines(self) -> Iterator[str]:
        function = self.function
        holders = [node for node in self.graph.nodes if node.op == "placeholder"]
        groups = {}
        for group, count in (("weights", function.weights), ("buffers", function.buffers), ("values", function.values)):
            groups[group], holders = holders[:count], holders[count:]
        arguments = [*(group for group, nodes in groups.items() if nodes), *(self.names[node] for node in holders)]
        yield f"def {function.name}({', '.join(arguments)}):"
        lines = textwrap.wrap(f'"""For {_listed(function.serves)}."""', WIDTH - 4, break_long_words=False)
        yield from (f"    {line}" for line in lines)
        for group, nodes in groups.items():
            if nodes:
                yield "    ("
                yield from (f"        {self.names[node]},  # {type_text(value(node))}" for node in nodes)
                yield f"    ) = {group}"
            if nodes and group == "values":
                yield "    values.clear()"
        yield from self.calls(list(self.graph.nodes), function.module)
        results = [self.names[node] for node in inputs_of(self.graph.output_node())]
        yield from _wrapped("    return ", results, "")


class PartText(_Text):
    """A part of a stage."""

    def __init__(
        self, part: Part, edges: Mapping[str, EdgeSpec], taken: set[str], again: frozenset[str], replicas: int
    ) -> None:
        codecs = (variable(edge.codec) for edge in edges.values() if edge.codec)
        taken = {*taken, *TAKEN, part.function, *codecs}
        super().__init__(part.graph, len(part.spec.weights) + len(part.spec.buffers), taken, again)
        self.part = part
        self.replicas = replicas
        self.edges = edges
        self._holders = [node for node in part.graph.nodes if node.op == "placeholder"]
        self._held = set(self._holders[: len(part.spec.weights) + len(part.spec.buffers)])
        self._within = {node: call for call in part.outlined for node in call.nodes}
        self._groups = dict(self._find_groups())
        """By first member, the values that have one name, as a list."""
        self._grouped = {node for group in self._groups.values() for node in group}
        results = {node for call in part.outlined for node in call.results}
        for node in part.graph.nodes:
            if node.op == "output" or is_send(node) or is_reduce(node) or node in self._grouped:
                continue
            if (node not in self._within or node in results) and not self._only_sliced(node):
                self.names[node] = self.unique(node.name)
        for first, group in self._groups.items():
            self.names |= dict.fromkeys(group, free_name(self._group_name(first), self.taken))

    def _group_name(self, first: fx.Node) -> str:
        """`blocks_0_saved`."""
        maker, reader = self._within.get(first), self._reader(first)
        left = {"forward": "saved", "backward": "gradients" if self.part.spec.gradients else "deferred"}
        if first.op == "placeholder":
            kind = self.part.third
        else:
            kind = "values" if reader else left.get(self.part.function, "gradients")
        at = maker or reader
        name = re.sub(r"\W", "_", f"{at.module.partition(' ')[0]}_{kind}") if at and at.module else kind
        return name if name.isidentifier() else f"_{name}"

    def _only_sliced(self, node: fx.Node) -> bool:
        """Whether a weight or buffer is read only by functions, which take it from the list."""
        return node in self._held and all(user in self._within for user in node.users)

    def _reader(self, node: fx.Node) -> FunctionCall | None:
        """The only call of a function that reads a value; None if other calls or the end read it, too."""
        readers = {self._within.get(user) for user in self._users(node)}
        return readers.pop() if len(readers) == 1 else None

    def _users(self, node: fx.Node) -> list[fx.Node]:
        """What reads a value, but for the call of a function that makes it."""
        maker = self._within.get(node)
        return [user for user in node.users if maker is None or self._within.get(user) is not maker]

    def _find_groups(self) -> Iterator[tuple[fx.Node, list[fx.Node]]]:
        """Values that one place makes and one place takes, next to each other and in the same order in both."""
        passed = self._holders[len(self._held) :]
        place = {node: i for i, node in enumerate(passed)}
        output = self.graph.output_node()
        counts = Counter(inputs_of(output))
        end = {node: i for i, node in enumerate(inputs_of(output)) if counts[node] == 1}
        for call in self.part.outlined:
            values = call.grouped()[2]
            mine = {node: i for i, node in enumerate(values) if self._reader(node) is call}
            for group in _consecutive([node for node in values if node in place and node in mine], place, mine):
                yield group[0], group
        for call in self.part.outlined:
            reader = self._reader(call.results[-1]) if call.results else None
            at = end if reader is None else {node: i for i, node in enumerate(reader.grouped()[2])}
            tail: list[fx.Node] = []
            for node in reversed(call.results):
                alone = self._reader(node) is reader and (reader or self._users(node) == [output])
                if not alone or node not in at or (tail and at[node] + 1 != at[tail[-1]]):
                    break
                tail.append(node)
            if len(tail) > 1:
                yield tail[-1], tail[::-1]

    def lines(self) -> Iterator[str]:
        yield f"def {self.part.function}(weights, buffers, {self.part.third}, comm):"
        yield from self._arguments()
        inline: list[fx.Node] = []
        for node in self.graph.nodes:
            call = self._within.get(node)
            if call is None:
                inline.append(node)
            elif node is call.nodes[0]:
                yield from self.calls(inline)
                inline = []
                yield from self._outlined(call)
        yield from self.calls(inline)
        yield from self._result()

    def _arguments(self) -> Iterator[str]:
        spec, part = self.part.spec, self.part
        holders = self._holders
        for argument, members in (
            ("weights", spec.weights),
            ("buffers", spec.buffers),
            (part.third, spec.batch if part.third == "batch" else part.passed),
        ):
            nodes, holders = holders[: len(members)], holders[len(members) :]
            labels = [f"{m}: " if argument in ("weights", "buffers", "batch") else "" for m in members]
            rows = list(zip(range(len(nodes)), nodes, labels, strict=True))
            for how, some in groupby(rows, key=lambda row: self._how(row[1])):
                places = [place for place, *_ in some]
                source = argument + _slice(places[0], len(places), len(nodes))
                if isinstance(how, str):
                    yield f"    {how} = {source}"
                elif how and len(places) == 1 < len(nodes):
                    (i,) = places
                    yield f"    {self.names[nodes[i]]} = {argument}[{i}]  # {labels[i]}{type_text(value(nodes[i]))}"
                elif how:
                    yield "    ("
                    yield from (
                        f"        {self.names[nodes[i]]},  # {labels[i]}{type_text(value(nodes[i]))}" for i in places
                    )
                    yield f"    ) = {source}"
            if argument in ("saved", "deferred"):
                yield f"    {argument}.clear()"

    def _how(self, node: fx.Node) -> str | bool:
        """How a part takes an argument: by the name of its group, by its own name (True), or not by name."""
        return self.names[node] if node in self._grouped else node in self.names

    def _outlined(self, call: FunctionCall) -> Iterator[str]:
        """The lines of a call of a function."""
        weights, buffers, values, numbers = call.grouped()
        arguments = [
            self._sliced(group, nodes) for group, nodes in (("weights", weights), ("buffers", buffers)) if nodes
        ]
        title = " · ".join(filter(None, (call.module, self._weight_names(weights))))
        if title:
            yield _comment(title)
        if values:
            yield from _wrapped("    values = [", self._spread(values), "]")
            arguments.append("values")
        dying = {node for each in call.nodes for node in self.dying.get(each, ())}
        yield from self.dropped(self.names[node] for node in values if node in dying)
        arguments += [argument_text(number, str) for number in numbers]
        results = self._spread(call.results)
        if len(results) == 1:
            results = [results[0].removeprefix("*")]
        types = ", ".join(type_text(value(node)) for node in call.results if node not in self._grouped)
        yield from _wrapped("    ", results, f" = {call.function.name}({', '.join(arguments)})", types)

    def _weight_names(self, weights: Sequence[fx.Node]) -> str:
        """`weights blocks.0.norm1.weight to blocks.0.down.bias`."""
        names = dict(zip(self._holders, self.part.spec.weights, strict=False))
        ends = dict.fromkeys(names[weight] for weight in (*weights[:1], *weights[-1:]))
        return f"weights {' to '.join(ends)}" if ends else ""

    def _spread(self, nodes: Sequence[fx.Node]) -> list[str]:
        """The names of values, with `*` before those of groups."""
        names = []
        after = 0
        for i, node in enumerate(nodes):
            if i < after:
                continue
            group = self._groups.get(node)
            names.append(f"*{self.names[node]}" if group else self.names[node])
            after = i + len(group or "1")
        return names

    def _sliced(self, argument: str, nodes: Sequence[fx.Node]) -> str:
        """Members of `weights` or `buffers`: `weights[2:14]`."""
        weights = len(self.part.spec.weights)
        every = self._holders[:weights] if argument == "weights" else self._holders[weights : len(self._held)]
        place = {node: i for i, node in enumerate(every)}
        pieces = [
            argument + _slice(place[group[0]], len(group), len(every))
            for group in _consecutive(nodes, place, {node: i for i, node in enumerate(nodes)}, least=1)
        ]
        return pieces[0] if len(pieces) == 1 else f"({', '.join(f'*{piece}' for piece in pieces)})"

    def call(self, node: fx.Node) -> Iterator[str]:
        if is_reduce(node):
            yield from self._reduction(node)
        elif ONE_DRAW in node.meta:
            yield f'    with comm.one_draw("{node.name}"):  # the same in all microbatches'
            yield "        " + self.statement(node)
        else:
            yield "    " + self.statement(node)

    def statement(self, node: fx.Node) -> str:
        if is_send(node):
            edge = self.edges[self.part.edges[node.name]]
            call = f'comm.send("{edge.name}", {self.names[node.args[0]]})'  # type: ignore[index]
            size = f", {edge.sent.bytes:,} of {edge.tensor.bytes:,} bytes" if edge.codec else ""
            return f"{call}  # {edge.kind} to worker {edge.dst}{size}{self._pace(edge, 'its', 'this one')}"
        if is_recv(node):
            edge = self.edges[self.part.edges[node.name]]
            call = f'{self.names[node]} = comm.recv("{edge.name}")  # {type_text(value(node))}'
            return f"{call} {edge.kind} from worker {edge.src}{self._pace(edge, 'this', 'its own')}"
        return super().statement(node)

    def _reduction(self, node: fx.Node) -> Iterator[str]:
        """The lines that hand over a bucket: one, if that is not too long."""
        call, comment = call_text(node, self.name), bucket_text(node, self.replicas)
        if len(call) + len(comment) < WIDTH:
            yield f"    {call}  # {comment}"
            return
        head, _, members = call.rpartition("[")
        yield f"    {head}[  # {comment}"
        for line in textwrap.wrap(members.removesuffix("])"), WIDTH - 8, break_long_words=False):
            yield f"        {line}"
        yield "    ])"

    def _pace(self, edge: EdgeSpec, which: str, other: str) -> str:
        """The purpose of a token, in words."""
        return f": {which} {self.part.function} waits for {other}" if edge.kind == "token" else ""

    def _result(self) -> Iterator[str]:
        result: Any = self.graph.output_node().args[0]
        if isinstance(result, list):
            yield f"    return [{', '.join(self._spread(result))}]"
            return
        if self.part.function != "forward":
            yield f"    return {self._tuple(result)}"
            return
        loss, updates, saved = result
        saved_names = ", ".join(self._spread(saved))
        yield f"    return {argument_text(loss, self.name)}, {self._tuple(updates)}, [{saved_names}]"

    def _tuple(self, nodes: Sequence[fx.Node]) -> str:
        names = self._spread(nodes)
        return f"({names[0]},)" if len(names) == 1 else f"({', '.join(names)})"


def _consecutive(
    nodes: Sequence[fx.Node], one: Mapping[fx.Node, int], other: Mapping[fx.Node, int], least: int = 2
) -> Iterator[list[fx.Node]]:
    """The nodes in groups that are next to each other by both orders, of at least so many."""
    group: list[fx.Node] = []
    for node in nodes:
        if group and any(order[group[-1]] + 1 != order[node] for order in (one, other)):
            if len(group) >= least:
                yield group
            group = []
        group.append(node)
    if len(group) >= least:
        yield group


def _comment(title: str) -> str:
    return f"    # {title}"[:WIDTH].rstrip()


def _slice(start: int, count: int, length: int) -> str:
    """The subscript that takes some members of a list, '' if it takes all."""
    if count == length:
        return ""
    return f"[{start or ''}:{start + count if start + count < length else ''}]"


def _listed(modules: Sequence[str]) -> str:
    """`blocks.0 to blocks.3 and head`."""
    series: list[list[str]] = []
    for module in dict.fromkeys(modules):
        if series and _numbers(module)[0] == _numbers(series[-1][-1])[0] and _is_next(series[-1], module):
            series[-1].append(module)
        else:
            series.append([module])
    names = []
    for members in series:
        names += [f"{members[0]} to {members[-1]}"] if len(members) > 2 else members
    names = [name or "code outside modules" for name in names]
    times = f", {len(modules)} times" if len(set(modules)) < len(modules) else ""
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]])) + times


def _numbers(module: str) -> tuple[str, list[int]]:
    """A path without its numbers, and the numbers."""
    return re.sub(r"\d+", "", module), [int(number) for number in re.findall(r"\d+", module)]


def _is_next(members: Sequence[str], module: str) -> bool:
    """Whether one number goes on as it does between the members."""
    *before, last, new = [_numbers(member)[1] for member in (*members[-2:], module)]
    steps = [[b - a for a, b in zip(one, other, strict=True)] for one, other in pairwise([*before, last, new])]
    return {abs(step) for step in steps[0]} in ({1}, {0, 1}) and steps[0] == steps[-1]


def _wrapped(before: str, names: Sequence[str], after: str, comment: str = "") -> Iterator[str]:
    """A list of names on one line, or if that is too long on several, in the brackets in `before` and `after`."""
    comment = f"  # {comment}" if comment else ""
    line = f"{before}{', '.join(names)}{after}"
    if len(line) <= WIDTH:
        yield line + comment
        return
    if before[-1] not in "([":
        before, after = f"{before}(", f"){after}"
    yield before
    for part in textwrap.wrap(", ".join(names), WIDTH - 8, break_long_words=False):
        yield f"        {part}"
    yield f"    {after}{comment}"

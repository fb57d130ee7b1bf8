"""How much memory the functions of a stage hold while they run, found by walking their code call by call.

A value lives from the call that makes it to the `del` that codegen writes after its last reader (`Part.last_uses`).
Values that share memory count once; the operators' schemas show which do. Weights and buffers do not belong to the
part, and count elsewhere.

What an operator allocates internally while it runs is not known here.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from fxpipe.ir.aten import aten, is_getitem
from fxpipe.ir.program import value
from fxpipe.ir.stage import Part, Stage
from fxpipe.ir.wire import is_recv, is_send
from fxpipe.plan.cost_records import PartMemory
from fxpipe.plan.packing import ALIGNMENT, is_dense
from fxpipe.plan.spec import Phase
from fxpipe.torch_private import OpOverload, schema_of


class _Storage:
    """Memory that one or more values share: the parts' `own`, or the worker's (weights, buffers); perhaps `sent`."""

    __slots__ = ("bytes", "own", "sent")

    def __init__(self, size: int, own: bool = True) -> None:
        self.bytes = size
        self.own = own
        self.sent = False


_Held = _Storage | list[Any]
"""The storage of a tensor; the storages of the elements of a tuple; an empty list for anything else."""


def part_memories(stage: Stage) -> tuple[PartMemory, ...]:
    """The memory of each function of a stage, for one microbatch, in the order in which they run."""
    passed: dict[str, _Held] = {}
    memories = []
    for phase, part in stage.parts.items():
        unreceived = _CodeWalk(part, passed, unreceived=True).peak if passed else 0
        walk = _CodeWalk(part, passed)
        memories.append(walk.memory(phase, max(unreceived, walk.peak)))
        passed = walk.left
    return tuple(memories)


class _CodeWalk:
    """One function, called with what the previous one has left; what was sent of that may be `unreceived` yet."""

    def __init__(self, part: Part, passed: Mapping[str, _Held], unreceived: bool = False) -> None:
        self.part = part
        self._held: dict[fx.Node, _Held] = {}
        self._names: Counter[_Storage] = Counter()  # how many values share it, and whether it is being sent
        self._sent: dict[_Storage, None] = {}
        self._dying = part.last_uses()
        self.now = self.peak = self.inside = self._results = 0
        self._arguments: frozenset[_Storage] = frozenset()
        self._take(passed, unreceived)
        self._batch = 0 if part.passed else self.now
        self._taken = self.now - self._batch
        receives = [node for node in part.graph.nodes if node.op == "call_function" and is_recv(node)]
        for node in receives:  # receives are posted before the action
            self._hold(node, _new(value(node)))
        self._received = self.now - self._taken - self._batch
        self._arguments, self.inside, self._results = frozenset(self._names), 0, 0
        for node in part.graph.nodes:
            if node.op == "call_function":
                self._call(node)
        self.left = self._passed_on()

    def memory(self, phase: Phase, unreceived: int) -> PartMemory:
        """The result of the walk."""
        left = dict.fromkeys(s for held in self.left.values() for s in _storages(held) if s.own)
        return PartMemory(
            phase,
            taken=self._taken,
            received=self._received,
            left=sum(storage.bytes for storage in left),
            sent=sum(storage.bytes for storage in self._sent if storage not in left),
            shared=sum(storage.bytes for storage in self._sent if storage in left),
            peak=self.peak,
            peak_unreceived=unreceived,
            batch=self._batch,
            inside=self.inside,
            results=self._results,
        )

    def _take(self, passed: Mapping[str, _Held], unreceived: bool) -> None:
        spec = self.part.spec
        holders = [node for node in self.part.graph.nodes if node.op == "placeholder"]
        worker, passed_at = len(spec.weights) + len(spec.buffers), len(holders) - len(self.part.passed)
        for node in holders[:worker]:
            self._hold(node, _Storage(0, own=False))
        for node in holders[worker:passed_at]:  # of the batch: the caller holds them, too
            self._hold(node, _new(value(node)))
            self._hold(node, self._held[node])
        for node in holders[passed_at:]:
            self._hold(node, passed[node.name])
            for storage in _storages(passed[node.name]):
                if unreceived and storage.sent:
                    self._keep(storage)

    def _call(self, node: fx.Node) -> None:
        if is_send(node):
            self._send(node)
        elif not is_recv(node):
            self._hold(node, self._result(node))
        for dying in self._dying.get(node, ()):
            self._drop(self._held[dying])

    def _send(self, node: fx.Node) -> None:
        source = node.all_input_nodes[0]
        storage = next(_storages(self._held[source]))
        sent = value(source)
        if not is_dense(sent.shape, sent.stride()) or sent.storage_offset() * sent.element_size() % ALIGNMENT:
            storage = _new(sent, whole=True)
        if storage not in self._sent and storage.own:
            storage.sent = True
            self._sent[storage] = None
            self._keep(storage)

    def _result(self, node: fx.Node) -> _Held:
        """The memory of a call's result: its own, or the memory of the value it shows."""
        if is_getitem(node):
            source, index = node.args
            held = self._held[source]  # type: ignore[index]
            return held[index] if isinstance(held, list) else held  # type: ignore[index]
        shown = value(node)
        aliases = _aliases(node)
        if isinstance(shown, (tuple, list)):
            sources = aliases if len(aliases) == len(shown) else aliases[:1] * len(shown) or [None] * len(shown)
            return [self._shown(v, s) for v, s in zip(shown, sources, strict=True)]
        return self._shown(shown, aliases[0] if aliases else None)

    def _shown(self, shown: Any, source: fx.Node | None) -> _Held:
        if not isinstance(shown, Tensor):
            return []
        storage = None if source is None else next(_storages(self._held[source]), None)
        return _new(shown) if storage is None else storage

    def _hold(self, node: fx.Node, held: _Held) -> None:
        self._held[node] = held
        for storage in _storages(held):
            self._keep(storage)

    def _keep(self, storage: _Storage) -> None:
        if not self._names[storage] and storage.own:
            self._count(storage, storage.bytes)
        self._names[storage] += 1

    def _drop(self, held: _Held) -> None:
        for storage in _storages(held):
            self._names[storage] -= 1
            if not self._names[storage] and storage.own:
                self._count(storage, -storage.bytes)

    def _count(self, storage: _Storage, change: int) -> None:
        self.now += change
        self.peak = max(self.peak, self.now)
        if storage not in self._arguments:
            self._results += change
            self.inside = max(self.inside, self._results)

    def _passed_on(self) -> dict[str, _Held]:
        """What the function leaves for the next one, by name."""
        result: Any = self.part.graph.output_node().args[0]
        if isinstance(result, list):
            names, nodes = self.part.spec.deferred, result
        elif self.part.function == "forward":
            names, nodes = self.part.spec.saved, result[2]
        else:
            return {}
        return {name: self._held[node] for name, node in zip(names, nodes, strict=True)}


def _new(shown: Any, whole: bool = False) -> Any:
    """New memory for a value; if `whole`, without gaps, for any layout of the value."""
    if isinstance(shown, (tuple, list)):
        return [_new(part) for part in shown]
    if not isinstance(shown, Tensor):
        return []
    if shown.layout != torch.strided:
        return _Storage(0)
    reach = sum((size - 1) * stride for size, stride in zip(shown.shape, shown.stride(), strict=True)) + 1
    count = shown.numel() if whole or not shown.numel() else reach
    return _Storage(count * shown.element_size())


def _storages(held: _Held) -> Iterator[_Storage]:
    if isinstance(held, _Storage):
        yield held
        return
    for part in held:
        yield from _storages(part)


def _aliases(node: fx.Node) -> list[fx.Node | None]:
    """For each value that an operator returns, the argument whose memory it shares; none if no value does."""
    target = node.target
    if target is aten._unsafe_view.default:
        return [node.all_input_nodes[0]]
    if not isinstance(target, OpOverload) or not _shares_memory(target):
        return []
    schema = schema_of(target)
    by_alias: dict[str, fx.Node] = {}
    for i, argument in enumerate(schema.arguments):
        source = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
        if argument.alias_info is not None and isinstance(source, fx.Node):
            by_alias.update(dict.fromkeys(argument.alias_info.before_set, source))
    shown: list[fx.Node | None] = []
    for returned in schema.returns:
        # The elements of a list, as of split, share the memory of the only named argument.
        names = () if returned.alias_info is None else returned.alias_info.before_set or by_alias
        shown.append(next((by_alias[name] for name in names if name in by_alias), None))
    return shown if any(shown) else []


@functools.cache
def _shares_memory(operator: OpOverload) -> bool:
    """Whether a result may share the memory of an argument."""
    return any(argument.alias_info is not None for argument in schema_of(operator).arguments)

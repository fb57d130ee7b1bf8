"""comm: every value that crosses workers gets a Send node and a Recv node."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import fx

from fxpipe.errors import CutError
from fxpipe.ir import wire
from fxpipe.ir.aten import is_sparse, is_view
from fxpipe.ir.pace import Gap, first_gap
from fxpipe.ir.program import INFO, Level, NodeInfo, Program, home_of, info, size_of, value
from fxpipe.ir.transform import Pass
from fxpipe.plan.spec import PHASES, EdgeKind, EdgeSpec, Phase
from fxpipe.schedule.graph import Graph, chain, graph_of, handed_on_by, reach_of
from fxpipe.task.batch import tensor_spec
from fxpipe.torch_private import is_non_overlapping_and_dense_or_false

aten = torch.ops.aten
_Place = tuple[int, Phase]
_ORDER = {phase: number for number, phase in enumerate(PHASES)}


@dataclass(frozen=True)
class Comm(Pass):
    """Wire the workers.

    A value goes from its worker to the nearest worker that reads it, and each reader sends on to the next what it
    received. So no worker sends a value twice in one direction, none receives what it does not use, and each boundary
    between workers is crossed once: the links carry the least that the cuts allow. Workers with branches of the model
    that do not read each other's values are an exception: the value's worker sends it to each of them, so that none
    waits for another.

    It is sent when it exists or has arrived, and received where it is first needed, here or by a later reader. If a
    worker's forward reads it, its backward keeps what forward received. If only its backward reads it, it is received
    in forward if it must be sent on to a later worker, since backwards run in the other direction. Values that no
    forward waits for leave at the end of forward, after the activations: a link carries one message at a time. Values
    that only separate weight gradients read arrive in W, or in B for a reader further on that needs them there.

    A value without a dense layout (sliced) is copied by its sender. Of an expanded one only the memory travels, and
    each receiver expands it again. A view of a weight is copied. A value in the CPU's memory, in a program for another
    device (random seeds of attention), travels on that device, and is copied back.

    Which workers wait for which follows from the values that forwards send to forwards and backwards to backwards: the
    graph of the workers (`fxpipe/schedule/graph.py`), mostly a chain. If one waits for another and receives no value
    from it in a phase, it gets a token, one byte without meaning: without it, the sender would run ahead of its reader
    without bound (`fxpipe/ir/pace.py`). It leaves when the sender is itself in step. An evaluation needs none.

    Fields:
        prefix: the start of every edge's name.
        along: the graph to keep, () for the chain; None for the one that follows from the values.

    Raises:
        CutError: the values need an order that the given graph does not have.

    Before:  y = aten.mm.default(h, w2)  # w1       After:  h_send = send(h, to=1)  # w0
                                                            h_recv = recv(h_send, peer=0)  # w1
                                                            y = aten.mm.default(h_recv, w2)  # w1
    """

    name: ClassVar[str] = "comm"
    requires: ClassVar[Level] = Level.PLACED
    provides: ClassVar[Level] = Level.WIRED

    prefix: str = ""
    along: Graph | None = None

    def __call__(self, program: Program) -> Program:
        program = program.copy(level=Level.WIRED)
        wiring = _Wiring(program, self.prefix, self.along)
        for node in list(program.graph.nodes):
            wiring.wire(node)
        program = replace(program, wires=wiring.edges)
        while gap := first_gap(program, wiring.along):
            wiring.pace(gap)
        return program


class _Wiring:
    def __init__(self, program: Program, prefix: str, along: Graph | None) -> None:
        assert program.cuts is not None
        self.graph = program.graph
        self.prefix = prefix
        self.device = program.device
        self.edges: dict[str, EdgeSpec] = {}
        self.inputs = {b.node for b in program.batch if b.node}
        self.homes = {name: home_of(new) for name, new in program.updates().items()}
        self.order = {n: i for i, n in enumerate(program.graph.nodes)}
        self.parameters = {p.node for p in program.parameters}
        self.forms: dict[tuple[fx.Node, str], fx.Node] = {}  # forms in which a value travels, by what they differ in
        self.first = next(iter(program))
        backward = (n for n in program if info(n).phase != "F")
        self.turn = next(backward, program.graph.output_node())  # every forward is over before it
        workers = program.cuts.workers
        workers_graph = self._graph(workers)
        self.along = workers_graph if along is None else along
        self.reach = reach_of(self.along or chain(workers))
        for later, firsts in enumerate(workers_graph or chain(workers)):
            if missing := set(firsts) - self.reach[later]:
                raise CutError(
                    f"worker {later} waits for worker {min(missing)}, which it does not for batches of the first shape",
                    hint="put a batch of this shape first, or pad the batches to one shape",
                    page="batch-shapes",
                )

    def _graph(self, workers: int) -> Graph:
        """The graph of the workers that follows from the values."""
        orders, fed = set(), set()
        for node in self.order:
            home = self.place_of(node)
            for user in node.users if home else ():
                if home is None or user.op != "call_function" or (reader := info(user).worker) in (None, home[0]):
                    continue
                if home[1] == "F" == info(user).phase:
                    if node.name in self.inputs:
                        fed.add(reader)
                    else:
                        orders.add((home[0], reader))
                elif home[1] == "B":
                    orders.add((reader, home[0]))
        return graph_of(orders, fed, workers)

    def place_of(self, node: fx.Node) -> _Place | None:
        """The worker and phase that a value comes from; None if every worker has it or none computes it."""
        if node.op == "call_function":
            worker = info(node).worker
            assert worker is not None
            return worker, info(node).phase
        if node.name in self.inputs:
            return 0, "F"
        if node.name in self.homes:
            return self.homes[node.name], "F"
        return None

    def wire(self, node: fx.Node) -> None:
        home = self.place_of(node)
        if home is None or not node.users:
            return
        readers: dict[int, list[fx.Node]] = {}
        for user in sorted((n for n in node.users if n.op == "call_function"), key=self._when):
            if info(user).worker != home[0]:
                readers.setdefault(info(user).worker or 0, []).append(user)
        later = [(worker, readers[worker]) for worker in sorted(readers) if worker > home[0]]
        earlier = [(worker, readers[worker]) for worker in sorted(readers, reverse=True) if worker < home[0]]
        for stops in (later, earlier):
            self._relay(node, home, stops, alone=len(readers) == 1)

    def _when(self, node: fx.Node) -> tuple[int, int]:
        """The order of calls: by phase, then as in the graph."""
        return _ORDER[info(node).phase], self.order[node]

    def _relay(self, node: fx.Node, home: _Place, stops: list[tuple[int, list[fx.Node]]], alone: bool) -> None:
        """Hand a value on from reader to reader, away from where it is made."""
        if not stops:
            return
        self._refuse_sparse(node, home[0], stops[0][0])
        dense = self._dense(self._unexpanded(self._on_device(node, home), home), home)
        by = handed_on_by(home[0], [worker for worker, _ in stops], self.reach, node.name in self.inputs)
        needing = [list(users) for _, users in stops]  # what needs it here, or receives it from here
        for i, source in reversed(list(enumerate(by))):
            if source is not None:
                needing[source] += needing[i]
        arrived: list[tuple[fx.Node, _Place]] = []
        for i, (worker, users) in enumerate(stops):
            source = by[i]
            sent, place = (dense, home) if source is None else arrived[source]
            waiting = needing[i]
            first = min(waiting, key=self._when)
            hands_on = worker > place[0] and i in by
            arrives: _Place = worker, "F" if hands_on else info(first).phase
            spec = EdgeSpec(
                name=self.prefix + (node.name if alone else f"{node.name}:{worker}"),
                kind=self._kind(node, home[1], info(first).phase),
                src=place[0],
                src_phase=place[1],
                dst=worker,
                dst_phase=arrives[1],
                tensor=tensor_spec(value(sent)),
            )
            late = worker > place[0] and info(first).phase != "F"
            sent = self._edge(node, sent, spec, users, first if info(first).phase == arrives[1] else self.turn, late)
            info(sent).weight = arrives[1] != "F" and all(info(user).weight for user in waiting)
            arrived.append((sent, arrives))

    def _edge(
        self, node: fx.Node, sent: fx.Node, spec: EdgeSpec, users: list[fx.Node], before: fx.Node, late: bool
    ) -> fx.Node:
        """Send `sent`, the form of `node` that travels, and receive it before a node; returns the received value."""
        name = f"{node.name}_send_{spec.dst}"
        if late:
            with self.graph.inserting_before(self.turn):
                send = self.graph.create_node("call_function", wire.send, (sent,), {}, name=name)
        else:
            send = self._insert_after(sent, wire.send, (sent,), name)
        send.meta[INFO] = self._record(sent, spec.src_phase, spec.src)
        with self.graph.inserting_before(before):
            recv = self.graph.create_node("call_function", wire.recv, (send,), {}, name=f"{node.name}_recv_{spec.dst}")
        recv.meta[INFO] = self._record(users[0], spec.dst_phase, spec.dst)
        info(recv).weight = spec.dst_phase != "F" and all(info(user).weight for user in users)
        recv.meta["val"] = send.meta["val"] = value(sent)
        recv.meta[INFO].bytes = size_of(value(sent))
        arrived = recv if value(sent).shape == value(node).shape else self._expand(recv, node)
        if value(sent).device != value(node).device:
            back, place = f"{recv.name}_back", (spec.dst, spec.dst_phase)
            arrived = self._made_of(arrived, aten._to_copy.default, back, place, device=value(node).device)
        for user in users:
            user.replace_input_with(node, arrived)
        self.edges[send.name] = self.edges[recv.name] = spec
        return recv

    def _on_device(self, node: fx.Node, home: _Place) -> fx.Node:
        """A value that a CUDA program has in the CPU's memory, copied once to the device: NCCL sends nothing else."""
        if value(node).device.type != "cpu" or self.device == "cpu":
            return node
        device = torch.device(self.device)
        return self._form(node, "on_device", aten._to_copy.default, home, device=device)

    def _refuse_sparse(self, node: fx.Node, src: int, dst: int) -> None:
        if is_sparse(node):
            raise CutError(
                f"worker {src} would send worker {dst} the sparse tensor {node.name}, but only dense ones can be sent",
                where=f"{info(node).source}: {info(node).text}" if node.op == "call_function" else None,
                hint="make it dense (.to_dense()), or cut the model elsewhere",
            )

    def pace(self, gap: Gap) -> None:
        """Fill a gap with a token that leaves as early as possible; its receiver takes it before all later nodes."""
        after = gap.after
        if after is None:  # at the start of the phase
            calls = (n for n in self.graph.nodes if n.op == "call_function" and info(n).phase in (gap.phase, "B"))
            after = next(calls, self.graph.output_node()).prev
        name = f"pace_{gap.phase}_{gap.src}_{gap.dst}"
        options: dict[str, Any] = {"dtype": torch.uint8, "device": torch.device(self.device)}
        with self.graph.inserting_before(after.next):
            token = self.graph.create_node("call_function", aten.zeros.default, ([1],), options, name=name)
            send = self.graph.create_node("call_function", wire.send, (token,), {}, name=f"{name}_send_{gap.dst}")
            recv = self.graph.create_node("call_function", wire.recv, (send,), {}, name=f"{name}_recv_{gap.dst}")
        for node, worker in ((token, gap.src), (send, gap.src), (recv, gap.dst)):
            node.meta["val"] = torch.empty(1, dtype=torch.uint8, device="meta")
            node.meta[INFO] = self._record(node, gap.phase, worker)
        spec = EdgeSpec(
            name=self.prefix + token.name,
            kind="token",
            src=gap.src,
            src_phase=gap.phase,
            dst=gap.dst,
            dst_phase=gap.phase,
            tensor=tensor_spec(value(token)),
        )
        self.edges[send.name] = self.edges[recv.name] = spec

    def _kind(self, node: fx.Node, source_phase: Phase, read: Phase) -> EdgeKind:
        """The kind of an edge, by the phase that makes its value and the first that reads it from there on."""
        if node.name in self.inputs:
            return "input"
        if source_phase != "F":
            return "gradient"
        return "activation" if read == "F" else "saved"

    def _unexpanded(self, node: fx.Node, home: _Place) -> fx.Node:
        """One element of every dimension that repeats the same memory; made once.

        A dense copy would have the right values but not the layout: operators that find an expanded dimension choose
        their output's layout by their other inputs, and a view that was captured after them may need exactly that
        layout.
        """
        shown = value(node)
        sizes = zip(shown.shape, shown.stride(), strict=True)
        repeated = [d for d, (size, step) in enumerate(sizes) if size > 1 and step == 0]
        if not repeated:
            return node
        return self._unexpanded(self._form(node, "row", aten.slice.Tensor, home, repeated[0], 0, 1), home)

    def _expand(self, recv: fx.Node, node: fx.Node) -> fx.Node:
        """A received value expanded to the size of `node`."""
        home, shape = (info(recv).worker or 0, info(recv).phase), list(value(node).shape)
        expanded = self._made_of(recv, aten.expand.default, f"{recv.name}_expanded", home, shape)
        info(expanded).bytes = size_of(value(expanded))
        return expanded

    def _dense(self, node: fx.Node, home: _Place) -> fx.Node:
        """The value in its own memory, in a layout that can travel as one run of memory; made once."""
        if is_non_overlapping_and_dense_or_false(value(node)) and not self._is_weight(node):
            return node
        # Dimensions keep their order in memory: operators choose their output's layout by it, and a view that was
        # captured after them may need just that layout.
        return self._form(node, "dense", aten.clone.default, home)

    def _is_weight(self, node: fx.Node) -> bool:
        """Whether the value is in a parameter's memory, which the optimizer may overwrite while the value travels."""
        while node.op == "call_function" and is_view(node):
            node = node.all_input_nodes[0]
        return node.name in self.parameters

    def _form(self, node: fx.Node, what: str, target: Any, home: _Place, *args: Any, **kwargs: Any) -> fx.Node:
        """A form of a value that travels in its place; made once."""
        if (node, what) not in self.forms:
            self.forms[node, what] = self._made_of(node, target, f"{node.name}_{what}", home, *args, **kwargs)
        return self.forms[node, what]

    def _made_of(self, node: fx.Node, target: Any, name: str, home: _Place, *args: Any, **kwargs: Any) -> fx.Node:
        """A call on a value, placed right after it."""
        derived = self._insert_after(node, target, (node, *args), name, **kwargs)
        derived.meta["val"] = target(value(node), *args, **kwargs)
        derived.meta[INFO] = self._record(node, home[1], home[0])
        return derived

    def _insert_after(self, node: fx.Node, target: Any, args: tuple[Any, ...], name: str, **kwargs: Any) -> fx.Node:
        anchor = node
        if node.op == "placeholder":
            with self.graph.inserting_before(self.first):  # before every reader, on any worker
                return self.graph.create_node("call_function", target, args, kwargs, name=name)
        while anchor.next.meta.get("val") is not None and anchor.next.target is wire.send:
            anchor = anchor.next  # several destinations keep their order
        with self.graph.inserting_after(anchor):
            return self.graph.create_node("call_function", target, args, kwargs, name=name)

    def _record(self, like: fx.Node, phase: Phase, worker: int) -> NodeInfo:
        record = like.meta.get(INFO, NodeInfo(phase))
        size = size_of(like.meta["val"])
        return record.copy(phase=phase, region=None, unit=max(record.unit, 0), bytes=size, seconds=0.0, worker=worker)

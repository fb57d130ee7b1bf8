"""The channel, tag, replica and process of every message of a plan, the same in every process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fxpipe.plan.plan import Plan
from fxpipe.plan.spec import EdgeSpec, TensorSpec
from fxpipe.plan.urgency import URGENT
from fxpipe.policy.demand import Demand
from fxpipe.task.callbacks import CALLBACKS

Channel = tuple[Any, ...]
UP, DOWN = "up", "down"
CALL = "call"
LOSS = "loss"
HOOKS_CHANGED, HOOKS = "whether hooks changed tensors", "tensors that hooks changed"
NOTES: dict[str, tuple[str, str]] = {
    **{kind: (kind, f"the note {kind}") for kind in (UP, DOWN)},  # of an update: clipping, loss scaling
    **{kind: ("token", f"{kind} of an evaluation") for kind in ("shape", "taken", "metrics")},
    CALL: ("token", CALL),  # the next call, and its shape of batch
    LOSS: ("loss", LOSS),
    **{kind: ("token", kind) for kind in (HOOKS_CHANGED, HOOKS)},
    **{kind: ("token", kind) for kind in CALLBACKS},
}
"""Kinds of notes, each with the kind and the name of its `Cause`, for a worker that waits for one."""


class Way(NamedTuple):
    """The address of a message, for sending or receiving it.

    Attributes:
        worker: at the other end.
        channel: None for a few numbers that are on the CPU and have a tag.
        turn: the same for all messages of a tag.
        replica: of that worker.
    """

    worker: int
    channel: Channel | None
    tag: int | None = None
    turn: int = URGENT
    replica: int = 0

    @property
    def line(self) -> Channel | int | None:
        """Its line between two processes; messages of a line are received in the order of sending."""
        return self.channel if self.tag is None else self.tag


class Addresses:
    """The channel and the tag of every message.

    Attributes:
        channels: all of them, the same list in every process: of edges, weight copies and evaluations.
    """

    def __init__(self, plan: Plan, demand: Demand) -> None:
        evaluating = evaluation_edges(plan)
        edges = {edge.name: _edge_channel(edge) for edge in plan.all_edges}
        pairs = {(edge.src, edge.dst) for edge in evaluating}
        weights = [("weights", o, r) for o in range(plan.workers) for r in demand.readers(o)]
        evaluations = [("evaluate", *pair) for pair in sorted(pairs)]
        self._turns = {(o, r): demand.turn(o, r) for _, o, r in weights}
        self.channels: list[Channel] = [*sorted(set(edges.values())), *weights, *evaluations]
        # Evaluations have one channel from each worker to each other: for moved tensors, then batch after batch.
        self._channels = edges | {edge.name: ("evaluate", edge.src, edge.dst) for edge in evaluating}
        first, pairs_of_workers = 1 + len(self.channels), plan.workers**2
        # It is none of the edges' channels, whose names users choose: a batch of one tensor has the edge `batch`.
        self._notes = {kind: first + i * pairs_of_workers for i, kind in enumerate(NOTES)}
        self._workers = plan.workers
        self._first_edge = first + len(NOTES) * pairs_of_workers
        self._tags = {name: self._first_edge + i for i, name in enumerate(self._channels)}

    def add(self, edges: Sequence[EdgeSpec]) -> None:
        """Add the edges of one more shape of batch, in the same order in every process, so that tags agree."""
        for edge in edges:
            if edge.name not in self._channels:
                self._channels[edge.name] = _edge_channel(edge)
                self._tags[edge.name] = self._first_edge + len(self._tags)

    def unconnected(self, edges: Sequence[EdgeSpec]) -> list[EdgeSpec]:
        """The edges of a new shape whose channel did not exist when the processes connected."""
        return [edge for edge in edges if _edge_channel(edge) not in self.channels]

    def channel(self, edge: EdgeSpec) -> Channel:
        """The channel of an edge's values."""
        return self._channels[edge.name]

    def tag(self, edge: EdgeSpec) -> int:
        """The tag of an edge's values, which nothing else has."""
        return self._tags[edge.name]

    def turn_of_weights(self, owner: int, reader: int) -> int:
        """The turn of all weights that an owner sends a reader (see `fxpipe.plan.urgency`)."""
        return self._turns[owner, reader]

    def tag_of_note(self, kind: str, source: int, target: int) -> int:
        """The tag of a kind of notes from one worker to another, which nothing else has.

        A rank may have several workers, and the notes of two of them to the same rank must not be mixed up.
        """
        return self._notes[kind] + source * self._workers + target


def _edge_channel(edge: EdgeSpec) -> Channel:
    """A channel keeps the order of its messages, so it has one phase at each end: the orders of phases differ."""
    return ("edge", edge.src, edge.dst, edge.kind, edge.src_phase, edge.dst_phase)


@dataclass(frozen=True)
class ReplicaSeat:
    """One replica of a worker, and the replicas of other workers that it exchanges messages with.

    If a worker has r replicas, replica i mod r does microbatch i of the whole minibatch: this decides which replicas
    send and receive the value of an edge. What does not depend on a microbatch (weights, losses, norms, shapes) is the
    same in all replicas of a worker: replica i receives it from replica i mod r. If all workers have the same number,
    every message stays within the pipeline of one replica.

    Attributes:
        replicas: how many each worker has; empty if each has one, or if the replicas' pipelines are separate.
    """

    worker: int
    replica: int = 0
    replicas: tuple[int, ...] = ()

    def number(self, own: int) -> int:
        """The number in the whole minibatch of this replica's microbatch `own`."""
        return own * self._count(self.worker) + self.replica

    def peer(self, worker: int, own: int) -> int:
        """The replica of another worker that does the same microbatch."""
        return self.number(own) % self._count(worker)

    def receivers(self, worker: int) -> tuple[int, ...]:
        """The replicas of another worker to which this one sends what does not depend on a microbatch."""
        return tuple(range(self.replica, self._count(worker), self._count(self.worker)))

    def sender(self, worker: int) -> int:
        """The replica of another worker from which this one receives it."""
        return self.replica % self._count(worker)

    def _count(self, worker: int) -> int:
        return self.replicas[worker] if self.replicas else 1


@dataclass(frozen=True)
class ProcessLine:
    """The processes of a run in a line, along which they pass messages from process to process.

    The first worker of each process represents it, and the processes are in the order of these workers. So a message
    from worker 0 follows the direction of the forwards. With one worker in each process, the line is all workers.

    Attributes:
        speakers: the workers that represent processes, in rising order.
        own: this process's.
    """

    speakers: tuple[int, ...]
    own: int

    @staticmethod
    def of(plan: Plan, rank: int) -> ProcessLine:
        """The line of a run, with this rank's place in it."""
        speakers = [plan.hosted(each)[0] for each in range(plan.ranks)]
        return ProcessLine(tuple(sorted(speakers)), speakers[rank])

    @property
    def before(self) -> int | None:
        """The speaker before this one; None for the first, which is worker 0."""
        place = self.speakers.index(self.own)
        return self.speakers[place - 1] if place else None

    @property
    def after(self) -> int | None:
        """The speaker after this one; None for the last."""
        return next(iter(self.speakers[self.speakers.index(self.own) + 1 :]), None)

    @property
    def others(self) -> tuple[int, ...]:
        """All other speakers."""
        return tuple(speaker for speaker in self.speakers if speaker != self.own)


@dataclass(frozen=True)
class Move:
    """A tensor that is sent from one worker to another before the batches of an evaluation.

    Attributes:
        once: it never changes, so it is sent only before the first evaluation.
    """

    name: str
    spec: TensorSpec
    source: int
    reader: int
    once: bool

    @property
    def edge(self) -> EdgeSpec:
        """The edge along which it is sent."""
        return EdgeSpec(f"evaluate:{self.name}:{self.reader}", "input", self.source, "F", self.reader, "F", self.spec)


def moves(plan: Plan) -> list[Move]:
    """All moves of a plan, in the order in which every worker sends and receives its own."""
    aliases = plan.first_names
    readers: dict[str, set[int]] = {}
    for spec in plan.evaluations:
        for worker, stage in enumerate(spec.stages):
            for name in (*stage.forward.weights, *stage.forward.buffers):
                readers.setdefault(aliases[name], set()).add(worker)
    parameters = [(p.name, p.tensor, p.owner, not p.trained) for p in plan.parameters]
    homes = {b.name: b.home for b in plan.buffers} | dict.fromkeys(plan.followed, 0)
    buffers = [(b.name, b.tensor, home, False) for b in plan.buffers if (home := homes[b.name]) is not None]
    return [
        Move(name, spec, source, reader, once)
        for name, spec, source, once in (*parameters, *buffers)
        for reader in sorted(readers.get(name, ()))
        if reader != source
    ]


def evaluation_edges(plan: Plan) -> list[EdgeSpec]:
    """All edges of evaluation, without notes: of moved tensors, and of the values for every shape of batch."""
    return [*(move.edge for move in moves(plan)), *(edge for spec in plan.evaluations for edge in spec.edges)]

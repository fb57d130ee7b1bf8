"""Where every message of a plan travels: its channel and its tag, the same in every process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fxpipe.plan.spec import EdgeSpec, Plan
from fxpipe.policy.demand import Demand
from fxpipe.runtime.wires.moves import evaluation_edges
from fxpipe.task.callbacks import CALLBACKS

Channel = tuple[Any, ...]
BATCH = "batch"
CALL = "call"
LOSS = "told loss"
NOTES = ("behind", "total", "before", "overflow", "skip", "shape", "metrics", "heard", BATCH, CALL, LOSS, *CALLBACKS)
"""Kinds of notes: for clipping, loss scaling, evaluation, shapes, own loops, callbacks."""


class Addresses:
    """The channel and the tag of every message.

    Attributes:
        channels: all of them, the same list in every process: of edges, weight copies, loss reports and evaluations.
    """

    def __init__(self, plan: Plan, demand: Demand) -> None:
        evaluating = evaluation_edges(plan)
        edges = {edge.name: _edge_channel(edge) for edge in plan.all_edges}
        pairs = {(edge.src, edge.dst) for edge in evaluating}
        weights = [("weights", o, r) for o in range(plan.workers) for r in demand.readers(o)]
        loss = [("loss", plan.loss_worker, 0)] if plan.loss_worker else []
        evaluations = [("evaluate", *pair) for pair in sorted(pairs)]
        self._turns = {(o, r): demand.turn(o, r) for _, o, r in weights}
        self.channels: list[Channel] = [*sorted(set(edges.values())), *weights, *loss, *evaluations]
        # All that one worker sends another for evaluations is in one channel: moved tensors, then batch after batch.
        self._channels = edges | {edge.name: ("evaluate", edge.src, edge.dst) for edge in evaluating}
        first, pairs_of_workers = 1 + len(self.channels), plan.workers**2
        # Apart from the edges', whose names are the user's: a batch that is one tensor travels along the edge `batch`.
        self._notes = {kind: first + i * pairs_of_workers for i, kind in enumerate(NOTES)}
        self._workers = plan.workers
        self._first_edge = first + len(NOTES) * pairs_of_workers
        self._tags = {name: self._first_edge + i for i, name in enumerate(self._channels)}

    def add(self, edges: Sequence[EdgeSpec]) -> None:
        """Add the edges of one more shape of batch: in every process in the same order, so that tags are the same."""
        for edge in edges:
            if edge.name not in self._channels:
                self._channels[edge.name] = _edge_channel(edge)
                self._tags[edge.name] = self._first_edge + len(self._tags)

    def unconnected(self, edges: Sequence[EdgeSpec]) -> list[EdgeSpec]:
        """Those edges of one more shape whose channel no edge had when the processes connected."""
        return [edge for edge in edges if _edge_channel(edge) not in self.channels]

    def channel(self, edge: EdgeSpec) -> Channel:
        """The channel of an edge's values."""
        return self._channels[edge.name]

    def tag(self, edge: EdgeSpec) -> int:
        """The tag of an edge's values; nothing else has the same."""
        return self._tags[edge.name]

    def turn_of_weights(self, owner: int, reader: int) -> int:
        """The turn of all weights that an owner sends a reader (see `fxpipe.plan.urgency`)."""
        return self._turns[owner, reader]

    def tag_of_note(self, kind: str, source: int, target: int) -> int:
        """The tag of a kind of notes from one worker to another; nothing else has the same.

        A rank may have several workers, and what two of them send to the same rank must not be taken for each other's.
        """
        return self._notes[kind] + source * self._workers + target


def _edge_channel(edge: EdgeSpec) -> Channel:
    """Messages of a channel stay in order, so it has one phase at each end: the ends interleave phases differently."""
    return ("edge", edge.src, edge.dst, edge.kind, edge.src_phase, edge.dst_phase)

"""What a part of a worker's update can do, when that is called, what of it a checkpoint saves, and notes of numbers.

begin, or begin, emptied     a segment goes on as a checkpoint left it, or begins with an empty pipeline
reached                      the weights have a version
…forwards and backwards…
gathered                     the gradients of the minibatch are in `grad`
measure, pass_up             numbers to the worker before, before the update
pass_down                    numbers from the worker before
apply                        each part in the list's order: the gradients, then the weights
    before_step, after_step  around the step of the optimizer, which is a part, too
reached
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from fxpipe.plan.spec import StepSpec
from fxpipe.runtime.wires.addresses import DOWN, UP
from fxpipe.runtime.wires.transport import Transport
from fxpipe.runtime.worker.setting import WorkerSetting
from fxpipe.runtime.worker.versions import ReadVersions
from fxpipe.schedule.action import Action


class UpdatePart:
    """A part of one worker's update: clipping, the optimizer's step, averages. `PARTS` lists them.

    Each class overrides what it needs; everything here does nothing.

    Attributes:
        entry: the name of its state in checkpoints; empty without a state.
        form: the type of its state, down to each leaf that fxpipe itself writes.
        alike: all replicas have the same state, so that only the first one saves it. Where replicas make one update
            without shares, all parts have.
        up, down: how many numbers come up from the next worker, and down from the worker before (`UpdateNotes`).
        with_forward: they come down with the first forward of a minibatch, not before its update.
        skips: the optimizer makes no step of the update that is being applied.
    """

    entry: str = ""
    form: ClassVar[Any] = None
    alike: bool = False
    up: int = 0
    down: int = 0
    with_forward: bool = False
    skips: bool = False

    @classmethod
    def of(cls, setting: WorkerSetting) -> Iterable[UpdatePart]:
        """This part of a worker's update; nothing if its run has none."""
        raise NotImplementedError

    @classmethod
    def forms(cls) -> Mapping[str, Any]:
        """The types of what it saves, by name."""
        return {cls.entry: cls.form} if cls.entry else {}

    def begin(self) -> None:
        """A segment begins, or goes on in the middle after `load`."""

    def emptied(self) -> None:
        """The pipeline is empty: forget what belongs to minibatches in flight."""

    def reset(self) -> None:
        """Forget what an interrupted segment has left."""

    def reached(self, versions: ReadVersions) -> None:
        """The weights have a new live version, or a segment begins with one."""

    def leaves(self, leaves: Sequence[Any], step: StepSpec) -> Sequence[Any]:
        """On worker 0: the leaves of a microbatch, in the step's order, with what this part adds to them."""
        return leaves

    def compare_batch(self, minibatch: int, number: int) -> None:
        """On worker 0: a minibatch with this checksum was read, and the replicas' checksums are to be compared."""

    def gathered(self, minibatch: int) -> None:
        """The gradients of a minibatch are in `grad`, over all replicas that make one update."""

    def measure(self, minibatch: int) -> None:
        """The numbers of the gradients are about to be passed up: compute this worker's own."""

    def pass_up(self, behind: Tensor) -> Tensor:
        """What to send up, from this worker's numbers and those received; the last worker receives zeros."""
        raise NotImplementedError

    def pass_down(self, before: Tensor) -> Tensor:
        """What to send down, from what this worker knows and has received; worker 0 receives zeros."""
        raise NotImplementedError

    def apply(self, minibatch: int) -> None:
        """All numbers have arrived: do this part of the minibatch's update, which makes version `minibatch` + 1."""

    def before_step(self) -> None:
        """The optimizer is about to make its step."""

    def after_step(self) -> None:
        """The optimizer has made its step."""

    def begin_meeting(self, version: int, buffers: Sequence[str]) -> None:
        """Nothing is in flight: begin to make separately trained replicas the same.

        Args:
            buffers: the names of those that forwards update.
        """

    def end_meeting(self, version: int) -> None:
        """All replicas here have begun: afterwards they are the same."""

    def common(self) -> Mapping[str, Tensor]:
        """Weights that a checkpoint has in place of the live ones, by name."""
        return {}

    def state(self, version: int) -> Any:
        """What the updates after a version depend on, except the weights; live tensors. None if there is nothing."""
        return None

    def load(self, states: Sequence[Any], version: int, same: bool) -> None:
        """Continue from what `state` gave at a version; weights and the parts before this one have been loaded.

        Args:
            states: this worker's if the cuts are the `same`, else all workers'; none where nothing was saved.
        """


class UpdateNotes:
    """Notes that neighbours send each other for an update: one up after the backwards, one down before the forwards.

        worker 0:  … B7 ◄─────────┐ update ─┐ F8 …
        worker 1:  … B7 ◄──┐ up ──┘         └─► update ─┐ F8 …
        worker 2:  … B7 up ┘                     down   └─► update  F8 …

    They follow the pipeline's order: from the last worker to the first after the backwards, and from the first to the
    last before the forwards. So there is no collective call, no additional waiting, and every run sees the same
    numbers. One exception: if W is separate from B, a worker waits until the later workers end their minibatch.

    There are none if no part of the worker's update has numbers for them.
    """

    def __init__(self, worker: int, workers: int, transport: Transport, parts: Sequence[UpdatePart]) -> None:
        self._transport, self._parts = transport, parts
        self._fields = fields = [part for part in parts if part.up or part.down]
        before = worker - 1 if fields and worker else None
        behind = worker + 1 if fields and worker + 1 < workers else None
        self._ways = {
            UP: (behind, before, [field.up for field in fields]),
            DOWN: (before, behind, [field.down for field in fields]),
        }
        self._with_forward = any(field.with_forward for field in fields)

    def expect(self, action: Action | None, updated: int | None) -> None:
        """Announce to the transport the notes that an action needs, some actions before it.

        Args:
            action: None for a flush.
            updated: the minibatch whose update is part of it, if any.
        """
        down = updated
        if self._with_forward:
            down = action.minibatch if action is not None and (action.phase, action.microbatch) == ("F", 0) else None
        for kind, minibatch in ((UP, updated), (DOWN, down)):
            source, _, counts = self._ways[kind]
            if minibatch is not None and source is not None:
                self._transport.expect_note(source, (kind, minibatch), sum(counts))

    def forward(self, minibatch: int) -> None:
        """The first forward of a minibatch is about to run."""
        if self._with_forward:
            self._pass(DOWN, minibatch)

    def announce(self, minibatch: int) -> None:
        """The gradients are complete on this worker: wait for the note of the next, then send one up."""
        for part in self._parts:
            part.measure(minibatch)
        self._pass(UP, minibatch)

    def apply(self, minibatch: int) -> None:
        """Let each part do its part of the update; may wait for the note of the worker before, and other replicas."""
        if not self._with_forward:
            self._pass(DOWN, minibatch)
        for part in self._parts:
            part.apply(minibatch)

    def _pass(self, kind: str, minibatch: int) -> None:
        """Give each its numbers of one neighbour's note, and send what they return to the other neighbour."""
        if not self._fields:
            return
        source, target, counts = self._ways[kind]
        if source is None:
            heard = torch.zeros(sum(counts), dtype=torch.float64)
        else:
            heard = self._transport.recv_note(source, (kind, minibatch))
        numbers = zip(self._fields, heard.split(counts), strict=True)
        told = [field.pass_up(those) if kind == UP else field.pass_down(those) for field, those in numbers]
        if target is not None:
            self._transport.send_note(target, (kind, minibatch), torch.cat(told))

"""What a part of a worker's update can do, when that is called, and what of it a checkpoint saves.

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

from torch import Tensor

from fxpipe.runtime.worker.setting import WorkerSetting
from fxpipe.runtime.worker.versions import ReadVersions


class UpdatePart:
    """A part of one worker's update: clipping, the optimizer's step, averages. `parts.py` lists them.

    Each class overrides what it needs; everything here does nothing.

    Attributes:
        name: of its state in checkpoints; empty without a state.
        form: the type of its state, down to each leaf that fxpipe itself writes.
        alike: all replicas have the same state, so that only the first one saves it. Where replicas make one update
            without shares, all parts have.
        up, down: how many numbers come up from the next worker, and down from the worker before (`UpdateNotes`).
        with_forward: they come down with the first forward of a minibatch, not before its update.
        skips: the optimizer makes no step of the update that is being applied.
    """

    name: str = ""
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
        return {cls.name: cls.form} if cls.name else {}

    def begin(self) -> None:
        """A segment begins, or goes on in the middle after `load`."""

    def emptied(self) -> None:
        """The pipeline is empty: forget what belongs to minibatches in flight."""

    def reset(self) -> None:
        """Forget what an interrupted segment has left."""

    def reached(self, versions: ReadVersions) -> None:
        """The weights have a new live version, or a segment begins with one."""

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

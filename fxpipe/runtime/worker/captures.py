"""Takes one worker's part of a checkpoint while training runs on, and decides when.

A checkpoint at step S cuts between minibatches: all actions of those before S are over, none of S or later has begun.
No worker is ever in that state: with `async` the forwards of S and of later minibatches run before the update that
makes version S. A run that resumes repeats these forwards, on the values that they read the first time:

    worker 0:  …  F7  B4  F8  B5  F9  B6  F10  B7 │ F11 …       S = 8: │ is where version 8 is live
                          ▲                       ▲
                   buffers as the                 weights, state of the optimizer
                   forward of 8 reads them

and, at each of the updates before S, what F8 … F10 read of the version that the update replaces, predicted as they
read it, here or on other workers. These weights depend only on the version, so it does not matter whether those
forwards have run: a run that ends at S can be continued.

Where weight copies are sent as encoded differences, other workers read decoded weights. They are kept for each reader,
of version S too: the messages of later versions build on them.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from time import monotonic
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxpipe.checkpoint.shard import Past, Saves, Sent, Shard
from fxpipe.messages import warn
from fxpipe.runtime.wires.board import ASKED, Board
from fxpipe.runtime.worker.executor import Executor
from fxpipe.runtime.worker.observer import Observer
from fxpipe.runtime.worker.weights import WeightStore
from fxpipe.task.wrapped_tensors import rewrapped

Due = Callable[[int], bool]
"""Whether a checkpoint is due at a step; known `Captures.reach` steps before, and fixed from then on."""


class Captures(Observer):
    """Follows a worker, and takes its shards of the checkpoints that are due.

    Attributes:
        reach: how many updates back the minibatches in flight read this worker's weights.
    """

    def __init__(self, executor: Executor, due: Due, past: Past, sent: Sent) -> None:
        self.executor = executor
        self.due = due
        self._whole = _saves(executor).whole
        self.reach = executor.store.demand.reach(executor.worker)
        self._begun: dict[int, Shard] = {}
        self._taken = self._begun_at = executor.store.version
        self._earlier = {key: _all_copied(of) for key, of in past.items()}
        self._earlier_sent = {key: _all_copied(of) for key, of in sent.items()}
        self._memories: dict[int, dict[str, dict[str, Tensor]]] = {}  # of codecs, by step: some are ahead of updates
        executor.observers.append(self)

    def take(self) -> Shard | None:
        """Called between two actions: this worker's shard if a checkpoint is due at the step just reached."""
        store = self.executor.store
        step = store.version
        if step == self._taken:
            return None
        self._taken = step
        memories = self._memories.pop(step, {})
        if not self.due(step):
            return None
        self.executor.watch.open("save")
        shard = self._begun.pop(step, Shard(step))
        if self._whole:
            if not shard.buffers:  # no forward of it has begun
                self.executor.take_buffers(step)
                shard.buffers = dict(self.executor.buffers)
            shard.start = store.versions.start
            self._take_earlier(shard)
            if store.versions.copies.encoded:
                shard.sent.update(_sent(store, step))
            shard.past = dict(sorted(shard.past.items()))
            shard.sent = dict(sorted(shard.sent.items()))
        _copy_into(shard, self.executor, shard.buffers, memories)
        self.executor.watch.close()
        return shard

    def begins(self, minibatch: int) -> None:
        """The first forward of a minibatch is about to run; forwards replace buffers."""
        if self._whole and minibatch > self._taken and self.due(minibatch):
            self._of(minibatch).buffers = dict(self.executor.buffers)

    def ended(self, minibatch: int) -> None:
        """All gradients of a minibatch were sent; codecs replace what they remember."""
        self._memories[minibatch + 1] = self.executor.codec_memories()

    @torch.no_grad()
    def leaving(self, version: int) -> None:
        """A version is about to be replaced."""
        store, watch = self.executor.store, self.executor.watch
        if not self._whole:
            return
        for step in range(version + 1, version + self.reach + 1):
            if not self.due(step):
                continue
            shard = self._of(step)
            watch.open("save")
            for reader, ahead, names in _needed(store, version, step):
                if reader != self.executor.worker and store.versions.copies.encoded:
                    continue
                held = shard.past.setdefault((version, ahead), {})
                found = store.versions.predictions.look(names, ahead)
                held.update({name: copied(found[name]) for name in names if name not in held})
            if store.versions.copies.encoded:
                shard.sent.update(_sent(store, step))
            watch.close()

    def _take_earlier(self, shard: Shard) -> None:
        """Take versions from before this run resumed; they are forgotten once no step needs them."""
        oldest = shard.step - self.reach
        self._earlier = {key: of for key, of in self._earlier.items() if key[0] >= oldest}
        self._earlier_sent = {key: of for key, of in self._earlier_sent.items() if key[0] >= oldest}
        encoded = self.executor.store.versions.copies.encoded
        versions = {key[0] for key in self._earlier} | {key[0] for key in self._earlier_sent}
        for version in sorted(version for version in versions if version < self._begun_at):
            for reader, ahead, names in _needed(self.executor.store, version, shard.step):
                if reader != self.executor.worker and encoded:
                    shard.sent[version, ahead, reader] = self._earlier_sent[version, ahead, reader]
                else:
                    held = shard.past.setdefault((version, ahead), {})
                    held.update({name: self._earlier[version, ahead][name] for name in names})

    def _of(self, step: int) -> Shard:
        return self._begun.setdefault(step, Shard(step))


def shard_at_rest(executor: Executor) -> Shard:
    """A worker's shard after a flush, with nothing in flight."""
    store = executor.store
    for part in store.parts:
        part.emptied()  # as the next segment will
    shard = Shard(store.version, store.version)
    _copy_into(shard, executor, executor.buffers, executor.codec_memories())
    return shard


def _saves(executor: Executor) -> Saves:
    return Saves.of(executor.store.demand.plan, executor.worker, executor.replica)


def _copy_into(
    shard: Shard, executor: Executor, buffers: Mapping[str, Tensor], memories: dict[str, dict[str, Tensor]]
) -> None:
    """Copy what a worker saves of what it holds between two minibatches."""
    store, saves = executor.store, _saves(executor)
    _warn_of_unsaved(executor)
    shard.codecs = _copy(memories, {})
    if saves.whole:
        shard.parameters = _all_copied(store.saved)
        shard.buffers = _all_copied(buffers)
    if saves.state:
        shard.state = _copy(store.state(), {})


def _warn_of_unsaved(executor: Executor) -> None:
    """Warn once of what checkpoints leave out, in the process of the first worker that trains something."""
    first = min((p.owner for p in executor.store.demand.plan.parameters if p.trained), default=0)
    unsaved = executor.store.updater.unsaved
    if (executor.worker, executor.replica) == (first, 0) and unsaved and (found := unsaved.warning()):
        warn(found)


def _needed(store: WeightStore, version: int, step: int) -> Iterator[tuple[int, int, tuple[str, ...]]]:
    """What actions from a step on read of a version: the reader, how far ahead it predicts, and which parameters."""
    for reader in range(store.demand.plan.workers):
        for message in store.demand.messages(store.worker, reader, version, store.versions.start, None, step):
            yield reader, message.ahead, message.names


@torch.no_grad()
def _sent(store: WeightStore, step: int) -> dict[tuple[int, int, int], dict[str, Tensor]]:
    """What other workers have of the live version, if minibatches from a step on read it."""
    found = {}
    for reader, ahead, names in _needed(store, store.version, step):
        if reader != store.worker:
            made = store.versions.copies.of_reader(reader, ahead, names, store.versions.predictions.look(names, ahead))
            found[store.version, ahead, reader] = _all_copied(made)
    return found


def copied(tensor: Tensor) -> Tensor:
    """A copy on the CPU with the same memory layout, from which operators choose the layout of their results."""
    return rewrapped(tensor, lambda t: torch.empty_like(t, device="cpu", requires_grad=False).copy_(t.detach()))


def _all_copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: copied(value) for name, value in tensors.items()}


def _copy(value: Any, done: dict[int, Tensor]) -> Any:
    """The value with copies of all tensors in it."""
    if isinstance(value, Tensor):
        if id(value) not in done:
            done[id(value)] = copied(value)
        return done[id(value)]
    if type(value) is dict:
        return {key: _copy(each, done) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copy(each, done) for each in value)
    return copy.deepcopy(value)


PERIOD = 1.0
"""Seconds between two entries, if steps are shorter."""


class _AgendaEntry(NamedTuple):
    """The step of a checkpoint, if one is due; whether the run stops after it, or if it can be written moves; how many
    steps to the next entry."""

    save: int | None
    stop: bool
    moves: bool
    steps: int


class Agenda:
    """Checkpoints that were not known when the run began: every N minutes, and before a run stops.

    All workers must know of a checkpoint some steps before it (see `Captures`). Worker 0 decides about once a second.
    It writes an entry before its forward of a minibatch; every other worker reads it before its own forward of that
    minibatch, which runs later. So no worker waits.

        worker 0, before F120: no checkpoint, the next entry 40 steps on
                  before F160: a checkpoint at step 164, the next entry 40 steps on

    Args:
        step: the first minibatch of this run.
        ahead: how many steps in advance a checkpoint must be known.
        seconds: between two checkpoints; None makes none by time.
        writes: this process has worker 0.
        asked: whether this process was asked to stop the run: it says so on the board, for worker 0.

    Attributes:
        stop: the last checkpoint, after which the run stops; None while it goes on.
        moves: it stops to begin again, and goes on if the checkpoint cannot be written.
    """

    def __init__(
        self,
        board: Board,
        step: int,
        ahead: int,
        seconds: float | None,
        writes: bool,
        asked: Callable[[], bool],
    ) -> None:
        self.stop: int | None = None
        self.moves = False
        self._board = board
        self._ahead = ahead
        self._seconds = seconds
        self._writes = writes
        self._asked = asked
        self._next = step
        self._steps: set[int] = set()
        self._unforgotten: list[int] = []
        self._saved = monotonic()
        self._entered = (step, self._saved)  # the minibatch and the time of the last entry

    def __contains__(self, step: int) -> bool:
        """Whether a checkpoint is known to be due at a step."""
        return step in self._steps

    def add(self, step: int) -> None:
        """Add a checkpoint that every worker decides on by itself."""
        self._steps.add(step)

    def begin(self, minibatch: int, over: int) -> None:
        """The first forward of a minibatch is about to run on a worker of this process.

        Args:
            over: how many minibatches have their loss in all replicas. All their forwards have begun on every worker,
                so their entries will not be read again.
        """
        if minibatch != self._next or (self.stop is not None and not self.moves):
            return
        if self._asked():
            self._board.set(ASKED, "")
        entry = self._written(minibatch, over) if self._writes else self._read(minibatch)
        self._next = minibatch + entry.steps
        if entry.save is not None:
            self._steps = {step for step in self._steps if step > minibatch - self._ahead} | {entry.save}
        if entry.stop:
            self.stop, self.moves = entry.save, entry.moves

    def go_on(self, step: int) -> None:
        """The run does not stop after the checkpoint at this step."""
        if self.stop == step:
            self.stop = None

    def _written(self, minibatch: int, over: int) -> _AgendaEntry:
        self._board.forget([_key(earlier) for earlier in self._unforgotten if earlier < over])
        self._unforgotten = [earlier for earlier in self._unforgotten if earlier >= over] + [minibatch]
        now = monotonic()
        before, then = self._entered
        pace = (now - then) / (minibatch - before) if minibatch > before else PERIOD
        self._entered = (minibatch, now)
        asked = self._board.get(ASKED)
        stop = self.stop is None and asked is not None
        save = stop or (self._seconds is not None and now - self._saved >= self._seconds)
        if save:
            self._saved = now
        steps = max(1, round(PERIOD / max(pace, 1e-6)))
        entry = _AgendaEntry(minibatch + self._ahead if save else None, stop, bool(asked), steps)
        self._board.set(_key(minibatch), json.dumps(entry))
        return entry

    def _read(self, minibatch: int) -> _AgendaEntry:
        return _AgendaEntry(*json.loads(self._board.wait([_key(minibatch)])[0]))


def _key(minibatch: int) -> str:
    return f"fxpipe/agenda/{minibatch}"

"""Checkpoints that nobody knew of when the run began: every so many minutes, and before a run stops.

All workers must know of a checkpoint some steps before it (see `Captures`). Worker 0 decides, about once a second, and
tells the others with the pipeline's own order: it writes an entry before its forward of a minibatch, and every other
worker reads that entry before its forward of the same minibatch, which comes later. So nobody waits.

    worker 0, before F120: no checkpoint, the next entry 40 steps on
              before F160: a checkpoint at step 164, the next entry 40 steps on
"""

from __future__ import annotations

import json
from collections.abc import Callable
from time import monotonic, sleep
from typing import NamedTuple

from fxpipe.runtime.wires.exchange import Exchange

PERIOD = 1.0
"""Seconds between two entries, where steps are shorter than that."""

GLANCE = 0.002
"""Seconds between two looks for an entry."""


class _AgendaEntry(NamedTuple):
    """The step of a checkpoint, if there is to be one; whether the run stops after it; the steps to the next entry."""

    save: int | None
    stop: bool
    steps: int


class Agenda:
    """One process's copy.

    Args:
        step: the first minibatch of this run.
        ahead: how many steps before a checkpoint it must be known.
        seconds: between two checkpoints; None makes none by the clock.
        writes: this process has worker 0.
        asked: whether the run is to stop; looked at where `writes`.

    Attributes:
        stop: the last checkpoint, after which the run stops; None while it goes on.
    """

    def __init__(
        self,
        exchange: Exchange,
        step: int,
        ahead: int,
        seconds: float | None,
        writes: bool,
        asked: Callable[[], bool],
    ) -> None:
        self.stop: int | None = None
        self._exchange = exchange
        self._ahead = ahead
        self._seconds = seconds
        self._writes = writes
        self._asked = asked
        self._next = step
        self._steps: set[int] = set()
        self._unforgotten: list[int] = []
        self._saved = monotonic()
        self._entered = (step, self._saved)  # the minibatch and the time of the entry before

    def __contains__(self, step: int) -> bool:
        """Whether there is a checkpoint at a step, by what is known."""
        return step in self._steps

    def add(self, step: int) -> None:
        """All workers decide by themselves that there is a checkpoint at a step."""
        self._steps.add(step)

    def begin(self, minibatch: int, over: int) -> None:
        """The first forward of a minibatch is about to run on a worker of this process.

        Args:
            over: how many minibatches have their loss, in all replicas. Every forward of those has begun, on every
                worker: no entry of theirs will be read again.
        """
        if minibatch != self._next or self.stop is not None:
            return
        entry = self._written(minibatch, over) if self._writes else self._read(minibatch)
        self._next = minibatch + entry.steps
        if entry.save is not None:
            self._steps = {step for step in self._steps if step > minibatch - self._ahead} | {entry.save}
        if entry.stop:
            self.stop = entry.save

    def _written(self, minibatch: int, over: int) -> _AgendaEntry:
        self._exchange.forget([_key(earlier) for earlier in self._unforgotten if earlier < over])
        self._unforgotten = [earlier for earlier in self._unforgotten if earlier >= over] + [minibatch]
        now = monotonic()
        before, then = self._entered
        pace = (now - then) / (minibatch - before) if minibatch > before else PERIOD
        self._entered = (minibatch, now)
        stop = self._asked()
        save = stop or (self._seconds is not None and now - self._saved >= self._seconds)
        if save:
            self._saved = now
        steps = max(1, round(PERIOD / max(pace, 1e-6)))
        entry = _AgendaEntry(minibatch + self._ahead if save else None, stop, steps)
        self._exchange.set(_key(minibatch), json.dumps(entry))
        return entry

    def _read(self, minibatch: int) -> _AgendaEntry:
        while (found := self._exchange.get([_key(minibatch)])) is None:
            sleep(GLANCE)
        return _AgendaEntry(*json.loads(found[0]))


def _key(minibatch: int) -> str:
    return f"fxpipe/agenda/{minibatch}"

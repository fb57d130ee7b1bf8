"""Finds a run that stands still, and says which worker waits for which other, and for what.

In such a run no worker moves: none ends a span, a phase, or a tensor of the final weights. The workers' pulses
(`fxpipe.observe.pulse`) show that to the process that watches: the launcher, or under torchrun one of the workers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from fxpipe.errors import WorkerLost, listed
from fxpipe.messages import say, warn
from fxpipe.observe.pulse import CAUSES, PERIOD, PostedPulses, Pulse, Signs
from fxpipe.plan.mesh import MESH, Mesh
from fxpipe.runtime.options import RunOptions
from fxpipe.runtime.process.ends import process_name
from fxpipe.runtime.process.last_saved import LOOK, finish_writing, name_checkpoint

GROWTH = 2
"""The factor by which the time until the next warning grows."""

LIMIT = 10
"""A run that stands still ends after this many times the timeout."""

LOADING = 3
"""Before training begins, a worker has this many times the timeout: models, data and compilers may take long."""

SILENT = 10 * PERIOD
"""Seconds without a beat after which a worker counts as not running."""

SHOWN = 16
"""How many workers a warning describes."""

_DOES = {
    "F": "computes the forward of step {step}",
    "B": "computes the backward of step {step}",
    "W": "computes the weight gradients of step {step}",
    "predict": "predicts weights for step {step}",
    "update": "makes the update of step {step}",
    "send": "sends a value of step {step}",
    "receive": "receives a value of step {step}",
    "data": "waits for the data of step {step}",
    "save": "copies its state for a checkpoint at step {step}, or waits for the disk",
    "wait": "waits for another worker",
}
_PHASES = {
    "starting": "starts",
    "importing": "imports torch",
    "loading": "loads its stage",
    "training": "is between two actions",
    "evaluating": "evaluates",
    "compiling a shape": "compiles stages for a new shape of batch",
    "writing results": "writes results",
    "done": "is done",
}


class Standstill(NamedTuple):
    """A run that stands still: the warning, and why the run ends, once it has stood still for too long."""

    text: str
    ends: WorkerLost | None


class StallWatch:
    """Looks at the workers again and again.

    The first warning comes after `timeout` seconds without a move; 0: never. `stopped` knows from the system
    whether a process is stopped. Where a rank has several workers, lines are about its process; what that waits for is
    a worker's.
    """

    def __init__(
        self,
        timeout: float,
        stopped: Callable[[int], bool] = lambda rank: False,
        clock: Callable[[], float] = time.monotonic,
        mesh: Mesh = MESH,
    ) -> None:
        self._timeout = timeout
        self._stopped = stopped
        self.mesh = mesh
        self._clock = clock
        self._before: list[Signs] = []
        self._still = 0.0
        self._silent: list[float] = []
        self._next = timeout
        self._looked = clock()

    def look(self, signs: Sequence[Signs]) -> Standstill | None:
        """Look at all workers, by rank; call it at least once a second. Warnings come at growing intervals."""
        now = self._clock()
        # While this process itself did not run (a suspended machine, a stopped group), it saw nothing.
        passed, self._looked = min(now - self._looked, 5 * PERIOD), now
        if len(self._before) != len(signs):
            self._before, self._silent = list(signs), [0.0] * len(signs)
        beats = [new.beat != old.beat for new, old in zip(signs, self._before, strict=True)]
        moves = [s.moves for s in signs] != [s.moves for s in self._before]
        # A compile has no time limit, as long as its process runs.
        moves |= any(beat and s.phase == "compiling a shape" for beat, s in zip(beats, signs, strict=True))
        self._silent = [
            0.0 if beat or not new.beat else silent + passed  # while torch is imported, nothing beats
            for beat, silent, new in zip(beats, self._silent, signs, strict=True)
        ]
        self._before = list(signs)
        self._still += passed
        if moves or not self._timeout:
            self._still, self._next = 0.0, self._timeout
        if not self._timeout or self._still < self._next:
            return None
        limit = LIMIT * self._timeout * (LOADING if any(s.phase in _BEFORE_TRAINING for s in signs) else 1)
        over = self._still >= limit
        self._next = min(self._next * GROWTH, limit)
        head = self._head(signs)
        lines = self._lines(signs)
        text = "\n  ".join([f"no worker has moved for {self._still:.0f} s: {head}", *lines])
        if not over:
            return Standstill(text, None)
        where = "\n      ".join(lines)
        hint = "--stall-timeout SECONDS gives a run more time, 0 has no limit"
        what = f"the run stood still for {self._still:.0f} s: {head}"
        return Standstill(text, WorkerLost(what, where=where, hint=hint))

    def silent(self, worker: int) -> bool:
        """Whether a worker that has begun is not running."""
        return self._silent[worker] >= SILENT

    def _head(self, signs: Sequence[Signs]) -> str:
        """Which worker the others wait for, in words."""
        silent = [w for w, s in enumerate(signs) if s.phase != "done" and (self._stopped(w) or self.silent(w))]
        busy = [w for w, s in enumerate(signs) if not (s.doing == "wait" and s.what) and s.phase != "done"]
        if silent:
            return f"{self._named(silent)} does not answer"
        if len(busy) == 1:
            return self._does(busy[0], signs[busy[0]])
        return "all workers wait for each other" if not busy else f"look at {self._named(busy)}"

    def _named(self, ranks: Sequence[int]) -> str:
        if self.mesh.plain:
            return f"worker {listed([str(rank) for rank in ranks], SHOWN)}"
        return listed([process_name(rank, self.mesh) for rank in ranks], SHOWN)

    def _lines(self, signs: Sequence[Signs]) -> list[str]:
        lines = [self._does(worker, s) for worker, s in enumerate(signs)]
        return lines[:SHOWN] + ([f"and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else [])

    def _does(self, worker: int, signs: Signs) -> str:
        """What a worker does, or did last."""
        training = signs.phase == "training"
        if signs.doing == "wait" and signs.what == "sent":
            does = f"waits until worker {signs.other} takes what it has sent"
        elif signs.doing == "wait" and signs.what is not None:
            does = f"waits for worker {signs.other}: {CAUSES[signs.what]}"
            does += f" of step {signs.step}" if training and signs.step else ""
        elif signs.doing is not None and training:
            does = _DOES.get(signs.doing, _PHASES["training"]).format(step=signs.step)
        else:
            does = _PHASES[signs.phase] + (f" of step {signs.step}" if training and signs.step else "")
        who = process_name(worker, self.mesh)
        if self._stopped(worker):
            return f"{who} is stopped (SIGSTOP); before, it {does}"
        if self.silent(worker) and signs.phase != "done":
            return f"{who} does not answer; {self._silent[worker]:.0f} s ago, it {does}"
        return f"{who} {does}"


_BEFORE_TRAINING = ("starting", "importing", "loading")


def waited_for_disk(signs: Sequence[Signs], read: Callable[[], list[Signs]], out: str | None) -> bool:
    """Whether a run that stands still has only waited until its checkpoints were on the disk, and goes on now.

    Checkpoints that all workers have copied are whole after this. None can begin meanwhile: the worker that stands
    still would have to reach its step. `signs` are those of all workers as they stood still; `read` reads them now.
    """
    if not finish_writing(out):
        return False
    time.sleep(PERIOD + LOOK)  # until all pulses say whether they go on
    return [worker.moves for worker in read()] != [worker.moves for worker in signs]


class WatchingWorker:
    """What a process does after each beat under torchrun: it puts its numbers into the store and watches the others.

    Rank 0 watches; rank 1 does if rank 0 does not answer. A process that cannot reach the store, on the host of worker
    0, knows nothing of the others, and no other can end it: it ends itself after the time that a run may stand still.
    Without a network a call of the store may take a quarter of an hour, so a separate thread looks at the clock.
    """

    def __init__(
        self,
        pulses: PostedPulses,
        pulse: Pulse,
        rank: int,
        options: RunOptions,
        end: Callable[[int], object],
        mesh: Mesh = MESH,
    ) -> None:
        self._pulses, self._pulse, self._rank, self._options, self._end = pulses, pulse, rank, options, end
        self._stall = StallWatch(options.stall_timeout, mesh=mesh)
        self._answered = time.monotonic()
        if options.stall_timeout and rank:
            threading.Thread(target=self._wait_for_store, name="fxpipe-store", daemon=True).start()

    def _wait_for_store(self) -> None:
        """End this process when the store has not answered for as long as a run may stand still."""
        limit = LIMIT * self._options.stall_timeout
        while (silent := time.monotonic() - self._answered) < limit:
            if self._pulse.ends_within(min(PERIOD, limit - silent)):
                return
        who = process_name(self._rank, self._stall.mesh)
        self._stop(
            WorkerLost(
                f"{who} has not reached the host of worker 0 for {silent:.0f} s: the link or the host is down",
                where=f"{who}, {Signs.of(self._pulse.numbers).place}",
                hint="--stall-timeout SECONDS gives a run more time, 0 has no limit",
            )
        )

    def _stop(self, error: WorkerLost) -> None:
        name_checkpoint(error, self._options, self._options.out)
        say(f"error: {error}")
        self._end(1)

    def _read(self) -> list[Signs]:
        self._pulses.put(self._rank, self._pulse.numbers)
        return self._pulses.read() if self._rank < 2 else []

    def __call__(self) -> None:
        signs = self._read()
        self._answered = time.monotonic()
        if not signs or (standstill := self._stall.look(signs)) is None:
            return
        if self._rank and not self._stall.silent(0):
            return
        warn(standstill.text)
        if standstill.ends is not None and not waited_for_disk(signs, self._read, self._options.out):
            self._stop(standstill.ends)

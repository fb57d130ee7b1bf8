"""The pulse of a process: a few numbers that say what its workers do right now, where others can read them.

In a run on one machine the numbers of all workers lie in one small file that each of them maps into its memory: they
cost nothing to write, the file never grows, and they outlive a worker that is killed. Under torchrun each worker puts
its numbers into the process group's store once a second. A thread lets the pulse beat, so that a worker that
is stopped looks different from one that waits. Imports no torch: the pulse begins before torch is imported.
"""

from __future__ import annotations

import mmap
import threading
from array import array
from collections.abc import Callable, MutableSequence, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, get_args

from fxpipe.observe.trace import KINDS

Phase = Literal[
    "starting", "importing", "loading", "training", "evaluating", "compiling a shape", "writing results", "done"
]
PHASES: tuple[Phase, ...] = get_args(Phase)
WHATS = ("input", "activation", "saved", "gradient", "token", "weights", "up", "down", "loss", "sent", "sum")
"""What a worker may wait for: see `fxpipe.observe.watch.Cause`; last, that what it sent is received."""

PULSES = "pulses"
"""The file in the folder of a run on one machine."""

PERIOD = 1.0
"""Seconds between two beats."""

SIZE = 11
_PHASE, STEP, MOVES, _BEAT, _STATUS, _DOING, _WHAT, _OTHER = 0, 1, 2, 3, slice(4, 8), 8, 9, 10
_NOTHING = -1
_ITEM = 8
"""Bytes of a number."""


class Status(NamedTuple):
    """What a worker has done since it began, in nanoseconds, and how many microbatches it holds."""

    now: int
    busy: int
    waiting: int
    in_flight: int


class Signs(NamedTuple):
    """What a worker's numbers say.

    Attributes:
        step: of what it does, from 1; 0 before the first.
        moves: how much it has done: while this stays, it makes no progress.
        beat: how many beats there have been: while this stays, the worker does not run.
        doing: the kind of the innermost open span; None between two.
        what: what it waits for or exchanges, None if that is nothing.
        other: with which worker.
    """

    phase: Phase
    step: int
    moves: int
    beat: int
    status: Status
    doing: str | None
    what: str | None
    other: int

    @staticmethod
    def of(numbers: Any) -> Signs:
        """Read a worker's numbers."""
        doing, what = numbers[_DOING], numbers[_WHAT]
        return Signs(
            PHASES[numbers[_PHASE]],
            numbers[STEP],
            numbers[MOVES],
            numbers[_BEAT],
            Status(*numbers[_STATUS]),
            None if doing == _NOTHING else KINDS[doing],
            None if what == _NOTHING else WHATS[what],
            numbers[_OTHER],
        )

    @property
    def place(self) -> str:
        """`training step 12`, `importing`."""
        step = f" step {self.step}" if self.step and self.phase == "training" else ""
        after = f" after step {self.step}" if self.step and self.phase == "evaluating" else ""
        return self.phase + step + after


def no_numbers() -> MutableSequence[int]:
    """The numbers of a worker that has done nothing."""
    return array("q", [0] * _DOING + [_NOTHING] * (SIZE - _DOING))


class PulseFile:
    """The file with the numbers of all workers of a run on this machine."""

    def __init__(self, path: Path, workers: int) -> None:
        if not path.exists():
            path.write_bytes(bytes(no_numbers()) * workers)
        with path.open("r+b") as file:
            self._memory = memoryview(mmap.mmap(file.fileno(), workers * SIZE * _ITEM)).cast("q")
        self._workers = workers

    def numbers(self, worker: int) -> MutableSequence[int]:
        """A worker's, to be read and written."""
        return self._memory[worker * SIZE : (worker + 1) * SIZE]  # type: ignore[return-value]

    def read(self) -> list[Signs]:
        return [Signs.of(self.numbers(worker)) for worker in range(self._workers)]


class StorePulses:
    """The numbers of all workers in the process group's store."""

    def __init__(self, store: Any, workers: int) -> None:
        self._store = store
        self._keys = [f"fxpipe/pulse/{worker}" for worker in range(workers)]

    def first_to_end(self) -> bool:
        """Say that this process ends before its work is done; return whether no other has said so before."""
        try:
            return bool(self._store.add("fxpipe/ended", 1) == 1)
        except RuntimeError:  # the store ends with the process that holds it
            return False

    def put(self, worker: int, numbers: MutableSequence[int]) -> None:
        """Replace a worker's numbers.

        Raises:
            RuntimeError: the store is gone.
        """
        self._store.set(self._keys[worker], bytes(array("q", numbers)))

    def read(self) -> list[Signs]:
        """By rank; empty if the store is gone or a worker has not put any numbers yet."""
        try:
            if not self._store.check(self._keys):
                return []
            found = self._store.multi_get(self._keys)
        except RuntimeError:  # the store ends with the process that holds it
            return []
        return [Signs.of(array("q", text)) for text in found]


Pulses = PulseFile | StorePulses
"""Where the pulses of all workers can be read, by rank."""


class Followed(Protocol):
    """What a pulse asks of a watch: `fxpipe.observe.watch.Watch`."""

    pulse: MutableSequence[int]

    @property
    def doing(self) -> tuple[Any, Any] | None: ...

    @property
    def status(self) -> Status: ...


class Pulse:
    """The pulse of one process. The last watch in which a span is open says what it does.

    Args:
        numbers: where others read them, or its own, which `after_beat` passes on.
    """

    def __init__(self, numbers: MutableSequence[int] | None = None) -> None:
        self.numbers = no_numbers() if numbers is None else numbers
        self.after_beat: list[Callable[[], None]] = []
        self._watches: Sequence[Followed] = ()
        self._others: Sequence[Followed] = ()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep_beating, name="fxpipe pulse", daemon=True)

    @property
    def phase(self) -> Phase:
        """What the worker does."""
        return PHASES[self.numbers[_PHASE]]

    @phase.setter
    def phase(self, phase: Phase) -> None:
        self.numbers[_PHASE] = PHASES.index(phase)
        self.move()

    @property
    def begun(self) -> bool:
        """Whether it has begun a step."""
        return self.numbers[STEP] > 0

    def move(self) -> None:
        """The worker makes progress."""
        self.numbers[MOVES] += 1

    def follow(self, watches: Sequence[Followed], others: Sequence[Followed] = ()) -> None:
        """From now on the spans of these watches are progress, and say what the process does.

        Args:
            watches: one for each of its workers; they say how busy it is.
            others: watches of what else it measures.
        """
        for watch in (*watches, *others):
            watch.pulse = self.numbers
        self._watches, self._others = watches, others

    def begin(self) -> None:
        """Let it beat."""
        self._thread.start()

    def end(self) -> None:
        """Stop."""
        self._over.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(PERIOD)

    def ends_within(self, seconds: float) -> bool:
        """Wait until it ends, but no longer than this; whether it has."""
        return self._over.wait(seconds)

    def beat(self) -> None:
        """Say what the worker does now."""
        numbers = self.numbers
        numbers[_BEAT] += 1
        for place, value in zip(range(_STATUS.start, _STATUS.stop), self._status(), strict=True):
            numbers[place] = value
        every = (*self._watches, *self._others)
        doing = next((found for watch in reversed(every) if (found := watch.doing) is not None), None)
        kind, cause = (None, None) if doing is None else doing
        numbers[_DOING] = _NOTHING if kind is None else KINDS.index(kind)
        numbers[_WHAT] = _NOTHING if cause is None else WHATS.index(cause.what)
        numbers[_OTHER] = _NOTHING if cause is None else cause.worker
        for call in self.after_beat:
            call()

    def _status(self) -> Status:
        found = [watch.status for watch in self._watches]
        if not found:
            return Status(0, 0, 0, 0)
        return Status(found[0].now, *(sum(numbers) for numbers in list(zip(*found, strict=True))[1:]))

    def _keep_beating(self) -> None:
        while not self._over.wait(PERIOD):
            try:
                self.beat()
            except RuntimeError:  # the store is gone
                return

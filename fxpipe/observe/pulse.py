"""The pulse of a process: a few numbers that say what its workers do right now, where others can read them.

In a run on one machine the numbers of all workers lie in one small file that each of them maps into its memory: they
cost nothing to write, the file never grows, and they outlive a worker that is killed. Under torchrun each worker puts
its numbers into the process group's store once a second. A thread lets the pulse beat, so that a worker that
is stopped looks different from one that waits. Imports no torch: the pulse begins before torch is imported.
"""

from __future__ import annotations

import json
import mmap
import threading
from array import array
from collections.abc import Callable, MutableSequence, Sequence
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, NamedTuple, Protocol, get_args

from fxpipe.observe.trace import KINDS

Phase = Literal[
    "starting", "importing", "loading", "training", "evaluating", "compiling a shape", "writing results", "done"
]
PHASES: tuple[Phase, ...] = get_args(Phase)

CAUSES = {
    "input": "an input",
    "activation": "an activation",
    "saved": "a value that its forward has saved",
    "gradient": "a gradient",
    "token": "its turn",
    "weights": "weights",
    "up": "the note up (the norms of gradients, or whether they overflowed)",
    "down": "the note down (the norm of all gradients, or whether they overflowed)",
    "loss": "the loss",
    "sent": "that it takes what was sent",
    "sum": "the sum over its replicas",
}
"""All that a worker may wait for (see `fxpipe.observe.watch.Cause`), in words."""

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
    """What a worker's numbers say."""

    phase: Phase
    step: int  # of what it does, from 1; 0 before the first
    moves: int  # how much it has done: while this stays, it makes no progress
    beat: int  # how many beats there have been: while this stays, the worker does not run
    status: Status
    doing: str | None  # the kind of the innermost open span; None between two
    what: str | None  # what it waits for or exchanges, None if that is nothing
    other: int  # with which worker

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
            None if what == _NOTHING else list(CAUSES)[what],
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


class PostedPulses:
    """The numbers of all workers as texts on a board (`fxpipe.runtime.wires.board`)."""

    def __init__(self, board: Any, workers: int) -> None:
        self._board = board
        self._keys = [f"pulse/{worker}" for worker in range(workers)]

    def put(self, worker: int, numbers: MutableSequence[int]) -> None:
        """Replace a worker's numbers.

        Raises:
            RuntimeError: the store is gone.
        """
        self._board.set(self._keys[worker], json.dumps(list(numbers)))

    def read(self) -> list[Signs]:
        """By rank; empty if the store is gone or a worker has not put any numbers yet."""
        with suppress(RuntimeError):  # the store ends with the process that holds it
            return [Signs.of(json.loads(text)) for text in self._board.all(self._keys) or ()]
        return []


Pulses = PulseFile | PostedPulses
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

    Others read its numbers where they are, or `after_beat` passes them on.
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

    def move(self) -> None:
        """The worker makes progress."""
        self.numbers[MOVES] += 1

    def follow(self, watches: Sequence[Followed], others: Sequence[Followed] = ()) -> None:
        """From now on the spans of these watches are progress, and say what the process does.

        One watch for each of its workers says how busy it is; `others` are of what else it measures.
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
        kind, cause = next((doing for watch in reversed(every) if (doing := watch.doing) is not None), (None, None))
        numbers[_DOING] = _NOTHING if kind is None else KINDS.index(kind)
        numbers[_WHAT] = _NOTHING if cause is None else list(CAUSES).index(cause.what)
        numbers[_OTHER] = _NOTHING if cause is None else cause.worker
        for call in list(self.after_beat):
            call()

    def _status(self) -> Status:
        statuses = [watch.status for watch in self._watches] or [Status(0, 0, 0, 0)]
        return Status(statuses[0].now, *map(sum, list(zip(*statuses, strict=True))[1:]))

    def _keep_beating(self) -> None:
        with suppress(RuntimeError):  # the store is gone
            while not self._over.wait(PERIOD):
                self.beat()


class WorkerState(NamedTuple):
    """How long a worker was busy and waited, as shares of the time since it was last read; and the microbatches
    it holds."""

    busy: float
    waiting: float
    in_flight: int


class Live:
    """Reads what the workers have done since the beginning, by rank, or nothing if that is not known, and turns it into
    shares of the time since it last did. An answer lasts for `period` seconds."""

    def __init__(self, read: Callable[[], list[Status]], noun: str = "worker", period: float = PERIOD) -> None:
        self.noun = noun
        self._read, self._period, self._last = read, period, 0.0
        self._before: list[Status] = []
        self._states: list[WorkerState] = []

    def look(self) -> list[WorkerState]:
        """By rank; empty if nothing is known."""
        now = perf_counter()
        if now - self._last >= self._period:
            self._last = now
            self._compare(self._read())
        return list(self._states) if any(status.now for status in self._before) else []

    def _compare(self, statuses: list[Status]) -> None:
        if len(self._before) != len(statuses):
            self._before = [Status(0, 0, 0, 0)] * len(statuses)
            self._states = [WorkerState(0.0, 0.0, 0)] * len(statuses)
        for worker, (before, status) in enumerate(zip(self._before, statuses, strict=True)):
            passed = status.now - before.now
            if passed <= 0:  # it has not reported since
                continue
            busy, waiting = (max(b - a, 0) / passed for a, b in zip(before[1:3], status[1:3], strict=True))
            self._states[worker] = WorkerState(min(busy, 1.0), min(waiting, 1.0), status.in_flight)
            self._before[worker] = status

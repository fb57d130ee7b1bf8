"""Progress on stderr: a bar with the time left on a terminal, a line now and then in a log file."""

from __future__ import annotations

import sys
from time import perf_counter
from typing import Protocol, TextIO


class Progress(Protocol):
    """Told of every step; `close` ends the display."""

    def __call__(self, step: int, total: int, loss: float, samples_per_second: float) -> None: ...

    def close(self) -> None: ...


def default_progress() -> Progress:
    """What fits stderr."""
    return BarProgress() if sys.stderr.isatty() else LineProgress()


class BarProgress:
    """One line that is drawn anew: a bar, the loss, samples/s and the time left."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        self._bar = Bar(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=30),
            TextColumn("{task.fields[text]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            refresh_per_second=4,
        )
        self._task = self._bar.add_task("", total=None, text="starting")
        self._rate = _Smoothed()
        self._bar.start()

    def __call__(self, step: int, total: int, loss: float, samples_per_second: float) -> None:
        rate = self._rate(samples_per_second)
        self._bar.update(self._task, completed=step, total=total, text=_text(loss, rate))

    def close(self) -> None:
        self._bar.stop()


class LineProgress:
    """A line every few seconds, and one for the last step."""

    def __init__(self, stream: TextIO | None = None, pause: float = 5.0) -> None:
        self._stream = stream or sys.stderr
        self._pause = pause
        self._last = 0.0
        self._rate = _Smoothed()

    def __call__(self, step: int, total: int, loss: float, samples_per_second: float) -> None:
        rate = self._rate(samples_per_second)
        now = perf_counter()
        if now - self._last < self._pause and step < total:
            return
        self._last = now
        self._stream.write(f"step {step}/{total}  {_text(loss, rate)}\n")
        self._stream.flush()

    def close(self) -> None:
        """Nothing is left open."""


def _text(loss: float, rate: float) -> str:
    return f"loss {loss:.4f}  {rate:.1f} samples/s"


class _Smoothed:
    """A running mean of the last twenty or so values, harmonic as rates want it."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._weight = 0.0

    def __call__(self, rate: float) -> float:
        self._seconds = 0.95 * self._seconds + 0.05 / max(rate, 1e-9)
        self._weight = 0.95 * self._weight + 0.05
        return self._weight / self._seconds

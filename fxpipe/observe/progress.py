"""Progress on stderr: redrawn on a terminal, a line from time to time in a log file."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from time import perf_counter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from fxpipe.errors import listed
from fxpipe.messages import plain
from fxpipe.observe.pulse import Live, Signs, WorkerState
from fxpipe.observe.rates import rates_text

if TYPE_CHECKING:
    from rich.progress import Progress as Bar


PAUSE = 5.0
"""Seconds between two lines about it in a log."""


def starting_text(signs: Sequence[Signs], noun: str) -> str:
    """`loading the build, the model and the data`, or of several `worker 0: reading the first batch; …`."""
    found: dict[str, list[str]] = {}
    for place, sign in enumerate(signs):
        found.setdefault(_words(sign), []).append(str(place))
    if len(found) == 1:
        return next(iter(found))
    return "; ".join(
        f"{noun}{'' if len(places) == 1 else 'es' if noun[-1] == 's' else 's'} {listed(places, 8)}: {words}"
        for words, places in found.items()
    )


def _words(sign: Signs) -> str:
    match sign.phase:
        case "starting" | "importing":
            return "importing torch"
        case "loading":
            return "loading the build, the model and the data"
        case "training":
            told = {"data": "reading the first batch", "wait": "waiting for the first batch"}
            return told.get(sign.doing or "", "computing the first batch")
        case phase:
            return phase


SOON = 0.7
"""Seconds until the first line of a log."""

SHOWN = 16
"""How many workers have their own line; if there are more, those that wait most."""


STEPS = "steps_per_second"
NO_METRICS: Mapping[str, float] = MappingProxyType({})


class Progress(Protocol):
    """Is called after every step; `close` ends the display."""

    def starting(self, text: Callable[[], str]) -> None:
        """Until the first step is over, `text` says what is being done."""

    def watch(self, workers: Live) -> None:
        """Training begins; `workers` knows what they are doing."""

    def __call__(
        self, step: int, total: int, loss: float, rates: Mapping[str, float], metrics: Mapping[str, float]
    ) -> None: ...

    def evaluated(self, step: int, metrics: Mapping[str, float], remark: str = "") -> None:
        """The state after `step` steps was evaluated; `remark` may follow the metrics."""

    def close(self) -> None: ...


def default_progress() -> Progress:
    """The display for stderr: redrawn on a terminal, lines in a log."""
    return BarProgress() if sys.stderr.isatty() else LineProgress()


def leave_bar() -> None:
    """End the display of a process that has not done so: the cursor is hidden, at the end of the last line."""
    if sys.stderr.isatty():
        with suppress(OSError, ValueError):
            sys.stderr.write("\x1b[?25h\n")
            sys.stderr.flush()


class BarProgress:
    """A line with a bar, the loss, samples/s and the time left; below it, a line for every worker."""

    def __init__(self) -> None:
        self._rates = _Smoothed()
        self._workers: Live | None = None
        self._starting: Callable[[], str] | None = None
        self._bar = self._new_bar()
        self._task = self._bar.add_task("", total=None, text="starting")
        self._bar.start()

    def starting(self, text: Callable[[], str]) -> None:
        self._starting = text

    def watch(self, workers: Live) -> None:
        self._workers = workers

    def __call__(
        self, step: int, total: int, loss: float, rates: Mapping[str, float], metrics: Mapping[str, float] = NO_METRICS
    ) -> None:
        rates = self._rates(rates)
        self._starting = None
        self._bar.update(self._task, completed=step, total=total, text=_text(loss, rates, metrics))

    def evaluated(self, step: int, metrics: Mapping[str, float], remark: str = "") -> None:
        self._bar.console.print(_evaluated(step, metrics, remark), highlight=False, markup=False)

    def close(self) -> None:
        self._workers = self._starting = None
        self._bar.stop()

    def _new_bar(self) -> Bar:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
        from rich.progress import TimeRemainingColumn as TimeLeft

        display = self

        class WithWorkers(Progress):
            def get_renderables(self) -> Iterable[Any]:
                if (starting := display._starting) is not None:
                    for task in self.tasks:
                        task.fields["text"] = starting()
                yield self.make_tasks_table(self.tasks)
                if (workers := display._workers) is not None and (states := workers.look()):
                    yield _table(states, workers.noun)

        return WithWorkers(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=16),
            TextColumn("{task.fields[text]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeLeft(),
            console=Console(stderr=True),
            refresh_per_second=4,
        )


class LineProgress:
    """A line every few seconds, also before the first step is over, and one for the last step."""

    def __init__(self, stream: TextIO | None = None, pause: float = PAUSE) -> None:
        self._stream = stream or sys.stderr
        self._pause = pause
        self._last = 0.0
        self._rates = _Smoothed()
        self._before: float | None = None
        self._workers: Live | None = None
        self._began = threading.Event()

    def starting(self, text: Callable[[], str]) -> None:
        threading.Thread(target=self._start, args=(text, perf_counter()), daemon=True).start()

    def _start(self, text: Callable[[], str], begin: float) -> None:
        pause = SOON
        while not self._began.wait(pause):
            pause = self._pause
            with suppress(OSError, ValueError):  # stderr takes nothing, or is closed
                self._stream.write(f"{text()} ({perf_counter() - begin:.0f} s)\n")
                self._stream.flush()

    def watch(self, workers: Live) -> None:
        self._workers = workers
        self._before = perf_counter()

    def __call__(
        self, step: int, total: int, loss: float, rates: Mapping[str, float], metrics: Mapping[str, float] = NO_METRICS
    ) -> None:
        self._began.set()
        now = perf_counter()
        rates = self._rates(rates if self._before is None else {**rates, STEPS: 1 / max(now - self._before, 1e-9)})
        self._before = now
        if now - self._last < self._pause and step < total:
            return
        self._last = now
        left = "" if STEPS not in rates or step >= total else f"  {_clock((total - step) / rates[STEPS])} left"
        self._stream.write(f"step {step}/{total}  {_text(loss, rates, metrics)}{left}{self._busy()}\n")
        self._stream.flush()

    def evaluated(self, step: int, metrics: Mapping[str, float], remark: str = "") -> None:
        self._stream.write(_evaluated(step, metrics, remark) + "\n")
        self._stream.flush()

    def close(self) -> None:
        self._began.set()

    def _busy(self) -> str:
        shares = [100 * state.busy for state in self._workers.look()] if self._workers is not None else []
        if not any(shares):
            return ""
        if len(shares) > SHOWN:
            return f"  busy {min(shares):.0f} to {max(shares):.0f} %"
        return f"  busy {' '.join(f'{share:.0f}' for share in shares)} %"


def _table(states: Sequence[WorkerState], noun: str) -> Any:
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    for justify in ("left", "right", "right", "right"):
        table.add_column(justify=justify)
    rows = list(enumerate(states))
    if len(rows) > SHOWN:
        rows = sorted(sorted(rows, key=lambda row: -row[1].waiting)[: SHOWN - 1])
    for place, state in rows:
        shares = f"busy {100 * state.busy:.0f} %", f"waiting {100 * state.waiting:.0f} %"
        table.add_row(f"{noun} {place}", *shares, f"{state.in_flight} in flight")
    if len(rows) < len(states):
        table.add_row(f"{len(states) - len(rows)} others wait less", "", "", "")
    return table


def _text(loss: float, rates: Mapping[str, float], metrics: Mapping[str, float]) -> str:
    values = [f"loss {loss:.4f}", *(f"{plain(name)} {value:.4f}" for name, value in metrics.items())]
    brief = {name: rate for name, rate in rates.items() if name != "tflops_per_device" or "mfu" not in rates}
    return f"{'  '.join(values)}  {rates_text(brief)}"


def held_out(metrics: Mapping[str, float | None]) -> str:
    """`held out accuracy 0.9100, loss 0.3000`; None is a value from a file that was not finite."""
    found = (f"{plain(name)} –" if value is None else f"{plain(name)} {value:.4f}" for name, value in metrics.items())
    return "held out " + ", ".join(found)


def _evaluated(step: int, metrics: Mapping[str, float], remark: str = "") -> str:
    return f"step {step}  {held_out(metrics)}" + (f": {remark}" if remark else "")


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class _Smoothed:
    """Running harmonic means, which suit rates, of about the last twenty values, by name."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, float]] = {}

    def __call__(self, rates: Mapping[str, float]) -> dict[str, float]:
        for name, rate in rates.items():
            seconds, weight = self._sums.get(name, (0.0, 0.0))
            self._sums[name] = 0.95 * seconds + 0.05 / max(rate, 1e-9), 0.95 * weight + 0.05
        return {name: self._sums[name][1] / self._sums[name][0] for name in rates}

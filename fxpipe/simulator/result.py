"""The result of a simulation. Times are seconds from the start of the run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from fxpipe.schedule.action import Action

Kind = Literal["F", "B", "W", "update"]


class Span(NamedTuple):  # a tuple: a run has tens of thousands
    """A time in which a worker is busy without a break: part of an action between two waits, or the update at its end.

    The last span of an action ends when the action ends, and has no length if the action ends with a wait.
    """

    kind: Kind
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """A finished run, from an empty pipeline to an empty pipeline.

    Attributes:
        spans: by worker, in order. Between them, and before the first, the worker waits.
        finished: when worker 0 ended each minibatch.
        seconds: the whole run.
        seconds_per_minibatch: in the steady state: the slope of `finished` over the second half of the minibatches, or
            over one repetition if they repeat. With separate weight gradients it is the slope of the slowest worker,
            since other workers do not wait for it at once. Without a flush, the last minibatches, while the pipeline
            empties, do not count; if fewer than two are left, as with workers + 1 minibatches for `async`, it is the
            mean of the whole run.
        bubble: the share of the ranks' time in the steady state in which they are idle.
    """

    spans: tuple[tuple[Span, ...], ...]
    finished: tuple[float, ...]
    seconds: float
    seconds_per_minibatch: float
    bubble: float

    def samples_per_second(self, samples_per_minibatch: float) -> float:
        """The throughput of the steady state; `inf` if nothing costs anything."""
        seconds = self.seconds_per_minibatch
        return samples_per_minibatch / seconds if seconds else float("inf")

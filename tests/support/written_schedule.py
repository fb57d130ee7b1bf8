"""A schedule written by hand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fxpipe.schedule import Action, Schedule


def action_of(text: str) -> Action:
    """Read `str(action)`."""
    minibatch, _, microbatch = text[1:].partition(".")
    return Action(text[0], int(minibatch), int(microbatch or 0))  # type: ignore[arg-type]


def row_of(text: str) -> list[Action]:
    """One worker's actions, separated by spaces: `F0 F1 B0`."""
    return [action_of(word) for word in text.split()]


@dataclass(frozen=True)
class Written(Schedule):
    """One row a worker, as text: `F0 F1 B0 B1`."""

    name = "written"
    synchronous = False
    rows: tuple[str, ...] = ()

    def actions(self, worker: int, start: int = 0) -> Iterator[Action]:
        yield from row_of(self.rows[worker])


@dataclass(frozen=True)
class WrittenApart(Written):
    """The same with weight gradients apart: `F0 B0 F1 W0 B1 W1`."""

    weights_apart = True

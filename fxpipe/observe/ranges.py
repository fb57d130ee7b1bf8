"""The spans of a thread's workers as ranges of a profiler, such as torch's, so that its operators have a place in the
schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager


class Ranges:
    """The open spans, outermost first. Each is a range of the profiler, which `make` makes, while the ranges are on.

    A profiler nests the ranges of a thread. So a worker that lets another one of its thread continue leaves its own
    (`leave`), and enters them again when it goes on (`enter`).
    """

    def __init__(self, make: Callable[[str], AbstractContextManager[object]], on: bool) -> None:
        self._make, self._on = make, on
        self._names: list[str] = []
        self._entered: list[AbstractContextManager[object]] = []

    def push(self, name: str) -> None:
        """A span begins."""
        self._names.append(name)
        if self._on:
            self._entered.append(self._make(name))
            self._entered[-1].__enter__()

    def pop(self) -> None:
        """The innermost span ends."""
        del self._names[-1:]  # there is none after an error
        if self._entered:
            self._entered.pop().__exit__(None, None, None)

    def switch(self, on: bool) -> None:
        """Open spans, and later ones, are ranges from now on, or no longer."""
        names, self._on = self.leave(), on
        self.enter(names)

    def leave(self) -> list[str]:
        """End all; return their names."""
        names = list(self._names)
        while self._names:
            self.pop()
        return names

    def enter(self, names: Iterable[str]) -> None:
        """Begin these again."""
        for name in names:
            self.push(name)

"""Finds the runs of calls that a sequence repeats, such as the blocks of a transformer, from what is called alone.

Two runs are equal if their calls have the same labels and are connected in the same way; what they read from outside
may differ. Candidates come from a suffix automaton of the labels (Blumer et al., "The smallest automaton recognizing
the subwords of a text", 1985), which is linear in the calls; then runs are compared call by call.
"""

from __future__ import annotations

import heapq
from bisect import bisect
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, takewhile
from typing import Any

LINES_OF_CALL, LINES_OF_FUNCTION_CALL, LINES_OF_TEAR = 1.6, 4, 25
"""What a call takes in the text of a stage, with its part of the comments and `del`s; what a call of a function takes;
and how many lines more a run may take that is one whole module."""


@dataclass(frozen=True)
class LabelledCall:
    """One call of a sequence.

    Attributes:
        label: calls with the same one may stand for each other; None for a call that is part of no run.
        reads: values, in the order of the arguments, some perhaps twice.
        makes: values.
        module: the path of the module that it belongs to; empty if it is not known.
    """

    label: Hashable
    reads: tuple[Hashable, ...] = ()
    makes: tuple[Hashable, ...] = ()
    module: tuple[str, ...] = ()


@dataclass(frozen=True)
class EqualRun:
    """Calls, one after the other, that are equal to those of other runs.

    Attributes:
        start, length: which calls of the sequence.
        inputs: the values from outside, in the order in which the calls read them first.
        results: the values that are read outside, in the order in which they are made.
    """

    start: int
    length: int
    inputs: tuple[Any, ...]
    results: tuple[Any, ...]


def repeats(
    calls: Sequence[LabelledCall], ends: Collection[Hashable], least: int, saves: int
) -> Iterator[list[EqualRun]]:
    """Groups of equal runs, those that save most first; no call is in two runs.

    Args:
        ends: the values that are read after all calls.
        least: the calls of a run, at least.
        saves: how many lines of text a group saves, at least.
    """
    connected = _Connected(calls, ends)
    left: list[int | None] = [None if call.label is None else i for i, call in enumerate(calls)]
    while (best := _best(connected, left, least, saves)) is not None:
        length, starts = best
        yield [connected.run(start, length) for start in starts]
        covered = {i for start in starts for i in range(start, start + length)}
        left = [None if i in covered else i for i in left]
        left = [i for place, i in enumerate(left) if i is not None or (place and left[place - 1] is not None)]


def shared_start(paths: Sequence[Sequence[str]]) -> list[str]:
    """With what all paths begin."""
    columns = takewhile(lambda column: len(set(column)) == 1, zip(*paths, strict=False))
    return [column[0] for column in columns]


class _Connected:
    """Calls with where their values are made and read."""

    def __init__(self, calls: Sequence[LabelledCall], ends: Collection[Hashable]) -> None:
        self.calls = calls
        numbers: dict[Hashable, int] = {}
        self.labels = [numbers.setdefault(call.label, len(numbers)) for call in calls]
        self._maker = {value: (i, place) for i, call in enumerate(calls) for place, value in enumerate(call.makes)}
        self._last = {read: i for i, call in enumerate(calls) for read in call.reads}
        self._last |= dict.fromkeys(ends, len(calls))

    def form(self, start: int, length: int) -> Any:
        """How the calls of a run are connected, and which of the values that they make are read outside."""
        places: dict[Hashable, int] = {}
        form: list[Any] = []
        for call in self.calls[start : start + length]:
            for read in call.reads:
                maker, place = self._maker.get(read, (-1, 0))
                form.append((maker - start, place) if maker >= start else places.setdefault(read, len(places)))
            form.append(None)
            form += [self._last.get(value, -1) >= start + length for value in call.makes]
        return tuple(form)

    def run(self, start: int, length: int) -> EqualRun:
        calls = self.calls[start : start + length]
        reads = dict.fromkeys(chain.from_iterable(call.reads for call in calls))
        makes = list(chain.from_iterable(call.makes for call in calls))
        inside = set(makes)
        results = [value for value in makes if self._last.get(value, -1) >= start + length]
        return EqualRun(start, length, tuple(read for read in reads if read not in inside), tuple(results))

    def tears(self, start: int, length: int) -> int:
        """How many ends of a run are within a module that it has calls of, which reads worse than a whole module."""
        paths = [call.module for call in self.calls[start : start + length] if call.module]
        module = shared_start(paths)
        beyond = [self.calls[i] for i in (start - 1, start + length) if 0 <= i < len(self.calls)]
        return sum(list(call.module[: len(module)]) == module for call in beyond if call.label is not None and paths)


def _best(calls: _Connected, left: Sequence[int | None], least: int, saves: int) -> tuple[int, list[int]] | None:
    """The length and the starts of the equal runs that save most; None if none save enough."""
    candidates = sorted(_candidates(calls, left, least), key=lambda row: (_lines(row[0], row[1]), -row[1][0]))
    heap: list[tuple[float, int, bool, int, list[int]]] = []

    def put(length: int, starts: list[int], proved: bool) -> None:
        saved = _lines(length, starts) - len(calls.run(starts[0], length).inputs)
        if saved >= saves:
            worth = saved - LINES_OF_TEAR * calls.tears(starts[len(starts) // 2], length)
            heapq.heappush(heap, (-worth, starts[0], proved, length, starts))

    while heap or candidates:
        while candidates and (not heap or _lines(*candidates[-1]) > -heap[0][0]):
            put(*candidates.pop(), proved=False)
        if not heap:
            break
        *_, proved, length, starts = heapq.heappop(heap)
        if proved:
            return length, starts
        forms = [calls.form(start, length) for start in starts]
        (common, count), *_ = Counter(forms).most_common(1)
        if count > 1:
            put(length, [start for start, form in zip(starts, forms, strict=True) if form == common], True)
    return None


def _lines(length: int, starts: Sequence[int]) -> float:
    """The lines that runs save as calls of a function, but for what it is given."""
    return LINES_OF_CALL * length * (len(starts) - 1) - LINES_OF_FUNCTION_CALL * len(starts)


def _candidates(calls: _Connected, left: Sequence[int | None], least: int) -> Iterator[tuple[int, list[int]]]:
    """Lengths and starts of runs with equal labels that do not overlap. No run repeats itself, but for a short one."""
    labels = [~place if i is None else calls.labels[i] for place, i in enumerate(left)]
    for shortest, longest, gap, ends in _substrings(labels):
        length = min(longest, -(-least // gap) * gap)  # where it repeats at once: one, or as many as are long enough
        if length <= shortest or length < least:
            continue
        starts, free = [], 0
        for end in ends:
            if end + 1 - length >= free:
                starts.append(left[end + 1 - length])
                free = end + 1
        if len(starts) > 1:
            yield length, starts  # type: ignore[misc]


def _substrings(labels: Sequence[int]) -> Iterator[tuple[int, int, int, list[int]]]:
    """What occurs more than once, longest first: of lengths above the first number, up to the second; the least
    distance between its ends; and its ends, in order."""
    after: list[dict[int, int]] = [{}]
    link, length, ends = [-1], [0], [[]]  # type: tuple[list[int], list[int], list[list[int]]]
    last = 0
    for place, label in enumerate(labels):
        state, at = len(after), last
        after.append({})
        link.append(0)
        length.append(length[last] + 1)
        ends.append([place])
        while at != -1 and label not in after[at]:
            after[at][label] = state
            at = link[at]
        if at != -1:
            target = after[at][label]
            if length[at] + 1 != length[target]:
                clone = len(after)
                after.append(dict(after[target]))
                link.append(link[target])
                length.append(length[at] + 1)
                ends.append([])
                while at != -1 and after[at].get(label) == target:
                    after[at][label] = clone
                    at = link[at]
                link[target] = clone
                target = clone
            link[state] = target
        last = state
    gaps = [len(labels)] * len(after)
    for state in sorted(range(1, len(after)), key=lambda s: -length[s]):
        above, places = link[state], ends[state]
        if len(places) > 1:
            yield length[above], length[state], gaps[state], places
        few, many = sorted((places, ends[above]), key=len)
        for place in few:
            at = bisect(many, place)
            gaps[above] = min([gaps[above], *(abs(place - near) for near in many[max(at - 1, 0) : at + 1])])
            many.insert(at, place)
        gaps[above] = min(gaps[above], gaps[state])
        ends[above], ends[state] = many, []

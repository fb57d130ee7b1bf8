"""Schedules in the form of a V: rank r runs worker r and, on the way back, worker 2R−1−r.

So the first rank also has the last worker, and begins backwards early. If one worker of a rank holds saved values for a
long time, the other holds them for a short time: all ranks need the same memory.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from itertools import product
from typing import ClassVar

from fxpipe.errors import ScheduleError
from fxpipe.plan.spec import Phase
from fxpipe.schedule.action import Action, Event
from fxpipe.schedule.base import Table
from fxpipe.schedule.graph import behind, chain, senders


class VShaped(Table):
    """Two workers on each rank, down the ranks and back; weight gradients (W) are separate.

    The rows are computed for the number of microbatches that the form needs; actions of microbatches that do not exist
    are left out.
    """

    weights_apart: ClassVar[bool] = True
    usual_virtual: ClassVar[int] = 2

    @classmethod
    def usual_placement(cls, ranks: int, virtual: int | None = None) -> tuple[int, ...]:
        if virtual not in (None, 2):
            raise ScheduleError(
                f"schedule '{cls.name}' has 2 workers on each rank, not {virtual}", hint="leave out --virtual"
            )
        return (*range(ranks), *reversed(range(ranks)))

    def check_placement(self) -> None:
        super().check_placement()
        if self.placement != self.usual_placement(self.ranks):
            raise ScheduleError(
                f"schedule '{self.name}' has its workers on ranks 0, 1, …, 1, 0, not on {list(self.placement)}",
                hint=f"compile the model for it: fxpipe compile MODEL -n {self.ranks} --schedule {self.name}",
            )

    @abstractmethod
    def of_rank(self, rank: int, microbatches: int) -> list[Event]:
        """A rank's actions of a minibatch with this number of microbatches."""

    @property
    def least(self) -> int:
        """The least number of microbatches for which the rows are computed."""
        return 1

    def rows(self) -> list[list[Event]]:
        count = max(self.microbatches, self.least)
        return [
            [event for event in self.of_rank(rank, count) if event[1].microbatch < self.microbatches]
            for rank in range(self.ranks)
        ]


class _RankRow:
    """A rank's row under construction: each worker and phase counts its next microbatch."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._next: dict[tuple[int, Phase], int] = {}
        self._put_off: deque[int] = deque()

    def add(self, worker: int, *phases: Phase) -> None:
        """Add the next action of each of these phases."""
        for phase in phases:
            microbatch = self._next.get((worker, phase), 0)
            self._next[worker, phase] = microbatch + 1
            self.events.append((worker, Action(phase, 0, microbatch)))

    def put_off(self, worker: int) -> None:
        """Add the next backward, whose weight gradients come later."""
        self.add(worker, "B")
        self._put_off.append(worker)

    def make_up(self) -> None:
        """Add the oldest W that was put off, if there is any."""
        if self._put_off:
            self.add(self._put_off.popleft(), "W")


class ZeroBubbleV(VShaped):
    """Zero bubble with the memory of 1F1B: a V whose weight gradients fill the waiting time.

        rank 0: 0:F0   0:F0.1 ..     3:F0   3:B0   3:W0   3:F0.1 3:B0.1 3:W0.1 0:B0   0:W0   ..     0:B0.1 0:W0.1
        rank 1: ..     1:F0   2:F0   1:F0.1 2:F0.1 2:B0   2:W0   1:B0   1:W0   2:B0.1 2:W0.1 1:B0.1 1:W0.1

    Every rank holds saved values of at most 2R microbatches, each on one of its two workers: as much as the first
    worker of 1F1B with R workers. If F, B and W of a worker take the same time and there are 2R−1 microbatches or more,
    no rank waits between its first and last action. So there is no bubble: minibatches fit together.
    From: Qi et al. 2024 (Zero Bubble Pipeline Parallelism, ICLR, arXiv 2401.10241), section 6.
    """

    name: ClassVar[str] = "zb-v"

    @property
    def least(self) -> int:
        return 2 * self.ranks - 1

    def of_rank(self, rank: int, microbatches: int) -> list[Event]:
        down, up, row = rank, self.workers - 1 - rank, _RankRow()
        ahead = 2 * (self.ranks - rank) - 1
        for _ in range(ahead):
            row.add(down, "F")
        for _ in range(rank):
            row.add(up, "F")
            row.add(down, "F")
        for _ in range(self.ranks - rank):
            row.add(up, "F", "B", "W")
        for place in range(microbatches - self.ranks):
            if place + ahead + rank < microbatches:
                row.add(down, "F")
            row.add(down, "B", "W")
            row.add(up, "F", "B", "W")
        for _ in range(rank):
            row.add(down, "B")
            row.add(up, "B")
        for _ in range(self.ranks - rank):
            row.add(down, "B", "W")  # a W that was put off
        for worker in (up, down):
            for _ in range(rank):
                row.add(worker, "W")
        return row.events


class DualPipeV(VShaped):
    """One half of DeepSeek's DualPipe, folded into a V: in its middle a rank alternates forwards and backwards.

        rank 0: 0:F0   0:F0.1 ..     3:F0   3:B0   3:W0   3:F0.1 3:B0.1 3:W0.1 0:B0   0:W0   ..     0:B0.1 0:W0.1
        rank 1: ..     1:F0   2:F0   1:F0.1 2:F0.1 2:B0   2:W0   1:B0   1:W0   2:B0.1 2:W0.1 1:B0.1 1:W0.1

    Every rank holds saved values of at most 2R+1 microbatches, each on one of its two workers. A forward and the
    backward next to it are of different microbatches, so one can hide the other's messages. From: DeepSeek-AI 2024
    (DeepSeek-V3, arXiv 2412.19437) and their code; torch has the same order.
    """

    name: ClassVar[str] = "dualpipev"

    @property
    def least(self) -> int:
        return 2 * self.ranks

    def of_rank(self, rank: int, microbatches: int) -> list[Event]:
        down, up, row = rank, self.workers - 1 - rank, _RankRow()
        before = self.ranks - 1 - rank
        for _ in range(2 * before):
            row.add(down, "F")
        for _ in range(rank + 1):
            row.add(down, "F")
            row.add(up, "F")
        for _ in range(before):
            row.add(up, "B", "W")
            row.add(up, "F")
        for _ in range(microbatches - 2 * self.ranks + rank + 1):
            row.add(down, "F")
            row.add(up, "B", "W")
            row.add(up, "F")
            row.add(down, "B", "W")
        for _ in range(before):
            row.add(up, "B", "W")
            row.add(up, "F")
            row.add(down, "B", "W")
        late = (rank + 1) // 2  # from there on, weight gradients are put off
        for place in range(rank + 1):
            if place >= late + 1 - rank % 2:
                row.put_off(up)
            else:
                row.add(up, "B", "W")
            if place >= late:
                row.put_off(down)
            else:
                row.add(down, "B", "W")
        for _ in range(before):
            row.make_up()
            row.put_off(down)
        for _ in range(2 * self.ranks):
            row.make_up()
        return row.events


class Building(VShaped):
    """A V made of one block, the ranks' actions of a microbatch, repeated every six units of time.

    In a block, the forward of the next rank begins `steps` units after the previous rank's, on the way down and on the
    way up; so do the backwards on their way. A rank holds as many microbatches as the time that each stays there, in
    blocks: shorter steps need less memory. The pauses at the turns are the shortest with which no rank has two actions
    at once; weight gradients get the next free units. A rank that would wait makes weight gradients that it has put
    off; after its forwards, it puts them off as long as a backward can run.

    From: Qi et al. 2024 (Pipeline Parallelism with Controllable Memory, NeurIPS, arXiv 2405.15362).

    Attributes:
        steps: of forwards down and up, of backwards down and up; the first and the last have the same sum as the other
            two, so that all ranks need the same memory.
    """

    steps: ClassVar[tuple[int, int, int, int]]

    def rows(self) -> list[list[Event]]:
        return _filled([self.of_rank(rank, self.microbatches) for rank in range(self.ranks)], self.workers)

    def of_rank(self, rank: int, microbatches: int) -> list[Event]:
        times = _block(self.ranks, self.steps)[rank]
        events = [
            (time + PERIOD * j, worker, Action(phase, 0, j))
            for (worker, phase), time in times.items()
            for j in range(microbatches)
        ]
        return [(worker, action) for _, worker, action in sorted(events, key=lambda event: event[0])]


class VHalf(Building):
    """Half of 1F1B's memory for half of its bubble.

        rank 0: 0:F0   ..     ..     3:F0   3:B0   0:F0.1 3:W0   ..     3:F0.1 3:B0.1 0:B0   3:W0.1 0:B0.1 0:W0   0:W0.1
        rank 1: ..     1:F0   2:F0   ..     ..     2:B0   1:F0.1 2:F0.1 1:B0   2:W0   2:B0.1 1:B0.1 2:W0.1 1:W0   1:W0.1

    A rank holds saved values of about R + 2 microbatches, each on one of its two workers; 1F1B, counted in such
    half-sized stages, of 2R. If F, B and W take the same time, the bubble is about half of 1F1B's. See `Building`.
    """

    name: ClassVar[str] = "v-half"
    steps: ClassVar[tuple[int, int, int, int]] = (2, 1, 2, 1)


class VMin(Building):
    """The least memory with which a V runs steadily: about a third of 1F1B's, for two thirds of its bubble.

        rank 0: 0:F0   ..     ..     3:F0   3:B0   3:W0   0:F0.1 0:B0   0:W0   3:F0.1 3:B0.1 3:W0.1 ..     0:B0.1 0:W0.1
        rank 1: ..     1:F0   2:F0   ..     ..     2:B0   1:B0   1:F0.1 2:F0.1 2:W0   1:W0   2:B0.1 1:B0.1 2:W0.1 1:W0.1

    A rank holds saved values of about 2(R + 4)/3 microbatches, each on one of its two workers. See `Building`.
    """

    name: ClassVar[str] = "v-min"
    steps: ClassVar[tuple[int, int, int, int]] = (1, 1, 1, 1)


PERIOD = 6
"""Units of time from one microbatch to the next in the middle of a minibatch: three phases of two workers."""


def _block(ranks: int, steps: tuple[int, int, int, int]) -> list[dict[tuple[int, Phase], int]]:
    """By rank: the time of each worker's actions of microbatch 0."""
    down, up, back_down, back_up = steps
    last = ranks - 1
    for pauses in sorted(product(range(1, PERIOD + 1), repeat=3), key=sum):
        block: list[dict[tuple[int, Phase], int]] = []
        for rank in range(ranks):
            first, second = rank, 2 * ranks - 1 - rank
            forward = rank * down
            forward_up = last * down + pauses[0] + (last - rank) * up
            backward = last * (down + up) + pauses[0] + pauses[1] + rank * back_down
            backward_up = last * (down + up + back_down) + sum(pauses) + (last - rank) * back_up
            times: dict[tuple[int, Phase], int] = {
                (first, "F"): forward,
                (second, "F"): forward_up,
                (second, "B"): backward,
                (first, "B"): backward_up,
            }
            taken = {time % PERIOD for time in times.values()}
            if len(taken) < len(times):
                break
            for worker in (second, first):
                time = times[worker, "B"] + 1
                while time % PERIOD in taken:
                    time += 1
                taken.add(time % PERIOD)
                times[worker, "W"] = time
            block.append(times)
        if len(block) == ranks:
            return block
    raise AssertionError(f"{ranks} ranks have no block with steps {steps}")


def _filled(rows: list[list[Event]], workers: int) -> list[list[Event]]:
    """The rows in the order in which they run best, if every action takes one unit of time.

    A rank follows its row, with two exceptions: if the next action cannot run yet, it runs the oldest W that can; if
    the next action is a W after the last F, and a B can run, it runs that B.
    """
    filled: list[list[Event]] = [[] for _ in rows]
    left = [deque(row) for row in rows]
    forwards = [sum(action.phase == "F" for _, action in row) for row in rows]
    done: set[Event] = set()
    graph = chain(workers)
    after = behind(graph)

    def ready(event: Event) -> bool:
        worker, action = event
        if action.phase == "W":
            return (worker, Action("B", 0, action.microbatch)) in done
        return done.issuperset(senders(worker, action, graph, after))

    while any(left):
        now: list[tuple[int, Event]] = []
        for rank, row in enumerate(left):
            if not row:
                continue
            chosen = row[0]
            if chosen[1].phase == "W" and not forwards[rank]:
                backward = next((event for event in row if event[1].phase == "B"), None)
                if backward is not None and ready(backward):
                    chosen = backward
            if not ready(chosen):
                put_off = next((event for event in row if event[1].phase == "W" and ready(event)), None)
                if put_off is None:
                    continue
                chosen = put_off
            now.append((rank, chosen))
        assert now, "a row waits for an action that no rank does"
        for rank, event in now:
            left[rank].remove(event)
            forwards[rank] -= event[1].phase == "F"
            filled[rank].append(event)
        done.update(event for _, event in now)
    return filled

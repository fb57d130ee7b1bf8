"""Schedules in the form of a V: rank r runs worker r and, on the way back, worker 2R−1−r.

So the first rank has the last worker, too, and begins with backwards at once; and what one of its workers holds long,
the other holds for a short time. The ranks hold equally much.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from itertools import product
from typing import ClassVar

from fxpipe.errors import ScheduleError
from fxpipe.plan.spec import Phase
from fxpipe.schedule.action import Action, Event
from fxpipe.schedule.merge import sender
from fxpipe.schedule.table import Table


class VShaped(Table):
    """Two workers on each rank, down the ranks and back; weight gradients are apart.

    A schedule is made for as many microbatches as it needs to have its form; of those that are not there nothing is
    done.
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
        """What a rank does of a minibatch with so many microbatches."""

    @property
    def least(self) -> int:
        """How many microbatches the schedule is made for, at least."""
        return 1

    def rows(self) -> list[list[Event]]:
        count = max(self.microbatches, self.least)
        return [
            [event for event in self.of_rank(rank, count) if event[1].microbatch < self.microbatches]
            for rank in range(self.ranks)
        ]


class _RankRow:
    """A rank's row in the making: of each worker and phase, the next microbatch comes next."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._next: dict[tuple[int, Phase], int] = {}
        self._put_off: deque[int] = deque()

    def add(self, worker: int, *phases: Phase) -> None:
        """The next action of each of these phases."""
        for phase in phases:
            microbatch = self._next.get((worker, phase), 0)
            self._next[worker, phase] = microbatch + 1
            self.events.append((worker, Action(phase, 0, microbatch)))

    def put_off(self, worker: int) -> None:
        """The next backward, whose weight gradients come later."""
        self.add(worker, "B")
        self._put_off.append(worker)

    def make_up(self) -> None:
        """The weight gradients that have been put off longest, if there are any."""
        if self._put_off:
            self.add(self._put_off.popleft(), "W")


class ZeroBubbleV(VShaped):
    """Zero bubble with the memory of 1F1B: a V whose weight gradients fill what waits.

        rank 0: 0:F0   0:F0.1 ..     3:F0   3:B0   3:W0   3:F0.1 3:B0.1 3:W0.1 0:B0   0:W0   ..     0:B0.1 0:W0.1
        rank 1: ..     1:F0   2:F0   1:F0.1 2:F0.1 2:B0   2:W0   1:B0   1:W0   2:B0.1 2:W0.1 1:B0.1 1:W0.1

    Every rank holds something of at most 2R microbatches, each on one of its two workers: as much as the first worker
    of 1F1B with R workers holds. If F, B and W of a worker take the same time and there are 2R−1 microbatches or
    more, no rank waits between its first action and its last, so that there is no bubble: minibatches fit together.
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
    """DeepSeek's DualPipe, one half of it folded into a V: in its middle a rank does a forward and a backward in turn.

        rank 0: 0:F0   0:F0.1 ..     3:F0   3:B0   3:W0   3:F0.1 3:B0.1 3:W0.1 0:B0   0:W0   ..     0:B0.1 0:W0.1
        rank 1: ..     1:F0   2:F0   1:F0.1 2:F0.1 2:B0   2:W0   1:B0   1:W0   2:B0.1 2:W0.1 1:B0.1 1:W0.1

    Every rank holds something of at most 2R+1 microbatches, each on one of its two workers. A forward and the backward
    next to it are of different microbatches, so that messages of the one can hide behind the other. From: DeepSeek-AI
    2024 (DeepSeek-V3, arXiv 2412.19437) and their code; torch has the same order.
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
    """A V made of one block, what the ranks do of a microbatch, again and again every six units of time.

    In a block, the forward of the next rank begins `steps` units after that of the one before, on the way down and on
    the way up, and so do the backwards on their way. What a rank holds is how long a microbatch stays there, in blocks:
    the shorter the steps, the less. The pauses at the turns are the shortest with which no rank has two things to do at
    once; weight gradients come into the next free units. Where a rank would wait, it makes weight gradients that it has
    put off; once its forwards are over, it puts them off as long as a backward can go on.

    From: Qi et al. 2024 (Pipeline Parallelism with Controllable Memory, NeurIPS, arXiv 2405.15362).

    Attributes:
        steps: of forwards down and up, of backwards down and up; the first and the last add up to the same as the other
            two, so that all ranks hold the same.
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

    A rank holds something of about R + 2 microbatches, each on one of its two workers; 1F1B, in such halves of stages,
    of 2R. With F, B and W of the same length, the bubble is about half of 1F1B's. See `Building`.
    """

    name: ClassVar[str] = "v-half"
    steps: ClassVar[tuple[int, int, int, int]] = (2, 1, 2, 1)


class VMin(Building):
    """The least memory with which a V never stands still: about a third of 1F1B's, for two thirds of its bubble.

        rank 0: 0:F0   ..     ..     3:F0   3:B0   3:W0   0:F0.1 0:B0   0:W0   3:F0.1 3:B0.1 3:W0.1 ..     0:B0.1 0:W0.1
        rank 1: ..     1:F0   2:F0   ..     ..     2:B0   1:B0   1:F0.1 2:F0.1 2:W0   1:W0   2:B0.1 1:B0.1 2:W0.1 1:W0.1

    A rank holds something of about 2(R + 4)/3 microbatches, each on one of its two workers. See `Building`.
    """

    name: ClassVar[str] = "v-min"
    steps: ClassVar[tuple[int, int, int, int]] = (1, 1, 1, 1)


PERIOD = 6
"""Units of time from one microbatch to the next in the middle of a minibatch: three phases of two workers."""


def _block(ranks: int, steps: tuple[int, int, int, int]) -> list[dict[tuple[int, Phase], int]]:
    """By rank: when it does what of microbatch 0."""
    down, up, back_down, back_up = steps
    last = ranks - 1
    for pauses in sorted(product(range(1, PERIOD + 1), repeat=3), key=sum):
        found: list[dict[tuple[int, Phase], int]] = []
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
            found.append(times)
        if len(found) == ranks:
            return found
    raise AssertionError(f"{ranks} ranks have no block with steps {steps}")


def _filled(rows: list[list[Event]], workers: int) -> list[list[Event]]:
    """The rows in the order in which they run best, if every action takes one unit of time.

    A rank does what its row says; while that cannot run, or is a W after the last F and a B could run, something else:
    in the first case the oldest W that it can, in the second that B.
    """
    found: list[list[Event]] = [[] for _ in rows]
    left = [deque(row) for row in rows]
    forwards = [sum(action.phase == "F" for _, action in row) for row in rows]
    done: set[Event] = set()

    def ready(event: Event) -> bool:
        worker, action = event
        if action.phase == "W":
            return (worker, Action("B", 0, action.microbatch)) in done
        return (awaited := sender(worker, action, workers)) is None or awaited in done

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
        assert now, "a row waits for what no rank does"
        for rank, event in now:
            left[rank].remove(event)
            forwards[rank] -= event[1].phase == "F"
            found[rank].append(event)
        done.update(event for _, event in now)
    return found

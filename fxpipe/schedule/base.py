"""A schedule: the order of actions on every worker; and a table, which has the rows of its ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from math import ceil, isqrt
from typing import ClassVar, TypeVar

from fxpipe.errors import ScheduleError
from fxpipe.plan.spec import Phase
from fxpipe.schedule.action import Action, Event
from fxpipe.schedule.graph import Graph, behind, chain, senders

FLOAT16 = "fp16"
"""The kind of autocast that needs a scaled loss, because gradients overflow or vanish."""

T = TypeVar("T")
_FIRST: dict[Phase, int] = {"B": 0, "F": 1, "W": 2}
"""Of the actions that a rank with several workers could run now, it runs the first of these."""


@dataclass(frozen=True)
class Schedule(ABC):
    """The order of actions on each of `workers` workers, with `microbatches` microbatches per minibatch.

    A worker updates its weights as part of the last action of a minibatch's last microbatch: its B, or its W in a
    schedule with separate weight gradients. If updates are late, it is the last action of a later minibatch, and a
    flush makes the remaining updates.

    A rank is a process with one device. It runs one or several workers, whose actions take turns in an order that the
    schedule decides, too. By default, the action that can begin first runs first.

    Attributes:
        name: its name on the command line.
        synchronous: every action of minibatch m sees exactly the updates of the minibatches before m.
        weights_apart: each microbatch has an action W after its B, which makes its weight gradients.
        late: how many minibatches later a minibatch's update is made.
        usual_virtual: how many workers a rank has by default.
        placement: the rank that each worker runs on; empty means `usual_placement`.
        takes_replicas: workers may have different numbers of replicas; rows then depend on the number of processes.
        replicas: how many each worker has, if the numbers differ (`fxpipe.schedule.replicas`). Else empty: equal
            numbers are independent pipelines, and this is the schedule of one of them.
        replica_of: the worker for whose replicas this schedule is; None for the schedule of all.
        after: the graph of the workers, if it is no chain (`fxpipe.schedule.graph`). Workers with different numbers of
            replicas are always a chain.
    """

    name: ClassVar[str]
    synchronous: ClassVar[bool]
    weights_apart: ClassVar[bool] = False
    late: ClassVar[int] = 0
    usual_virtual: ClassVar[int] = 1
    takes_replicas: ClassVar[bool] = False
    workers: int
    microbatches: int = 1
    placement: tuple[int, ...] = ()
    replicas: tuple[int, ...] = ()
    replica_of: int | None = None
    after: Graph = ()

    def __post_init__(self) -> None:
        for what, value in (("workers", self.workers), ("microbatches", self.microbatches)):
            if value < 1:
                raise ScheduleError(f"{self.called} needs at least 1 of {what}, not {value}")
        if not self.placement:
            ranks, remainder = divmod(self.workers, self.usual_virtual)
            usual = tuple(range(self.workers)) if remainder else self.usual_placement(ranks)
            object.__setattr__(self, "placement", usual)
        self.check_placement()

    @cached_property
    def called(self) -> str:
        """What errors call it."""
        return f"schedule '{self.name}'"

    def check_placement(self) -> None:
        """Refuse a placement that the schedule cannot have.

        Raises:
            ScheduleError: a worker has no rank, or a rank no worker; worker 0 is not on rank 0; or the schedule cannot
                have several workers on a rank.
        """
        ranks = set(self.placement)
        if len(self.placement) != self.workers or ranks != set(range(len(ranks))) or self.placement[0] != 0:
            raise ScheduleError(
                f"{self.called} of {self.workers} workers cannot run on ranks {list(self.placement)}",
                hint="every worker has a rank, every rank from 0 on a worker, and worker 0 is on rank 0",
            )
        if self.several and not self.synchronous and self.usual_virtual == 1:  # whose updates would not take turns
            raise self.one_worker_on_each_rank(str(list(self.placement)))

    @classmethod
    def one_worker_on_each_rank(cls, what: str) -> ScheduleError:
        """The error of a schedule that has only one worker on each rank."""
        return ScheduleError(
            f"schedule '{cls.name}' has one worker on each rank, not {what}",
            hint="for several stages on a rank, use --schedule wpipe, or one with a flush: interleaved, zb-v",
        )

    def of_worker(self, worker: int) -> Schedule:
        """The schedule of each replica of a worker, in its own microbatches: microbatch i of replica j of r is i·r + j.

        Only the worker's own row is valid: the other rows are computed as if these workers had as many replicas.
        """
        if not self.replicas or self.replica_of is not None:
            return self
        return replace(self, microbatches=self.microbatches // self.replicas[worker], replica_of=worker)

    @property
    def of_all(self) -> Schedule:
        """The schedule of all replicas, if this is of one worker's."""
        if self.replica_of is None:
            return self
        return replace(self, microbatches=self.microbatches * self.replicas[self.replica_of], replica_of=None)

    def along(self, graph: Graph) -> Schedule:
        """The schedule for workers with this graph."""
        return self if graph == self.after else replace(self, after=graph)

    @cached_property
    def graph(self) -> Graph:
        """The graph of the workers, written out."""
        return self.after or chain(self.workers)

    @cached_property
    def behind(self) -> Graph:
        """For each worker, the workers that directly wait for it."""
        return behind(self.graph)

    def senders(self, worker: int, action: Action) -> tuple[Event, ...]:
        """The actions on other workers whose messages an action waits for."""
        return senders(worker, action, self.graph, self.behind)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """How many workers are after each one on the longest way to the last one; 0 for that one.

        Worker 0 sends the batch to all workers that begin with it, so it counts as no nearer to the end than they.
        Without a flush, no worker counts as nearer to the end than the next: a forward waits for the note of the
        previous worker's, if gradients are clipped by the norm of all (`UpdateNotes`, `fxpipe/runtime/worker/part.py`).
        """
        depths = [0] * self.workers
        for worker in reversed(range(self.workers)):
            depths[worker] = max((1 + depths[later] for later in self.behind[worker]), default=0)
        if not self.synchronous:
            return tuple(max(depths[worker:]) for worker in range(self.workers))
        depths[0] = max(depths)
        return tuple(depths)

    def level(self, worker: int) -> int:
        """By how many workers it is nearer to the last one than worker 0 is: in a chain, its own number."""
        return self.depths[0] - self.depths[worker]

    def ahead(self, worker: int) -> int:
        """How many forwards a worker does before its first backward: one for each worker that is after it on the
        longest way to the last one; with replicas, enough to keep all processes from its own on busy."""
        if not self.replicas:
            return self.depths[worker]
        turns = 1 if self.replica_of is None else self.replicas[self.replica_of]
        return (sum(self.replicas[worker:]) - 1) // turns

    @property
    def filled_by(self) -> int:
        """How many microbatches enter the pipeline before the first leaves it: one for each worker, or process."""
        return self.ahead(0) + 1

    @property
    def filling(self) -> int:
        """How many minibatches enter the pipeline before the first leaves it."""
        return ceil(self.filled_by / self.microbatches)

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return max(self.placement) + 1

    @property
    def several(self) -> bool:
        """Whether a rank has several workers."""
        return self.ranks < self.workers

    def hosted(self, rank: int) -> tuple[int, ...]:
        """The workers of a rank, in rising order."""
        return tuple(worker for worker, host in enumerate(self.placement) if host == rank)

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        """The phases of the actions of each microbatch, in order."""
        return ("F", "B", "W") if self.weights_apart else ("F", "B")

    @cached_property
    def last_phase(self) -> Phase:
        """The phase of a microbatch's last action."""
        return self.phases[-1]

    def runs_in(self, phase: Phase) -> Phase:
        """The phase of the action that does the work of a phase: without actions W, B makes weight gradients."""
        return phase if phase in self.phases else self.last_phase

    def ends(self, action: Action) -> bool:
        """Whether this is the worker's last action of its minibatch, after which all its gradients exist."""
        return action.phase == self.last_phase and action.microbatch == self.microbatches - 1

    def updated_by(self, action: Action, start: int = 0) -> int | None:
        """The minibatch whose update is part of this action; None if none is, of those from `start` on."""
        minibatch = action.minibatch - self.late
        return minibatch if self.ends(action) and minibatch >= start else None

    def update_of(self, minibatch: int) -> Action:
        """The action that ends with the worker's update of a minibatch, unless a flush comes before it."""
        return Action(self.last_phase, minibatch + self.late, self.microbatches - 1)

    @classmethod
    def usual_microbatches(cls, workers: int, samples: int) -> int:
        """The default number of microbatches of a minibatch of `samples`; a divisor of `samples`.

        With a flush, enough to keep all workers busy: the smallest divisor that is not below their number, else the
        largest.
        """
        return min((d for d in divisors(samples) if d >= workers), default=samples)

    @classmethod
    def usual_placement(cls, ranks: int, virtual: int | None = None) -> tuple[int, ...]:
        """The rank of each worker, if each rank has `virtual` workers; None for the number that the schedule needs.

        By default workers go round the ranks: with two ranks 0, 1, 0, 1.

        Raises:
            ScheduleError: the schedule cannot have this number.
        """
        if ranks < 1 or (virtual is not None and virtual < 1):
            raise ScheduleError(f"a pipeline cannot have {virtual or 1} workers on each of {ranks} ranks")
        count = virtual or cls.usual_virtual
        if count > 1 and not cls.synchronous and cls.usual_virtual == 1:
            raise cls.one_worker_on_each_rank(str(count))
        return tuple(range(ranks)) * count

    @abstractmethod
    def actions(self, worker: int, start: int = 0) -> Iterator[Action]:
        """The endless schedule of `worker` from minibatch `start` on, with an empty pipeline at first."""

    def row(self, rank: int, start: int = 0) -> Iterator[Event]:
        """The endless schedule of a rank: the actions of all its workers, in order."""
        if not self.several:
            worker = self.placement.index(rank)
            yield from ((worker, action) for action in self.actions(worker, start))
            return
        for minibatch in count(start):
            yield from ((worker, action.of(minibatch)) for worker, action in self._merged[rank])

    @cached_property
    def _merged(self) -> list[list[Event]]:
        """The rows of one minibatch, by rank."""
        rows = [list(self.until(worker, 1)) for worker in range(self.workers)]
        return _merged(rows, self.placement, self.senders)

    def until(self, worker: int, stop: int, start: int = 0) -> Iterator[Action]:
        """The finite schedule of minibatches [start, stop): the endless one without later minibatches.

            actions(0):        F0 F1 B0 F2 B1 F3 B2 …
            until(0, stop=2):  F0 F1 B0    B1

        It ends with the last update of its minibatches. A schedule that lacks a backward would never end: it is cut off
        after more later actions than a pipeline can hold, and `check` names the missing action.
        """
        return self._finite(
            self.actions(worker, start), lambda action: action, stop, (stop - start) * self.microbatches
        )

    def row_until(self, rank: int, stop: int, start: int = 0) -> Iterator[Event]:
        """The finite schedule of a rank, as `until`."""
        left = (stop - start) * self.microbatches * len(self.hosted(rank))
        return self._finite(self.row(rank, start), lambda event: event[1], stop, left)

    def row_after(self, rank: int, step: int, start: int) -> Iterator[Event]:
        """The rest of a rank's endless row that began with minibatch `start`: actions of minibatches from `step` on.

        They keep the row's order, also while the pipeline fills again: the row is computed from a few minibatches
        earlier, so that its start has no effect any more.
        """
        settled = 3 * self.filling + 4  # minibatches, as `Versions` studies it
        row = self.row(rank, max(start, step - settled))
        return (event for event in row if event[1].minibatch >= step)

    def _finite(self, row: Iterable[T], action_of: Callable[[T], Action], stop: int, left: int) -> Iterator[T]:
        """The part of an endless row before minibatch `stop`; it has `left` last actions of microbatches."""
        patience = 4 * self.workers * self.microbatches
        if left <= 0:
            return
        for place in row:
            action = action_of(place)
            if action.minibatch >= stop:
                patience -= 1
                if patience < 0:
                    return
                continue
            yield place
            left -= action.phase == self.last_phase
            if left == 0:
                return


class Table(Schedule):
    """A schedule with a flush that is given by the rows of its ranks.

    Each rank flushes separately: it begins a minibatch when it has ended the one before.
    """

    synchronous: ClassVar[bool] = True

    @abstractmethod
    def rows(self) -> list[list[Event]]:
        """Each rank's actions of minibatch 0."""

    @cached_property
    def table(self) -> list[list[Event]]:
        """`rows`, computed once."""
        return self.rows()

    def actions(self, worker: int, start: int = 0) -> Iterator[Action]:
        return (action for of, action in self.row(self.placement[worker], start) if of == worker)

    def row(self, rank: int, start: int = 0) -> Iterator[Event]:
        for minibatch in count(start):
            yield from ((worker, action.of(minibatch)) for worker, action in self.table[rank])


def check_loss_scaling(schedule: Schedule | type[Schedule], autocast: str | None) -> None:
    """Refuse float16 with a schedule in which a worker updates before all gradients of the minibatch exist.

    Raises:
        ScheduleError: the step computes in float16 with such a schedule.
    """
    if autocast == FLOAT16 and not schedule.synchronous:
        raise ScheduleError(
            f"schedule '{schedule.name}' cannot train with --autocast fp16: a worker updates before the earlier "
            "workers' gradients of that minibatch exist, and could not undo its update if one of them overflows",
            hint="use --schedule 1f1b or gpipe, which update after all gradients exist, or --autocast bf16, which has "
            "no scale",
        )


def _merged(
    rows: Sequence[Sequence[Action]], placement: Sequence[int], awaited: Callable[[int, Action], Iterable[Event]]
) -> list[list[Event]]:
    """The rows of the ranks, given the rows of the workers, if every action takes one unit of time.

    A rank runs the action that can run first; of several, a backward, then a forward, then weight gradients, and in the
    same phase the later worker's. Actions that can never run, because rows deadlock, are left out.
    """
    merged_rows: list[list[Event]] = [[] for _ in range(max(placement) + 1)]
    place = [0] * len(rows)
    done: set[Event] = set()
    while True:
        now: list[Event] = []
        for rank, row in enumerate(merged_rows):
            ready = [
                (worker, rows[worker][place[worker]])
                for worker in range(len(rows))
                if placement[worker] == rank and place[worker] < len(rows[worker])
            ]
            ready = [event for event in ready if done.issuperset(awaited(*event))]
            if ready:
                chosen = min(ready, key=lambda event: (_FIRST[event[1].phase], -event[0]))
                row.append(chosen)
                now.append(chosen)
        if not now:
            return merged_rows
        for worker, _ in now:
            place[worker] += 1
        done.update(now)


def divisors(number: int) -> list[int]:
    """The divisors of a number, in rising order."""
    small = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]

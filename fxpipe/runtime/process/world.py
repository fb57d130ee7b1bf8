"""Where the ranks of a run are, each in its own process or all in this one; and what is trained there: its job."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Generic, TypeVar

import torch

from fxpipe.errors import RunError
from fxpipe.observe.pulse import Pulse, Signs, Status
from fxpipe.observe.watch import Watch
from fxpipe.plan.plan import Plan
from fxpipe.planner.device import read_throttle
from fxpipe.policy.recipe import Recipe
from fxpipe.runtime.options import PipelineOptions
from fxpipe.runtime.process.device import common_backend, own_device
from fxpipe.runtime.process.ends import process_name
from fxpipe.runtime.process.membership import Member
from fxpipe.runtime.process.resume import Options, recipe_of
from fxpipe.runtime.wires.addresses import Addresses, ProcessLine
from fxpipe.runtime.wires.board import TIMES, Board, DictBoard
from fxpipe.runtime.wires.collective import Collective, LocalCollective, ReplicaBoard
from fxpipe.runtime.wires.exchange import read_offset
from fxpipe.runtime.wires.group import check_no_run_here, peers
from fxpipe.runtime.wires.measured_links import MessageTimes
from fxpipe.runtime.wires.nccl_lines import JointLaunch
from fxpipe.runtime.wires.one_process import Loopback, OneProcessWires, Turns
from fxpipe.runtime.wires.processes import Carrier, ProcessWires
from fxpipe.runtime.wires.replica_group import ReplicaProcess, replica_group
from fxpipe.runtime.wires.throttled import ThrottledWires
from fxpipe.runtime.wires.wired import Wires
from fxpipe.task.model_file import Task


class World(ABC):
    """What one process of a run knows of all of them.

    Attributes:
        here: this process's number, counting one process for each rank and replica; all numbers, if it is alone.
        name: how messages travel: 'local', or as `ProcessWires.name`.
        carriers: what carries them, for each direction between processes.
        device: of the workers here.
        turns: of the rows here.
        line: the order of the processes, along which they send each other notes.
        board: what processes say to each other; of this process alone, if there are no others.
        pulse: of this process.
        alone: there are no other processes.
    """

    here: Sequence[int]
    name: str
    carriers: Sequence[Carrier] = ()
    device: torch.device
    turns: Turns
    line: ProcessLine
    board: Board
    pulse: Pulse
    alone = False

    @abstractmethod
    def open(self, addresses: Addresses) -> None:
        """Connect the workers."""

    @abstractmethod
    def wires(self, process: int) -> Wires:
        """The wires of a process that is here."""

    @abstractmethod
    def collective(self, worker: int, replica: int) -> Collective | None:
        """Connects a replica of a worker with its other replicas; None if there are none."""

    @abstractmethod
    def statuses(self, watches: Sequence[Watch]) -> list[Status]:
        """What the processes do right now; if all workers are here, what the workers do."""

    @abstractmethod
    def signs(self) -> list[Signs]:
        """The signs of the processes, by process."""

    def clear(self) -> None:  # noqa: B027
        """Drop all messages in flight between workers here."""

    def end(self) -> None:  # noqa: B027
        """The run is over."""


class AmongProcesses(World):
    """Each replica of a rank has its own process; `member` is this one."""

    def __init__(self, member: Member) -> None:
        plan, options, process = member.agreed.plan, member.agreed.options, member.rank
        self.here, self.turns = (process,), Turns()
        self.device = own_device(plan.device)
        self.pulse, self._pulses, self.board = member.pulse, member.pulses, member.board
        self._plan, self._process = plan, process
        self.line = ProcessLine.of(plan, plan.mesh.seat(process)[0])
        self._links = read_throttle(options.throttle, plan.processes)
        self.name = common_backend(self.device) if self._links is None else "gloo"
        self._others: ReplicaProcess | None = None
        self._measures = options.rebalance

    def open(self, addresses: Addresses) -> None:
        plan, process = self._plan, self._process
        place = process, self.name, addresses.channels, self.device, plan.mesh, self.turns
        ahead = 0
        if self._measures or self._links is not None:
            with peers():
                ahead = read_offset().offset
        links = self._links
        self._wires = ProcessWires(*place) if links is None else ThrottledWires(links, ahead / 1e9, *place)
        if self._measures and self._wires.backend == "gloo":
            self._wires.times, name = MessageTimes(ahead), TIMES.format(process)
            self.pulse.after_beat.append(partial(self._wires.times.put, partial(self.board.set, name)))
        rank, replica = plan.mesh.seat(process)
        group = replica_group(plan, self.name)
        notes = replica_group(plan, "gloo") if self.name == "nccl" else None
        if group is not None:
            count, name = plan.replicas_of(plan.hosted(rank)[0]), process_name(process, plan.mesh)
            others = [j for j in range(count) if j != replica]
            agreement = notes and JointLaunch(self._wires.launching, notes, 0, level=others)
            self._others = ReplicaProcess(
                group, replica, count, self.device, self._wires.staged, name, agreement, notes
            )
        self.name, self.carriers = self._wires.name, self._wires.carriers

    def wires(self, process: int) -> Wires:
        return self._wires

    def collective(self, worker: int, replica: int) -> Collective | None:
        return None if self._others is None else self._others.of_worker(worker)

    def statuses(self, watches: Sequence[Watch]) -> list[Status]:
        return [signs.status for signs in self.signs()]

    def signs(self) -> list[Signs]:
        return self._pulses.read()

    def end(self) -> None:
        self._wires.close()
        if self._others is not None:
            self._others.end()


class OneProcess(World):
    """All ranks are in this process.

    Raises:
        RunError: the options slow messages down; or this process is one of a run.
    """

    alone = True

    def __init__(self, plan: Plan, options: PipelineOptions) -> None:
        if options.throttle is not None:
            raise RunError(
                "workers in one process have no links: --throttle has nothing to slow down",
                hint="leave out --local, or --throttle",
            )
        check_no_run_here()
        self.here, self.turns = range(plan.processes), Turns()
        self.name, self.device = "local", torch.device(plan.device)
        self.line, self.board, self.pulse = ProcessLine((0,), 0), DictBoard(), Pulse()
        self.pulse.phase = "loading"
        self._plan, self.loopback = plan, Loopback(self.turns)
        self._boards = [ReplicaBoard(plan.replicas_of(worker), self.turns) for worker in range(plan.workers)]

    def open(self, addresses: Addresses) -> None:
        pass

    def wires(self, process: int) -> Wires:
        return OneProcessWires(self._plan, process, self.device, self.loopback)

    def collective(self, worker: int, replica: int) -> Collective | None:
        return LocalCollective(self._boards[worker], replica) if self._plan.replicas_of(worker) > 1 else None

    def clear(self) -> None:
        self.loopback.clear()
        for board in self._boards:
            board.clear()

    def statuses(self, watches: Sequence[Watch]) -> list[Status]:
        return [watch.status for watch in watches[: self._plan.workers]]

    def signs(self) -> list[Signs]:
        return [Signs.of(self.pulse.numbers)]


Given = TypeVar("Given", bound=PipelineOptions, covariant=True)


@dataclass(frozen=True)
class Job(Generic[Given]):
    """What one process knows of a pipeline before it opens workers, and does not change as long as there are some.
    Without `out`, it has no folder for checkpoints and results. The world is to be opened with the `addresses`."""

    folder: str
    plan: Plan
    recipe: Recipe
    task: Task
    options: Given
    out: str | None
    world: World

    @staticmethod
    def of(folder: str, plan: Plan, task: Task, options: Options, out: str | None, world: World) -> Job[Options]:
        """With the recipe that the options or the plan name; errors as `recipe_of`."""
        return Job(folder, plan, recipe_of(plan, options), task, options, out, world)

    @property
    def process(self) -> int:
        """The number of this process; 0 if it has all workers."""
        return self.world.here[0]

    @cached_property
    def addresses(self) -> Addresses:
        """Of all messages."""
        return Addresses(self.plan, self.recipe.demand)

"""Measures how long every stage of a build takes: the emitted code, worker by worker, alone, as in a run.

The node costs that chose the cuts come from the program before it was cut. This measurement includes the runtime's own
work: predicted weights, kept copies, sums of gradients, the update, the packing of weight copies. Messages are not
included: received values were computed beforehand and are ready, and sent values go nowhere.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fxpipe.costs.timer import Rounds, clock_of, quartile
from fxpipe.optimizer.hook import hold_still
from fxpipe.plan.cost_records import StageTime
from fxpipe.plan.packing import Layout, Pack
from fxpipe.plan.plan import Plan
from fxpipe.plan.spec import PHASES, EdgeSpec, Phase
from fxpipe.policy.demand import Demand
from fxpipe.policy.recipe import Recipe, choose
from fxpipe.random_state import torch_state_kept
from fxpipe.runtime.options import PipelineOptions
from fxpipe.runtime.wires.collective import LoneCollective
from fxpipe.runtime.wires.transport import Note, Transport
from fxpipe.runtime.worker.assembly import open_worker
from fxpipe.runtime.worker.setting import WorkerSetting
from fxpipe.schedule.action import Action
from fxpipe.stages.loaded import load_stages
from fxpipe.stages.microbatch import record_calls
from fxpipe.stages.minibatch import Minibatches, evenly
from fxpipe.task.hooks import Hooks, MakeOptimizer, OptimizerHook
from fxpipe.task.model_file import Task, default_optimizer
from fxpipe.task.model_view import of_parameters
from fxpipe.task.one_optimizer import one_optimizer
from fxpipe.threads import threads as worker_threads

if TYPE_CHECKING:
    from fxpipe.builds.build import Build

BUDGET = 1.0
"""Seconds to measure all workers together, after each one's minimum: see `_Worker.measure`."""

LONG = 1.0
"""If one microbatch's forward and backward take a worker longer than this many seconds, they are measured once."""

WANTED, MOST = 3, 50
"""Minibatches that the budget should suffice for, by running fewer microbatches of each; and how many are enough."""


def measure_stages(
    build: Build,
    batch: Any,
    *,
    optimizer: OptimizerHook | None = None,
    threads: int | None = None,
    repeats: int | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> tuple[StageTime, ...]:
    """Each worker's times for a minibatch, in this process; the build and the random state stay unchanged.

    One worker after the other runs its own actions in its schedule's order, past the filling of the pipeline, for about
    `BUDGET` seconds in all; longer only if a few microbatches take longer. With `repeats`, that many minibatches are
    measured, however long they take. By default a worker has its share of the cores, as in a run.
    """
    plan = build.plan
    device = torch.device(plan.device)
    recipe = choose(plan)
    leaves = Minibatches(plan, build.files, build.tensors, evenly)(batch, 0)
    with (
        tempfile.TemporaryDirectory(prefix="fxpipe_build_") as temporary,
        worker_threads(threads, plan.processes),
        torch_state_kept(),
        torch.no_grad(),
    ):
        folder = build.folder
        if folder is None:
            folder = Path(temporary) / "build"
            build.save(folder)
        weights = {name: build.tensors[row.name] for row in plan.tensors for name in row.names}
        batch_leaves = dict(zip([leaf.name for leaf in plan.step.batch], leaves[0], strict=True))
        calls = record_calls(plan, load_stages(plan, folder), build.tensors, batch_leaves)
        values = {name: value for call in calls.values() for name, value in call.received.items()}
        del calls
        times = []
        for rank in range(plan.workers):
            say(f"timing stage {rank + 1} of {plan.workers}")
            transport = _Ready(plan, rank, recipe.demand, values, weights, device)
            of_worker = of_parameters(optimizer, build.model) or default_optimizer
            worker = _Worker(plan, folder, rank, recipe, transport, of_worker, device)
            times.append(worker.measure(leaves, repeats))
    return tuple(times)


class _Ready(Transport):
    """A transport on which everything has arrived: values computed once before, copies of initial weights."""

    def __init__(
        self,
        plan: Plan,
        worker: int,
        demand: Demand,
        values: Mapping[str, Tensor],
        weights: Mapping[str, Tensor],
        device: torch.device,
    ) -> None:
        self.worker = worker
        self.demand = demand
        self.values = values
        self.weights = weights
        self.device = device
        self.layouts = {e.name: Layout(e.sent, e.name) for e in plan.edges if worker in (e.src, e.dst)}
        self._blocks: dict[tuple[int, tuple[str, ...]], Tensor] = {}
        self._notes: dict[tuple[int, Note], Tensor] = {}

    def send(self, edge: EdgeSpec, minibatch: int, microbatch: int, value: Tensor) -> None:
        self.layouts[edge.name](value)  # as every transport does before it sends

    def recv(self, edge: EdgeSpec, minibatch: int, microbatch: int) -> Tensor:
        # New memory, as from the wire: gradients may be summed in place. This time does not count for the stage.
        return self.layouts[edge.name].empty(self.device).copy_(self.values[edge.name])

    def send_weights(self, reader: int, version: int, ahead: int, block: Tensor) -> None:
        pass

    def recv_weights(self, owner: int, version: int, ahead: int) -> Tensor:
        messages = self.demand.messages(owner, self.worker, version, 0, None)
        names = next(m.names for m in messages if m.ahead == ahead)
        if (owner, names) not in self._blocks:
            pack = Pack([self.demand.parameters[name].tensor for name in names])
            self._blocks[owner, names] = pack.pack([self.weights[name].to(self.device) for name in names])
        return self._blocks[owner, names]

    def expect_note(self, source: int, what: Note, count: int) -> None:
        self._notes[source, what] = torch.zeros(count, dtype=torch.float64)

    def send_note(self, to: int, what: Note, numbers: Tensor) -> None:
        pass

    def recv_note(self, source: int, what: Note) -> Tensor:
        return self._notes.pop((source, what))  # zeros: no other worker's gradients overflowed


class _Worker:
    """One worker, running alone."""

    def __init__(
        self,
        plan: Plan,
        folder: Path,
        rank: int,
        recipe: Recipe,
        transport: Transport,
        optimizer: MakeOptimizer,
        device: torch.device,
    ) -> None:
        def still(named: list[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
            whole = one_optimizer(optimizer(named))
            hold_still(whole)
            return whole

        self.plan = plan
        self.recipe = recipe.of_worker(rank)
        self.rank = rank
        self.now = clock_of(device.type)
        alone = LoneCollective(plan.replicas_of(rank)) if plan.replicas_of(rank) > 1 else None
        task, options = Task(Hooks(optimizer=still)), PipelineOptions()
        setting = WorkerSetting(plan, rank, recipe, task, options, device, alone)
        self.executor = open_worker(setting, folder, transport)

    def measure(self, leaves: Sequence[tuple[Any, ...]], repeats: int | None) -> StageTime:
        """Run its schedule, without microbatches that others represent, until enough is measured.

        Enough means that the worker's share of the budget is used, and at least two minibatches after the warm-up were
        measured, with two microbatches each; if these are long, one minibatch with one microbatch.
        """
        microbatches, workers = self.recipe.schedule.microbatches, self.plan.workers
        share = BUDGET / workers
        # Without a flush: then the pipeline is full, and every kind of weights has been read.
        warm = 1 if self.recipe.schedule.synchronous else self.recipe.schedule.filled_by + 1
        count = 1
        kept: dict[int, set[int]] = {}  # by minibatch, the microbatches that are run
        last: dict[Phase, float] = {}  # seconds of the newest minibatch's last microbatch
        spent: dict[tuple[Phase, int], list[float]] = defaultdict(list)
        updates: list[float] = []
        measuring = False
        self.executor.store.begin(0)
        begin = self.now()
        for action in self.recipe.schedule.actions(self.rank):
            phase, minibatch = action.phase, action.minibatch
            if action.microbatch not in kept.setdefault(minibatch, _some(microbatches, count)):
                self.executor.leave_out(action)
                continue
            seconds, update = self._execute(action, leaves)
            if measuring:
                spent[phase, minibatch].append(seconds)
            if action.microbatch < microbatches - 1:
                continue
            last[phase] = seconds
            if phase != self.recipe.schedule.last_phase:
                continue
            step, used = sum(last.values()), self.now() - begin
            if repeats is not None:
                rounds, count = Rounds.exactly(repeats), microbatches
            elif step > LONG:
                rounds, count = Rounds.exactly(1), 1
            else:
                rounds = Rounds(share, 2, MOST)
                count = max(2, int(share / (WANTED * step))) if step else microbatches
            if measuring:
                updates.append(update)
                if not rounds.more(len(updates), used):
                    break
            elif minibatch + 1 >= warm or (repeats is None and used > share / 2):
                measuring, begin = True, self.now()
        spans: dict[Phase, list[float]] = {phase: [] for phase in PHASES}
        for (phase, minibatch), times in spent.items():
            if len(times) == len(kept[minibatch]):
                others = times[1:] or times
                spans[phase].append((times[0] + sum(others) / len(others) * (microbatches - 1)) / microbatches)
        weight = quartile(spans["W"]) if self.recipe.schedule.weights_apart else 0.0
        return StageTime(quartile(spans["F"]), quartile(spans["B"]), quartile(updates), weight)

    def _execute(self, action: Action, leaves: Sequence[tuple[Any, ...]]) -> tuple[float, float]:
        """Seconds of an action without its waits and its update, and of the update."""
        executor = self.executor
        executor.expect(action)
        first = self.rank == 0 and action.phase == "F"
        arriving = executor.watch.seconds("receive", "wait")
        before = self.now()
        executor.execute(action, leaves[action.microbatch] if first else None)
        seconds = self.now() - before - (executor.watch.seconds("receive", "wait") - arriving)
        begun = self.now()
        executor.announce()
        executor.settle()
        return seconds, self.now() - begun


def _some(microbatches: int, count: int) -> set[int]:
    """`count` microbatches that represent all: the first and the last ones; if it is 1, the last, which updates."""
    if count == 1:
        return {microbatches - 1}
    return {0, *range(max(0, microbatches - count + 1), microbatches)}

"""A worker's memory, action by action: what it always holds, what microbatches in flight keep, what its code adds.

The worker has its own process; `process_peaks` adds up several workers. While an action runs, a worker holds

    weights, gradients summed so far, the optimizer's state, buffers   always; gradients until their update
  + common weights and momentum of outer steps                         if replicas train separately
  + what the policy keeps, and weight copies                           `fxpipe.policy.held_weights`
  + the values that other microbatches in flight have left             `PartMemory.left`
  + the tensors of microbatches that were read and wait                worker 0
  + what was sent and may not be received yet                          `fxpipe.schedule.check.unreceived`
  + the receives posted for the next actions                           `fxpipe.schedule.action.LOOKAHEAD`
  + the most that the code of the action holds at once                 `PartMemory.peak`
  + on CUDA graphs, instead of that: memory that graphs hold always    `_graphs`

and while its update runs, what the optimizer's step takes (`StepMemory`) instead of the code's peak.

Not counted: what operators and codecs allocate while they run, the user's data, checkpoints being written, averages of
weights, evaluations, and gaps of an allocator. If a build has several shapes of batch, the first one counts; but CUDA
graphs have memory for each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from fxpipe.plan.cost_records import PartMemory, WorkerSummary
from fxpipe.plan.plan import Plan
from fxpipe.plan.spec import Phase
from fxpipe.planner.costs_file import BuildCosts
from fxpipe.policy.demand import Demand
from fxpipe.policy.held_weights import held_weights
from fxpipe.schedule.action import LOOKAHEAD, Action, Event
from fxpipe.schedule.check import unread, unreceived

GRAPHS = "cudagraph"
"""The engine whose parts are CUDA graphs."""


@dataclass(frozen=True)
class ActionMemory:
    """A worker's bytes around one action.

    Attributes:
        before: when it begins, without what only its code needs.
        during: the most while it runs, including its update.
        after: when it is over.
    """

    action: Action
    before: float
    during: float
    after: float


def peak_bytes(plan: Plan, costs: BuildCosts, demand: Demand) -> tuple[int, ...]:
    """The peak memory of each worker in a run that fills its pipeline; see the module."""
    alone = [demand.of_worker(worker) for worker in range(plan.workers)]
    rows = ([(worker, action) for action in of.schedule.until(worker, filling(of))] for worker, of in enumerate(alone))
    return tuple(_peak(plan, costs, of, row) for of, row in zip(alone, rows, strict=True))


def process_peaks(plan: Plan, costs: BuildCosts, demand: Demand) -> tuple[int, ...]:
    """The peak memory of each process with all its workers; with one worker, as `peak_bytes`.

    While one of its workers acts, the others hold what their last action has left. Messages between them count at both
    ends, although they stay where they are: at the turn of a V this is too much.
    """
    rows = (list(demand.schedule.row_until(rank, filling(demand))) for rank in range(plan.ranks))
    return tuple(_peak(plan, costs, demand, row) for row in rows)


def _peak(plan: Plan, costs: BuildCosts, demand: Demand, row: Sequence[Event]) -> int:
    """The peak memory of a process that does the actions of a row."""
    walks = {
        worker: memory_of(plan, costs, demand, worker, [action for of, action in row if of == worker])
        for worker in {of for of, _ in row}
    }
    held = {worker: walk[0].before for worker, walk in walks.items()}
    moments = {worker: iter(walk) for worker, walk in walks.items()}
    most = 0.0
    for worker, _ in row:
        moment = next(moments[worker])
        most = max(most, moment.during + sum(bytes for of, bytes in held.items() if of != worker))
        held[worker] = moment.after
    return ceil(most)


def filling(demand: Demand) -> int:
    """After how many minibatches a run has reached its peak memory; the first blocks of weight copies are free then."""
    schedule = demand.schedule
    once = 1 if schedule.synchronous else 3 * schedule.filling  # as `Versions` studies it
    blocks = any(demand.readers(worker) for worker in range(schedule.workers))
    return once + (ceil(unread(schedule) / schedule.microbatches) if blocks else 0) + 2


def memory_of(plan: Plan, costs: BuildCosts, demand: Demand, worker: int, row: Sequence[Action]) -> list[ActionMemory]:
    """Memory around each action of a worker's row, from an empty pipeline; the optimizer already has its state."""
    return _RowWalk(plan, costs, demand, worker, row).all()


def largest_share(plan: Plan, worker: int) -> list[int]:
    """Bytes of each parameter that the replica with the largest share updates.

    Every replica updates all parameters, unless replicas share the update.
    """
    shares = ([p.tensor.bytes for p in plan.updated(worker, replica)] for replica in range(plan.replicas_of(worker)))
    return max(shares, key=sum)


class _RowWalk:
    """Walks one worker's row."""

    def __init__(self, plan: Plan, costs: BuildCosts, demand: Demand, worker: int, row: Sequence[Action]) -> None:
        self.schedule, self.row = demand.schedule, row
        summary: WorkerSummary = costs.workers[worker]
        engine = plan.stages[worker].engine
        graphs = [part for part in summary.parts if engine(part.phase) == GRAPHS]
        self.parts = {part.phase: _replayed(part) if part in graphs else part for part in summary.parts}
        self._weights = held_weights(demand, worker, row)
        trained = [p.tensor for p in plan.owned(worker) if p.trained]
        several = plan.microbatches > 1  # gradients to add up, of microbatches or replicas
        self.gradients = float(sum(tensor.sum_bytes if several else tensor.bytes for tensor in trained))
        updated = largest_share(plan, worker)
        read = [p for p in plan.parameters if not p.trained and any(reader == worker for reader, _ in p.readers)]
        frozen = sum(p.tensor.bytes for p in read if p.owner != worker) + sum(p.read.bytes for p in read if p.cast)
        step = costs.step_memory
        self._step = step.of_largest * max(updated, default=0) + step.of_all * sum(updated)
        self._fixed = summary.owned_bytes + frozen + costs.optimizer_bytes * sum(updated)
        self._fixed += sum(b.tensor.bytes for b in plan.buffers if worker in b.workers)
        self._fixed += _graphs(plan, demand, worker, graphs)
        if plan.outer is not None:
            trained_bytes = sum(tensor.bytes for tensor in trained)
            self._fixed += plan.outer.kept * trained_bytes
            self._step = max(self._step, 3 * trained_bytes)  # sent, received, and the sum
        if step.keeps_update and demand.policy.predicts and not demand.policy.weight_form:
            self._fixed += sum(updated)
        leaves = [leaf.tensor.bytes for leaf in plan.step.batch if leaf.tensor is not None]
        self._microbatch = float(sum(leaves)) if plan.stages[worker].forward.batch else 0.0
        self._parts: dict[Phase, list[PartMemory]] = {
            of_action: [part for phase, part in self.parts.items() if self.schedule.runs_in(phase) == of_action]
            for of_action in self.schedule.phases
        }
        self._receives = {phase: sum(part.received for part in parts) for phase, parts in self._parts.items()}
        self._unreceived = unreceived(demand.schedule)
        self._unread = unread(demand.schedule)
        self._last = next(reversed(self.parts)) if self.parts else "B"
        self._left: dict[tuple[int, int], float] = {}
        self._sums = self._closed = 0.0  # of this minibatch, and of earlier ones that are not updated yet
        self._waiting = 0.0  # of the batch
        self._forwards = 0
        self._sent: deque[tuple[int, float]] = deque()
        self._shared: deque[tuple[int, float, tuple[int, int]]] = deque()
        self._sent_blocks: deque[tuple[int, float]] = deque()

    def all(self) -> list[ActionMemory]:
        """The memory around each action."""
        return [self._act(place, action) for place, action in enumerate(self.row)]

    def _act(self, place: int, action: Action) -> ActionMemory:
        weights, updates = self._weights[place], self.schedule.updated_by(action) is not None
        before = self._now() + weights.during + self._posted(place - 1)
        parts, key = self._parts[action.phase], (action.minibatch, action.microbatch)
        if action.phase == "F":
            self._waiting = (self.schedule.microbatches - 1 - action.microbatch) * self._microbatch
        most = 0.0
        for i, part in enumerate(parts):
            posted = sum(later.received for later in parts[i + 1 :]) + self._posted(place)
            unreceived = any(of == key for _, _, of in self._shared)
            self._left[key] = part.peak_unreceived if unreceived else part.peak
            most = max(most, self._now() + weights.during + posted)
            self._left[key] = part.left
            if part.sent:
                self._sent.append((self._forwards, part.sent))
            if part.shared:
                self._shared.append((self._forwards, part.shared, key))
            if part.phase == self._last:
                self._sums = self.gradients
        posted = self._posted(place)
        if not self._left.get(key):
            self._left.pop(key, None)
        if self.schedule.ends(action):
            self._closed, self._sums = self._closed + self._sums, 0.0
        if updates:
            most = max(most, self._now() + weights.after + posted + self._step)
            self._closed -= self.gradients
            self._sums = 0.0
            if weights.sent:
                self._sent_blocks.append((self._forwards, weights.sent))
            most = max(most, self._now() + weights.after + posted)
        if action.phase == "F":
            self._forwards += 1
            _received(self._sent, self._forwards - self._unreceived)
            _received(self._shared, self._forwards - self._unreceived)
            _received(self._sent_blocks, self._forwards - self._unread)
        return ActionMemory(action, before, most, self._now() + weights.after + posted)

    def _posted(self, place: int) -> float:
        """The receives of the next actions, which are posted already."""
        coming = self.row[place + 1 : place + 1 + LOOKAHEAD]
        return sum(self._receives[action.phase] for action in coming)

    def _now(self) -> float:
        """What is held between two calls, without weights and posted receives."""
        sent = sum(size for _, size in self._sent) + sum(size for _, size in self._sent_blocks)
        sent += sum(size for _, size, key in self._shared if key not in self._left)
        return self._fixed + self._sums + self._closed + sum(self._left.values()) + self._waiting + sent


def _replayed(part: PartMemory) -> PartMemory:
    """The memory of a part that is a CUDA graph, but for what the graph holds always."""
    held = part.arguments + part.results
    return replace(part, peak=held, peak_unreceived=held + part.peak_unreceived - part.peak)


def _graphs(plan: Plan, demand: Demand, worker: int, parts: Sequence[PartMemory]) -> int:
    """What CUDA graphs hold always: copies of what they read, of weights only of those that move, and their results;
    and once, since they run one after the other, the most that one of them makes in between."""
    policy, synchronous = demand.policy, demand.schedule.synchronous
    moves = policy.predicts or not (synchronous or policy.name == "latest")
    moved = {p.name: p.read.bytes for p in plan.parameters if moves or p.owner != worker}
    weights = sum(moved.get(name, 0) for part in parts for name in plan.stages[worker].part(part.phase).weights)
    fixed = weights + sum(part.arguments + part.results for part in parts)
    return len(plan.steps) * fixed + max((part.inside - part.results for part in parts), default=0)


def _received(sent: deque[Any], before: int) -> None:
    """Forget what was sent before this many forwards."""
    while sent and sent[0][0] < before:
        sent.popleft()

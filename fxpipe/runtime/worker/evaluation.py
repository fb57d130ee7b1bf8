"""An evaluation on one worker: the batches that worker 0 reads, the code for each shape, the means of the metrics."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxpipe.errors import BatchError, FxpipeError, TaskError
from fxpipe.observe.watch import Watch
from fxpipe.plan.spec import Plan
from fxpipe.random_state import RandomState, random_state, random_state_kept, seed_everything, set_random_state
from fxpipe.runtime.wires.wired import WiredTransport
from fxpipe.runtime.worker.stage_code import StageOfStep, reseed
from fxpipe.schedule.action import Action
from fxpipe.stages.loaded import LoadedStage, explained, load_stage
from fxpipe.stages.minibatch import number_of
from fxpipe.task.batch import Batch
from fxpipe.task.containers import tree_text
from fxpipe.task.loss_weights import LossWeights, weighted_means
from fxpipe.task.model_file import Task, hook_raised
from fxpipe.task.splitter import Splitter

OfAll = Callable[[dict[str, list[Tensor]]], dict[str, float]]
Batches = Callable[[], Iterable[Any]]


class Placed(NamedTuple):
    """A batch as the stages take it: the index of its shape in `Plan.evaluations`, its leaves, its weight.

    Attributes:
        leaves: None if another replica evaluates it.
        checksum: of the batch as the user gave it, if there are other replicas; else 0.
    """

    shape: int
    leaves: tuple[Any, ...] | None
    weight: float
    checksum: int = 0


class EvaluationData:
    """The batches of each evaluation: the same every time, with no effect on other random numbers.

    Args:
        batches: returns a new iterable of batches, such as `eval_data`.
        seed: of the run: torch, `random` and numpy are seeded with it before `batches` is called.
        task: gives the hooks that weigh batches and compute numbers from the results of all batches.
    """

    def __init__(
        self,
        plan: Plan,
        batches: Batches,
        seed: int,
        task: Task,
    ) -> None:
        self._shapes = Shapes(plan)
        self._weigh = LossWeights(plan, task.loss_weight)
        self.of_all = task.metrics_of_all
        self._batches = batches
        self._seed = seed
        self._task = task

    def __call__(self, replica: int = 0, replicas: int = 1) -> Iterator[Placed]:
        """The batches of one evaluation, each read when it is needed; of N replicas, each evaluates every Nth.

        Raises:
            TaskError: reading or weighing them failed, or there was none.
            BatchError: one has a shape that was not captured.
        """
        state: RandomState | None = None
        found: Iterator[Any] | None = None
        count = 0
        while True:
            with random_state_kept():
                if state is None:
                    seed_everything(self._seed)
                else:
                    set_random_state(state)
                try:
                    found = iter(self._batches()) if found is None else found
                    batch = next(found)
                except StopIteration:
                    break
                except FxpipeError:
                    raise
                except Exception as error:
                    raise hook_raised("eval_data", error, self._task.path) from error
                state = random_state()
            own = count % replicas == replica
            count += 1
            read = Batch.of(batch)
            shape, leaves = self._shapes(read, count, own)
            yield Placed(shape, leaves, self._weigh(read), number_of([read.values]) if replicas > 1 else 0)
        if not count:
            raise TaskError(
                "eval_data() gave no batch",
                hint="return a new iterable at every call: fxpipe calls it once for each evaluation",
            )


class Shapes:
    """Finds which captured shape a batch has after padding, and flattens it into the captured leaves."""

    def __init__(self, plan: Plan) -> None:
        self._padding = plan.padding
        self._known = [Splitter(step.batch, step.batch_spec, 1, plan.device) for step in plan.evaluations]

    def __call__(self, batch: Batch, number: int, wanted: bool = True) -> tuple[int, tuple[Any, ...] | None]:
        """The index of the batch's shape, and copies of its leaves, since an iterable may reuse their memory.

        Args:
            number: which batch of `eval_data()` it is, from 1.
            wanted: whether to copy the leaves; if not, they are None.

        Raises:
            BatchError: no batch of this shape was captured; names the shape and the nearest known one.
        """
        batch = batch.padded(self._padding)
        distances = [known.distance(batch) for known in self._known]
        shape = min(range(len(distances)), key=distances.__getitem__)
        if distances[shape]:
            raise self._unknown(batch, shape, sum(distance < math.inf for distance in distances), number)
        return shape, self._known[shape](batch, number - 1)[0] if wanted else None

    def _unknown(self, batch: Batch, nearest: int, alike: int, number: int) -> BatchError:
        known, what = self._known[nearest], f"batch {number} of eval_data()"
        if not alike:
            what += " is built differently from those that were captured: "
            what += f"{batch.tree}, not {tree_text(known.spec)}"
        else:
            what += " has a shape that the build was not compiled for: " + "; ".join(known.differences(batch))
            what += f" (the nearest of {alike} captured shapes)" if alike > 1 else ""
        return BatchError(
            what,
            hint="compile again, so that all shapes of eval_data() are known; or drop a smaller last batch "
            "(drop_last=True), or pad it",
            page="batch-shapes",
        )


class Evaluator:
    """Does one worker's forwards of an evaluation, each with the code for the batch's shape.

    Args:
        folder: of the build.
        seed: of the run: code that draws random numbers even in eval mode is seeded from it, by worker and batch.
        transport: for the messages of evaluation. It has its own watch: its waits are part of the evaluation, not of a
            step.

    Attributes:
        values: the metrics that this worker has computed, as rows of float64, batch after batch in the plan's order;
            metrics of several numbers are on the CPU.

    Raises:
        BuildError: a file is missing, or does not fit the plan.
    """

    def __init__(self, plan: Plan, worker: int, folder: str | Path, seed: int, transport: WiredTransport) -> None:
        self.worker = worker
        self.transport = transport
        self._seed = seed
        self._device = torch.device(plan.device)
        transport.watch = Watch()
        self._steps = plan.evaluations
        self._stages = [
            StageOfStep(
                plan, step, worker, load_stage(Path(folder) / step.stages[worker].file, step.stages[worker]), transport
            )
            for step in plan.evaluations
        ]
        names = plan.first_names
        self._weights = [[names[name] for name in stage.parts["F"].weights] for stage in self._stages]
        self.values: list[Tensor] = []
        self._state: dict[str, Tensor] = {}
        self._shapes: Mapping[int, int] = {}

    @property
    def loaded(self) -> list[LoadedStage]:
        """Its code, by shape."""
        return [stage.code for stage in self._stages]

    def begin(self, state: dict[str, Tensor], shapes: Mapping[int, int]) -> None:
        """An evaluation begins.

        Args:
            state: parameters and buffers by their first names, for this evaluation alone: a batch replaces the buffers
                that it changes, and the next batch reads these.
            shapes: the index of each batch's shape, by its number in the evaluation, from 0; known before its forward
                is expected.
        """
        self._state, self._shapes, self.values = state, shapes, []

    def expect(self, action: Action) -> None:
        """Announce what a forward will receive."""
        for edge in self._stages[self._shapes[action.minibatch]].incoming["F"]:
            self.transport.expect(edge, action.minibatch, 0)

    def execute(self, action: Action, leaves: Sequence[Any] | None) -> None:
        """Evaluate one batch.

        Args:
            action: the batch's forward, with its number in the evaluation.
            leaves: of the batch, on worker 0.

        Raises:
            RunError: the code failed; names the worker, the batch and the emitted line.
        """
        number, state = action.minibatch, self._state
        shape = self._shapes[number]
        stage = self._stages[shape]
        part = stage.parts["F"]
        self.transport.set_order(self._steps[shape].edges)
        stage.comm.bind(number, 0)
        with contextlib.ExitStack() as inside:
            if part.random:
                inside.enter_context(random_state_kept())
                reseed(self._device, self._seed, self.worker, "evaluate", number)
            inside.enter_context(torch.no_grad())
            what = f"evaluating batch {number + 1} of eval_data()"
            hint = "let eval_data() give smaller batches"
            inside.enter_context(explained(stage.code.path, self.worker, lambda: what, hint))
            found = stage.code.functions["F"](
                tuple([state[name] for name in self._weights[shape]]),
                tuple([state[name] for name in stage.buffers["F"]]),
                () if leaves is None else tuple([leaves[i] for i in stage.batch]),
                stage.comm,
            )
            count = len(part.metrics)
            if len(found) != count + len(stage.updates):
                more = f" and {len(stage.updates)} buffers" if stage.updates else ""
                raise ValueError(f"returned {len(found)} values, the plan has {count} metrics{more}")
            state.update(zip(stage.updates, found[count:], strict=True))
            self.values += [_numbers(value) for value in found[:count]]
        self.transport.done("F", number, 0)


def _numbers(value: Tensor) -> Tensor:
    made = value.detach().to(torch.float64, copy=True).reshape(-1)
    return made if made.numel() == 1 else made.cpu()


def of_batches(plan: Plan, worker: int, shapes: Sequence[int], values: Tensor) -> Iterator[dict[str, Tensor]]:
    """What a worker computed for each batch, by name.

    Args:
        shapes: the shape index of each batch.
        values: of all batches, flat, as they are sent.
    """
    parts = iter(values.split([size for shape in shapes for size in plan.evaluations[shape].sizes(worker)]))
    for shape in shapes:
        yield {name: next(parts) for name in plan.evaluations[shape].stages[worker].forward.metrics}


def whole_metrics(
    plan: Plan, shapes: Sequence[int], weights: Sequence[float], values: Sequence[Tensor], of_all: OfAll
) -> dict[str, float]:
    """The metrics of an evaluation: means over its batches, summed in order, and what the user's hook returns.

    Args:
        shapes, weights: of every batch.
        values: what each worker computed, batch after batch.
        of_all: computes numbers from the tensors of all batches.

    Raises:
        TaskError: the batches' weights sum to 0, or the hook failed.
    """
    rows: list[tuple[float, dict[str, float]]] = []
    gathered: dict[str, list[Tensor]] = {}
    workers = zip(*(of_batches(plan, worker, shapes, of_it) for worker, of_it in enumerate(values)), strict=True)
    for shape, weight, parts in zip(shapes, weights, workers, strict=True):
        spec = plan.evaluations[shape]
        made = {name: value for part in parts for name, value in part.items()}
        for name, tensor in spec.gathered.items():
            gathered.setdefault(name, []).append(made[name].reshape(tensor.shape).to(getattr(torch, tensor.dtype)))
        numbers = [name for name in spec.metrics if name not in spec.gathered]
        rows.append((weight, {n: made[n].item() if n in made else spec.constants[n] for n in numbers}))
    return weighted_means(rows) | (of_all(gathered) if gathered else {})

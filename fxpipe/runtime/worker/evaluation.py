"""An evaluation on one worker: the batches that worker 0 reads, the code for each shape, the means of the metrics."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxpipe.device_copies import widened
from fxpipe.errors import BatchError, FxpipeError, TaskError
from fxpipe.observe.watch import Watch
from fxpipe.plan.plan import Plan
from fxpipe.random_state import RandomState, random_state, random_state_kept, seed_everything, set_random_state
from fxpipe.runtime.wires.wired import WiredTransport
from fxpipe.runtime.worker.executor import Executor
from fxpipe.runtime.worker.stage_code import StageOfStep, reseed
from fxpipe.schedule.action import Action
from fxpipe.stages.loaded import LoadedStage, explained, load_stage
from fxpipe.stages.minibatch import nearest, number_of
from fxpipe.task.batch import Batch
from fxpipe.task.containers import tree_text
from fxpipe.task.loss_weights import LossWeights, weighted_means
from fxpipe.task.model_file import Task, hook_raised
from fxpipe.task.splitter import Splitter

OfAll = Callable[[dict[str, list[Tensor]]], dict[str, float]]
Batches = Callable[[], Iterable[Any]]
NO_NUMBERS = torch.empty(0, dtype=torch.float64)


class Placed(NamedTuple):
    """A batch as the stages take it: the index of its shape in `Plan.evaluations`, its leaves, its weight.

    Attributes:
        leaves: copies, since an iterable may reuse their memory; None if another replica evaluates the batch.
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

    def __init__(self, plan: Plan, batches: Batches, seed: int, task: Task) -> None:
        self._padding = plan.padding
        self._shapes = [Splitter(step.batch, step.batch_spec, 1, plan.device) for step in plan.evaluations]
        self._weigh = LossWeights(plan, task.loss_weight)
        self.of_all = task.metrics_of_all
        self._batches, self._seed, self._task = batches, seed, task

    def __call__(self, replica: int = 0, replicas: int = 1) -> Iterator[Placed]:
        """The batches of one evaluation, each read when it is needed; of N replicas, each evaluates every Nth.

        Raises:
            TaskError: reading or weighing them failed, or there was none.
            BatchError: one has a shape that was not captured.
        """
        state: RandomState | None = None
        batches: Iterator[Any] | None = None
        count = 0
        while True:
            with random_state_kept():
                if state is None:
                    seed_everything(self._seed)
                else:
                    set_random_state(state)
                try:
                    batches = iter(self._batches()) if batches is None else batches
                    read = next(batches)
                except StopIteration:
                    break
                except FxpipeError:
                    raise
                except Exception as error:
                    raise hook_raised("eval_data", error, self._task.path) from error
                state = random_state()
            batch = Batch.of(read)
            padded = batch.padded(self._padding)
            shape, fits = nearest(self._shapes, padded)
            if not fits:
                raise self._unknown(padded, shape, count + 1)
            leaves = self._shapes[shape](padded, count)[0] if count % replicas == replica else None
            yield Placed(shape, leaves, self._weigh(batch), number_of([batch.values]) if replicas > 1 else 0)
            count += 1
        if not count:
            raise TaskError(
                "eval_data() gave no batch",
                hint="return a new iterable at every call: fxpipe calls it once for each evaluation",
            )

    def _unknown(self, batch: Batch, shape: int, number: int) -> BatchError:
        """The error for a batch that fits no captured shape, not even the nearest."""
        of_shape, what = self._shapes[shape], f"batch {number} of eval_data()"
        alike = sum(each.distance(batch) < math.inf for each in self._shapes)
        if not alike:
            what += " is built differently from those that were captured: "
            what += f"{batch.tree}, not {tree_text(of_shape.spec)}"
        else:
            what += " has a shape that the build was not compiled for: " + "; ".join(of_shape.differences(batch))
            what += f" (the nearest of {alike} captured shapes)" if alike > 1 else ""
        return BatchError(
            what,
            hint="compile again, so that all shapes of eval_data() are known; or drop a smaller last batch "
            "(drop_last=True), or pad it",
            page="batch-shapes",
        )


class Evaluator:
    """Does one worker's forwards of an evaluation, each with the code for the batch's shape.

    Code that draws random numbers even in eval mode is seeded from the run's seed, by worker and batch.

    Args:
        executor: of the worker's training, over whose wires the messages of evaluations go, too.
        folder: of the build.
        ahead: how many batches the worker may be ahead of the next one.

    Attributes:
        transport: for the messages of evaluations. It has its own watch: its waits are part of the evaluation, not of a
            step.

    Raises:
        BuildError: a file is missing, or does not fit the plan.
    """

    def __init__(self, executor: Executor, folder: str, ahead: int) -> None:
        plan, worker = executor.setting.plan, executor.worker
        assert isinstance(executor.transport, WiredTransport)
        self.worker = worker
        self.transport = transport = executor.transport.of_evaluations(plan, ahead)
        transport.watch = Watch()
        self._seed, self._device = executor.setting.options.seed, torch.device(plan.device)
        specs = [(step, step.stages[worker]) for step in plan.evaluations]
        self._stages = [
            StageOfStep(plan, step, worker, load_stage(Path(folder) / stage.file, stage), transport)
            for step, stage in specs
        ]
        names = plan.first_names
        self._weights = [[names[name] for name in stage.parts["F"].weights] for stage in self._stages]
        self._values: list[Tensor] = []
        self._state: dict[str, Tensor] = {}
        self._shapes: Mapping[int, int] = {}

    @property
    def loaded(self) -> list[LoadedStage]:
        """Its code, by shape."""
        return [stage.code for stage in self._stages]

    @property
    def values(self) -> Tensor:
        """The metrics that this worker has computed: float64, batch after batch in the plan's order."""
        return torch.cat([NO_NUMBERS, *(value.cpu() for value in self._values)])

    def begin(self, state: dict[str, Tensor], shapes: Mapping[int, int]) -> None:
        """An evaluation begins.

        Args:
            state: parameters and buffers by their first names, for this evaluation alone: a batch replaces the buffers
                that it changes, and the next batch reads these.
            shapes: the index of each batch's shape, by its number in the evaluation, from 0; known before its forward
                is expected.
        """
        self._state, self._shapes, self._values = state, shapes, []

    def expect(self, action: Action) -> None:
        """Announce what a forward will receive."""
        for edge in self._stages[self._shapes[action.minibatch]].incoming["F"]:
            self.transport.expect(edge, action.minibatch, 0)

    def execute(self, action: Action, leaves: Sequence[Any] | None) -> None:
        """Evaluate one batch, whose number in the evaluation is the action's minibatch.

        Args:
            leaves: of the batch, on worker 0.

        Raises:
            RunError: the code failed; names the worker, the batch and the emitted line.
        """
        number, shape = action.minibatch, self._shapes[action.minibatch]
        state, stage = self._state, self._stages[shape]
        part = stage.parts["F"]
        stage.comm.bind(number, 0)
        with contextlib.ExitStack() as inside:
            if part.random:
                inside.enter_context(random_state_kept())
                reseed(self._device, self._seed, self.worker, "evaluate", number)
            inside.enter_context(torch.no_grad())
            what = f"evaluating batch {number + 1} of eval_data()"
            hint = "let eval_data() give smaller batches"
            inside.enter_context(explained(stage.code.path, self.worker, lambda: what, hint))
            results = stage.code.functions["F"](
                tuple([state[name] for name in self._weights[shape]]),
                tuple([state[name] for name in stage.buffers["F"]]),
                () if leaves is None else tuple([leaves[i] for i in stage.batch]),
                stage.comm,
            )
            count = len(part.metrics)
            if len(results) != count + len(stage.updates):
                more = f" and {len(stage.updates)} buffers" if stage.updates else ""
                raise ValueError(f"returned {len(results)} values, the plan has {count} metrics{more}")
            state.update(zip(stage.updates, results[count:], strict=True))
            self._values += [_numbers(value) for value in results[:count]]
        self.transport.done("F", number, 0)


def _numbers(value: Tensor) -> Tensor:
    """Those of a metric, in a copy; if there are several, on the CPU."""
    numbers = widened(value).reshape(-1)
    return numbers if numbers.numel() == 1 else numbers.cpu()


def whole_metrics(
    plan: Plan, batches: Sequence[Placed], values: Mapping[tuple[int, int], Tensor], of_all: OfAll
) -> dict[str, float]:
    """The metrics of an evaluation: means over its batches, summed in order, and what the user's hook returns.

    Args:
        values: what each worker computed for each batch, by worker and the batch's number.
        of_all: computes numbers from the tensors of all batches.

    Raises:
        TaskError: the batches' weights sum to 0, or the hook failed.
    """
    rows: list[tuple[float, dict[str, float]]] = []
    gathered: dict[str, list[Tensor]] = {}
    for number, batch in enumerate(batches):
        spec = plan.evaluations[batch.shape]
        parts: dict[str, Tensor] = {}
        for worker, stage in enumerate(spec.stages):
            parts.update(zip(stage.forward.metrics, values[worker, number].split(spec.sizes(worker)), strict=True))
        for name, tensor in spec.gathered.items():
            value = parts.pop(name).reshape(tensor.shape).to(getattr(torch, tensor.dtype))
            gathered.setdefault(name, []).append(value)
        numbers = spec.constants | {name: value.item() for name, value in parts.items()}
        rows.append((batch.weight, {name: numbers[name] for name in spec.metrics if name not in spec.gathered}))
    return weighted_means(rows) | (of_all(gathered) if gathered else {})

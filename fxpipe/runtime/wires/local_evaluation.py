"""Evaluation with all workers in one process, in turn: the same bits as over processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from fxpipe.plan.packing import Layout
from fxpipe.plan.spec import Plan
from fxpipe.runtime.worker.evaluation_data import EvaluationData
from fxpipe.runtime.worker.evaluator import Evaluator, means, moves


class LocalEvaluation:
    """Evaluates a build's workers, one after the other for every batch.

    Raises:
        BuildError: as `Evaluator`.
    """

    def __init__(self, plan: Plan, folder: str | Path, seed: int) -> None:
        self.plan = plan
        self.evaluators = [Evaluator(plan, worker, folder, seed) for worker in range(plan.workers)]
        self._moves = moves(plan)
        self._layouts = {e.name: Layout(e.tensor, e.name) for spec in plan.evaluations for e in spec.edges}

    def run(self, data: EvaluationData, states: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
        """One evaluation: the mean of every metric.

        Args:
            states: of all workers (see `Executor.state`).

        Raises:
            FxpipeError: the data, or what was made of them, failed.
        """
        held = [dict(state) for state in states]
        for move in self._moves:
            held[move.reader][move.name] = states[move.source][move.name]
        shapes: list[int] = []
        values: list[list[float]] = [[] for _ in held]
        for number, (shape, leaves) in enumerate(data()):
            comm = _Comm(self._layouts)
            for worker, evaluator in enumerate(self.evaluators):
                found = evaluator.run(shape, number, held[worker], None if worker else leaves, comm)
                values[worker] += [float(value) for value in found]
            shapes.append(shape)
        return means(self.plan, shapes, values)


class _Comm:
    """Values on their way from worker to worker, for one batch."""

    def __init__(self, layouts: Mapping[str, Layout]) -> None:
        self._layouts = layouts
        self._values: dict[str, Tensor] = {}

    def recv(self, name: str) -> Tensor:
        return self._values.pop(name)

    def send(self, name: str, value: Tensor) -> None:
        self._values[name] = self._layouts[name](value)

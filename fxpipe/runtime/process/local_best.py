"""What a run in one process does about its evaluations: see `WorkerEvaluations` for one of several processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from fxpipe.errors import RunError
from fxpipe.observe.record import Record
from fxpipe.plan.spec import Plan
from fxpipe.runtime.options import RunOptions
from fxpipe.runtime.process.best_weights import BestWeights
from fxpipe.runtime.process.consequences import Consequences
from fxpipe.runtime.process.local import LocalPipeline
from fxpipe.runtime.process.run_summary import write_run
from fxpipe.runtime.worker.evaluation_data import EvaluationData
from fxpipe.runtime.worker.final_weights import SHORT_PAUSES, FinalFiles, held


class LocalBest:
    """Keeps the best weights, and tells the pipeline and the record what else an evaluation leads to."""

    def __init__(
        self, options: RunOptions, plan: Plan, pipeline: LocalPipeline, record: Record, consequences: Consequences
    ) -> None:
        self._options, self._plan, self._pipeline, self._record = options, plan, pipeline, record
        self._consequences = consequences
        self._best: BestWeights | None = None
        consequences.on_end = self._ends
        self._ends(consequences.end)

    def begin(self, data: EvaluationData, earlier: Path | None) -> None:
        """Called before training begins.

        Args:
            data: to evaluate on while training.
            earlier: the output folder of the interrupted run, if it may be another one.
        """
        pipeline, consequences, out = self._pipeline, self._consequences, self._options.out
        goes_on = pipeline.resumed is not None
        consequences.replay(self._record.evaluations if goes_on else [])
        self._ends(consequences.end)
        if consequences.goal is not None and out is not None:

            def write(name: str, states: Sequence[Mapping[str, Tensor]]) -> RunError | None:
                files = FinalFiles(out, self._plan, pauses=SHORT_PAUSES)
                files.write(name, lambda t: held(pipeline.executors[t.worker], t, states[t.worker]))
                return files.problem

            self._best = BestWeights(
                out, write, consequences.goal, self._plan.digest, consequences.best, earlier if goes_on else None
            )
            if consequences.best is not None and self._best.held is None:
                consequences.forget_best()
        pipeline.evaluation.follow = self._follow
        pipeline.evaluation.while_training(consequences.due, data, self._evaluated)
        if consequences.missing:
            pipeline.evaluation.evaluated = pipeline.fed - 1

    def go_on(self) -> None:
        """The pipeline has begun."""
        self._consequences.go_on()
        if self._consequences.missing:
            self._pipeline.evaluation.after()

    def last(self, summary: dict[str, Any], metrics: dict[str, float]) -> bool:
        """The trained weights, which are written by now, were evaluated; whether they are the best."""
        executors, total = self._pipeline.executors, self._consequences.end
        self._follow(total, metrics, [executor.state(total) for executor in executors])
        self._consequences.tell(summary, None if self._best is None else self._best.held)
        return self._consequences.is_best(total)

    def take_place(self, summary: dict[str, Any]) -> None:
        """The run has trained to its end, and its weights are written."""
        if self._best is not None:
            self._best.take_place()
        if self._consequences.tells:
            self._consequences.tell(summary, None if self._best is None else self._best.held)
            write_run(summary)

    def _follow(self, version: int, metrics: dict[str, float], states: list[dict[str, Tensor]]) -> None:
        if self._consequences.heard(version, metrics) and self._best is not None:
            assert self._consequences.best is not None
            self._best.keep(states, self._consequences.best)

    def _evaluated(self, version: int, metrics: dict[str, float], seconds: float) -> None:
        self._record.evaluated(version, metrics, seconds, self._consequences.is_best(version))

    def _ends(self, total: int) -> None:
        self._record.total = total

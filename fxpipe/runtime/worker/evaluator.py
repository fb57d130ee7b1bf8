"""One worker's stages of an evaluation, which have one part each, and the means of all workers' metrics."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fxpipe.observe.watch import Watch
from fxpipe.plan.spec import EdgeSpec, EvaluationStage, Plan
from fxpipe.random_state import random_state_kept
from fxpipe.runtime.wires.moves import first_names
from fxpipe.runtime.wires.transport import EdgeComm, Transport
from fxpipe.runtime.worker.stage_code import explained, reseed
from fxpipe.stages.loaded import LoadedEvaluation, load_evaluation
from fxpipe.task.loss_weights import weighted_means


class Evaluator:
    """Runs one worker's code, for each shape of batch.

    Args:
        folder: of the build.
        seed: of the run: code that draws random numbers even in eval mode is seeded from it, by worker and batch.
        transport: for the messages of evaluation. Waits are part of the evaluation, so the transport gets a watch that
            no one reads.

    Raises:
        BuildError: a file is missing, or does not fit the plan.
    """

    def __init__(self, plan: Plan, worker: int, folder: str | Path, seed: int, transport: Transport) -> None:
        self.worker = worker
        self.transport = transport
        self._seed = seed
        self._device = torch.device(plan.device)
        transport.watch = Watch()
        aliases = first_names(plan)
        edges: dict[str, EdgeSpec] = {}
        self.loaded: list[LoadedEvaluation] = []
        self._stages: list[EvaluationStage] = []
        self._arguments: list[tuple[list[str], list[str], list[int], list[str]]] = []
        for spec in plan.evaluations:
            stage = spec.stages[worker]
            self.loaded.append(load_evaluation(Path(folder), stage))
            self._stages.append(stage)
            edges |= {edge.name: edge for edge in spec.edges if worker in (edge.src, edge.dst)}
            places = {leaf.name: i for i, leaf in enumerate(spec.batch)}
            self._arguments.append(
                (
                    [aliases[name] for name in stage.part.weights],
                    [aliases[name] for name in stage.part.buffers],
                    [places[name] for name in stage.part.batch],
                    [aliases[name] for name in stage.part.updates],
                )
            )
        self._comm = EdgeComm(edges, transport, transport.watch)

    def run(self, shape: int, number: int, state: dict[str, Tensor], leaves: Sequence[Any] | None) -> list[Tensor]:
        """Evaluate one batch; return the metrics that this worker computes, float64 scalars in the plan's order.

        Args:
            number: which batch of the evaluation it is, from 0.
            state: parameters and buffers by their first names, of this evaluation alone: buffers that the batch changes
                are replaced in it, so that the next batch meets what this one has left.
            leaves: of the batch, on worker 0.

        Raises:
            RunError: the code failed; names the worker, the batch and the emitted line.
        """
        part, loaded = self._stages[shape].part, self.loaded[shape]
        weights, buffers, batch, carried = self._arguments[shape]
        self._comm.bind(number, 0)
        with contextlib.ExitStack() as stack:
            if part.random:
                stack.enter_context(random_state_kept())
                reseed(self._device, self._seed, self.worker, "evaluate", number)
            stack.enter_context(torch.no_grad())
            what = f"evaluating batch {number + 1} of eval_data()"
            hint = "let eval_data() give smaller batches"
            stack.enter_context(explained(loaded.path, self.worker, lambda: what, hint))
            found = loaded.evaluate(
                tuple([state[name] for name in weights]),
                tuple([state[name] for name in buffers]),
                () if leaves is None else tuple([leaves[i] for i in batch]),
                self._comm,
            )
            count = len(part.metrics)
            if len(found) != count + len(carried):
                more = f" and {len(carried)} buffers" if carried else ""
                raise ValueError(f"returned {len(found)} values, the plan has {count} metrics{more}")
            state.update(zip(carried, found[count:], strict=True))
            return [value.detach().to(torch.float64, copy=True).reshape(()) for value in found[:count]]


def means(
    plan: Plan, shapes: Sequence[int], weights: Sequence[float], values: Sequence[Sequence[float]]
) -> dict[str, float]:
    """The mean of every metric over an evaluation's batches, summed in their order.

    Args:
        shapes, weights: of every batch.
        values: the metrics that each worker computed, batch after batch.

    Raises:
        TaskError: the batches weigh nothing.
    """
    streams = [iter(of_worker) for of_worker in values]
    rows = []
    for shape, weight in zip(shapes, weights, strict=True):
        spec = plan.evaluations[shape]
        made = {
            name: next(stream)
            for stream, stage in zip(streams, spec.stages, strict=True)
            for name in stage.part.metrics
        }
        rows.append((weight, {n: made[n] if n in made else spec.constants[n] for n in spec.metrics}))
    return weighted_means(rows)

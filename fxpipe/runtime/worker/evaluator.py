"""One worker's share of an evaluation: its functions, the tensors they read, and the means of all workers' metrics."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from fxpipe.errors import FxpipeError, PeerLost, RunError
from fxpipe.plan.spec import Plan, TensorSpec
from fxpipe.random_state import random_state_kept
from fxpipe.stages.loaded import LoadedEvaluation, load_evaluation, stage_line


class EvaluationComm(Protocol):
    """What an evaluation's code sends and receives with."""

    def recv(self, name: str) -> Tensor: ...

    def send(self, name: str, value: Tensor) -> None: ...


@dataclass(frozen=True)
class Move:
    """A tensor that evaluation reads elsewhere than where its newest value is: it is sent before the batches.

    Attributes:
        once: it never changes, so that it is sent before the first evaluation alone.
    """

    name: str
    spec: TensorSpec
    source: int
    reader: int
    once: bool


def moves(plan: Plan) -> list[Move]:
    """All of them, in the one order in which every worker sends and receives its own."""
    readers: dict[str, set[int]] = {}
    for worker in range(plan.workers):
        for name in _read(plan, worker):
            readers.setdefault(name, set()).add(worker)
    parameters = [(p.name, p.tensor, p.owner, not p.trained) for p in plan.parameters]
    buffers = [(b.name, b.tensor, b.home, False) for b in plan.buffers if b.home is not None]
    return [
        Move(name, spec, source, reader, once)
        for name, spec, source, once in (*parameters, *buffers)
        for reader in sorted(readers.get(name, ()))
        if reader != source
    ]


class Evaluator:
    """One worker's functions, one for each shape of batch.

    Args:
        folder: of the build.
        seed: of the run: code that draws random numbers even in eval mode is seeded from it, by worker and batch.

    Raises:
        BuildError: a file is missing, or does not fit the plan.
    """

    def __init__(self, plan: Plan, worker: int, folder: str | Path, seed: int) -> None:
        self.worker = worker
        self._seed = seed
        self._device = torch.device(plan.device)
        aliases = _first_names(plan)
        self.loaded: list[LoadedEvaluation] = []
        self._parts = []
        self._arguments: list[tuple[list[str], list[str], list[int]]] = []
        for spec in plan.evaluations:
            stage = spec.stages[worker]
            self.loaded.append(load_evaluation(Path(folder) / stage.file, stage))
            self._parts.append(stage.part)
            places = {leaf.name: i for i, leaf in enumerate(spec.batch)}
            self._arguments.append(
                (
                    [aliases[name] for name in stage.part.weights],
                    [aliases[name] for name in stage.part.buffers],
                    [places[name] for name in stage.part.batch],
                )
            )

    def run(
        self, shape: int, number: int, state: Mapping[str, Tensor], leaves: Sequence[Any] | None, comm: EvaluationComm
    ) -> list[Tensor]:
        """Evaluate one batch; the metrics that this worker makes of it, float64 scalars in the plan's order.

        Args:
            number: which batch of the evaluation it is, from 0.
            state: parameters and buffers by their first names.
            leaves: of the batch, on worker 0.

        Raises:
            RunError: the code failed; names the worker, the batch and the emitted line.
        """
        part = self._parts[shape]
        weights, buffers, batch = self._arguments[shape]
        with contextlib.ExitStack() as stack:
            if part.random:
                stack.enter_context(random_state_kept())
                self._reseed(number)
            stack.enter_context(torch.no_grad())
            stack.enter_context(self._explaining(shape, number))
            found = self.loaded[shape].evaluate(
                tuple([state[name] for name in weights]),
                tuple([state[name] for name in buffers]),
                () if leaves is None else tuple([leaves[i] for i in batch]),
                comm,
            )
            if len(found) != len(part.metrics):
                raise ValueError(f"returned {len(found)} metrics, the plan has {len(part.metrics)}")
            return [value.detach().to(torch.float64, copy=True).reshape(()) for value in found]

    def _reseed(self, number: int) -> None:
        text = f"{self._seed}/{self.worker}/evaluate/{number}"
        seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
        torch.default_generator.manual_seed(seed)
        if self._device.type == "cuda":
            torch.cuda.manual_seed(seed)

    @contextlib.contextmanager
    def _explaining(self, shape: int, number: int) -> Iterator[None]:
        """Errors of the emitted code come out as RunError with their place; our own get their place."""
        path = self.loaded[shape].path
        what = f"evaluating batch {number + 1} of eval_data() failed on worker {self.worker}"
        try:
            yield
        except PeerLost:
            raise
        except FxpipeError as error:
            error.where = error.where or stage_line(error, path) or what
            raise
        except Exception as error:
            hint = None
            if isinstance(error, torch.OutOfMemoryError):
                hint = "let eval_data() give smaller batches"
            place = stage_line(error, path) or str(path)
            raise RunError(f"{what}: {type(error).__name__}: {error}", where=place, hint=hint) from error


def means(plan: Plan, shapes: Sequence[int], values: Sequence[Sequence[float]]) -> dict[str, float]:
    """The mean of every metric over an evaluation's batches, summed up in their order.

    Args:
        shapes: of every batch.
        values: what each worker made of the batches, one batch after the other.
    """
    streams = [iter(of_worker) for of_worker in values]
    totals: dict[str, float] = {}
    for shape in shapes:
        spec = plan.evaluations[shape]
        made = {
            name: next(stream)
            for stream, stage in zip(streams, spec.stages, strict=True)
            for name in stage.part.metrics
        }
        for name in spec.metrics:
            totals[name] = totals.get(name, 0.0) + (made[name] if name in made else spec.constants[name])
    return {name: total / len(shapes) for name, total in totals.items()}


def count_of(plan: Plan, worker: int, shapes: Sequence[int]) -> int:
    """How many values a worker makes of these batches."""
    return sum(len(plan.evaluations[shape].stages[worker].part.metrics) for shape in shapes)


def every(steps: int | None, total: int) -> Callable[[int], bool]:
    """Whether a run evaluates after so many updates, before it has made all of them: the end is evaluated anyway."""
    return lambda version: steps is not None and 0 < version < total and version % steps == 0


def _read(plan: Plan, worker: int) -> set[str]:
    """The first names of all that a worker's evaluations read."""
    aliases = _first_names(plan)
    parts = [spec.stages[worker].part for spec in plan.evaluations]
    return {aliases[name] for part in parts for name in (*part.weights, *part.buffers)}


def _first_names(plan: Plan) -> dict[str, str]:
    rows = [row.names for row in plan.parameters] + [row.names for row in plan.buffers]
    return {name: names[0] for names in rows for name in names}

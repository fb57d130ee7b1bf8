"""Averaged weights of one worker's parameters: torch's moving average, or what the user's optimizer keeps."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from fxpipe.errors import FxpipeError, TaskError
from fxpipe.task.model_file import Task


class Averages(Protocol):
    """Averages of the parameters that a worker trains."""

    def update(self) -> None:
        """The optimizer has made a step."""

    def read(self) -> dict[str, Tensor]:
        """The present averages by name; a parameter without one is its own average."""


class MovingAverage:
    """`torch.optim.swa_utils.AveragedModel` over the worker's own parameters.

    Args:
        decay: the share of the old average that each update keeps; the first update copies the weights.
    """

    def __init__(self, trained: Mapping[str, nn.Parameter], decay: float) -> None:
        self._names = list(trained)
        self._live = nn.ParameterList(trained.values())
        self._averaged = AveragedModel(self._live, multi_avg_fn=get_ema_multi_avg_fn(decay))

    def update(self) -> None:
        if self._names:
            self._averaged.update_parameters(self._live)

    def load(self, averages: Mapping[str, Tensor], updates: int) -> None:
        """Continue from what `read` gave after this many updates; an average that is missing keeps its value."""
        if not self._names:
            return
        for name, average in zip(self._names, self._averaged.module.parameters(), strict=True):
            if name in averages:
                average.data.copy_(averages[name])
        self._averaged.n_averaged.fill_(updates)

    def read(self) -> dict[str, Tensor]:
        return dict(zip(self._names, (p.detach() for p in self._averaged.module.parameters()), strict=True))


class KeptByOptimizer:
    """What the model file's `averaged(optimizer, named_parameters)` returns at each call."""

    def __init__(
        self, task: Task, optimizer: torch.optim.Optimizer | None, trained: Mapping[str, nn.Parameter]
    ) -> None:
        self._task, self._optimizer, self._trained = task, optimizer, trained

    def update(self) -> None:
        """The optimizer keeps them itself."""

    def read(self) -> dict[str, Tensor]:
        """Copies of the averages, each with the shape and memory layout of its parameter.

        Raises:
            TaskError: the hook failed, or returned something else.
        """
        if self._optimizer is None:
            return {}
        with torch.no_grad(), _put_back(self._trained.values()):
            found = self._asked(self._optimizer)
            return {name: torch.empty_like(self._trained[name]).copy_(value) for name, value in found.items()}

    def _asked(self, optimizer: torch.optim.Optimizer) -> Mapping[str, Tensor]:
        try:
            found = self._task.averaged(optimizer, list(self._trained.items()))
        except FxpipeError:
            raise
        except Exception as error:
            raise TaskError(
                f"averaged() raised {type(error).__name__}: {error}",
                hint="an optimizer has no state before its first step, and none of a parameter that it was not given",
            ) from error
        if not isinstance(found, Mapping):
            raise TaskError(
                f"averaged() returned {type(found).__name__}, not a dictionary",
                hint="return tensors by name: {name: optimizer.state[p]['ax'] for name, p in named_parameters}",
            )
        wrong = [str(name) for name, value in found.items() if not _fits(value, self._trained.get(name))]
        if wrong:
            raise TaskError(
                f"averaged() returned tensors that do not match a parameter by name and shape: {', '.join(wrong[:8])}",
                hint="return tensors under names from named_parameters, each with the shape of its parameter",
            )
        return found


@contextmanager
def _put_back(parameters: Collection[nn.Parameter]) -> Iterator[None]:
    """Restore the parameters afterwards: some optimizers put their averages in place of the weights."""
    before = [(parameter, parameter.data, parameter.detach().clone()) for parameter in parameters]
    try:
        yield
    finally:
        for parameter, memory, values in before:
            parameter.data = memory
            memory.copy_(values)


def make_averages(
    ema: float | None, task: Task, optimizer: torch.optim.Optimizer | None, trained: Mapping[str, nn.Parameter]
) -> Averages | None:
    """The averages that a run asks for; None if it asks for none. All workers of a run get the same kind.

    Raises:
        FxpipeError: the decay is not between 0 and 1, or the run asks for two averages.
    """
    if ema is None:
        return KeptByOptimizer(task, optimizer, trained) if task.averages else None
    if not 0 < ema < 1:
        raise FxpipeError(
            f"--ema {ema} is not between 0 and 1", hint="--ema 0.999 keeps 0.999 of the average at each update"
        )
    if task.averages:
        raise FxpipeError(
            "two averages of the weights are asked for: by --ema and by averaged()",
            hint="leave out --ema, or the hook averaged()",
        )
    return MovingAverage(trained, ema)


def averages_of(workers: Sequence[Averages | None]) -> list[dict[str, Tensor]] | None:
    """The present averages of each worker; None if there are none."""
    return [averages.read() for averages in workers if averages is not None] or None


def _fits(value: object, parameter: nn.Parameter | None) -> bool:
    return isinstance(value, Tensor) and parameter is not None and value.shape == parameter.shape

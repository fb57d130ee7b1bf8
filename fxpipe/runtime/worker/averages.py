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
    """The averages of the parameters that a worker trains."""

    def update(self) -> None:
        """The optimizer has made a step."""

    def read(self) -> dict[str, Tensor]:
        """The averages as they are now, by name; a parameter without one is its own."""


class MovingAverage:
    """`torch.optim.swa_utils.AveragedModel` over the worker's own parameters, as eager has it over all of them.

    Args:
        decay: what remains of the average at each update; the first update copies.
    """

    def __init__(self, trained: Mapping[str, nn.Parameter], decay: float) -> None:
        self._names = list(trained)
        self._live = nn.ParameterList(trained.values())
        self._averaged = AveragedModel(self._live, multi_avg_fn=get_ema_multi_avg_fn(decay))

    def update(self) -> None:
        if self._names:
            self._averaged.update_parameters(self._live)

    def load(self, averages: Mapping[str, Tensor], updates: int) -> None:
        """Go on from what `read` gave after so many updates; what it lacks had this value until now."""
        if not self._names:
            return
        for name, average in zip(self._names, self._averaged.module.parameters(), strict=True):
            if name in averages:
                average.data.copy_(averages[name])
        self._averaged.n_averaged.fill_(updates)

    def read(self) -> dict[str, Tensor]:
        return dict(zip(self._names, (p.detach() for p in self._averaged.module.parameters()), strict=True))


class KeptByOptimizer:
    """What the model file's `averaged(optimizer, named_parameters)` says, whenever it is asked."""

    def __init__(
        self, task: Task, optimizer: torch.optim.Optimizer | None, trained: Mapping[str, nn.Parameter]
    ) -> None:
        self._task, self._optimizer, self._trained = task, optimizer, trained

    def update(self) -> None:
        """The optimizer keeps them itself."""

    def read(self) -> dict[str, Tensor]:
        """Copies of the averages; each is checked to be like its parameter, and lies in memory as that does.

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
                hint="an optimizer has no state of a parameter that it was not given, or before its first step",
            ) from error
        if not isinstance(found, Mapping):
            raise TaskError(
                f"averaged() returned {type(found).__name__}, not a dictionary",
                hint="return tensors by name: {name: optimizer.state[p]['ax'] for name, p in named_parameters}",
            )
        wrong = [str(name) for name, value in found.items() if not _fits(value, self._trained.get(name))]
        if wrong:
            raise TaskError(
                f"averaged() returned tensors that are not like the parameters of these names: {', '.join(wrong[:8])}",
                hint="the names are those of named_parameters, the shapes those of the parameters",
            )
        return found


@contextmanager
def _put_back(parameters: Collection[nn.Parameter]) -> Iterator[None]:
    """Afterwards the parameters are as before: some optimizers put their averages in place of the weights."""
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
    """The averages that a run asks for; None if it asks for none. All workers of a run get the same answer.

    Raises:
        FxpipeError: the decay is no share, or there are two averages.
    """
    if ema is None:
        return KeptByOptimizer(task, optimizer, trained) if task.averages else None
    if not 0 < ema < 1:
        raise FxpipeError(
            f"a moving average cannot decay by {ema}", hint="--ema 0.999 keeps 0.999 of it at each update"
        )
    if task.averages:
        raise FxpipeError(
            "there are two averages of the weights: that of --ema, and what averaged() returns",
            hint="leave out --ema, or the hook averaged()",
        )
    return MovingAverage(trained, ema)


def averages_of(workers: Sequence[Averages | None]) -> list[dict[str, Tensor]] | None:
    """What each worker's averages are now; None if there are none."""
    return [averages.read() for averages in workers if averages is not None] or None


def _fits(value: object, parameter: nn.Parameter | None) -> bool:
    return isinstance(value, Tensor) and parameter is not None and value.shape == parameter.shape

"""Averaged weights of one worker's parameters: torch's moving average, or what the user's optimizer keeps."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from fxpipe.checkpoint.shard import Tensors
from fxpipe.errors import FxpipeError, TaskError
from fxpipe.runtime.worker.part import UpdatePart
from fxpipe.runtime.worker.setting import WorkerSetting


class Averages(UpdatePart):
    """Averages of the parameters that a worker trains."""

    entry = "averages"
    form = Tensors

    @classmethod
    def of(cls, setting: WorkerSetting) -> Iterator[UpdatePart]:
        """The averages that a run asks for. All workers of a run get the same kind."""
        if setting.options.ema is not None and setting.task.averages:
            raise FxpipeError(
                "two averages of the weights are asked for: by --ema and by averaged()",
                hint="leave out --ema, or the hook averaged()",
            )
        if setting.options.ema is not None:
            yield MovingAverage(setting, setting.options.ema)
        elif setting.task.averages:
            yield KeptByOptimizer(setting)

    def read(self) -> dict[str, Tensor]:
        """The present averages by name; a parameter without one is its own average."""
        raise NotImplementedError


class MovingAverage(Averages):
    """`torch.optim.swa_utils.AveragedModel` over the worker's own parameters.

    Args:
        decay: the share of the old average that each update keeps; the first update copies the weights.
    """

    def __init__(self, setting: WorkerSetting, decay: float) -> None:
        trained = setting.trained
        self.alike = setting.plan.outer is None
        self._names = list(trained)
        self._live = nn.ParameterList(trained.values())
        self._averaged = AveragedModel(self._live, multi_avg_fn=get_ema_multi_avg_fn(decay))

    def apply(self, minibatch: int) -> None:
        if self._names:
            self._averaged.update_parameters(self._live)

    def state(self, version: int) -> Any:
        return self.read()

    def load(self, states: Sequence[Any], version: int, same: bool) -> None:
        averages = {name: value for state in states for name, value in state.items()}
        if not self._names or not averages:
            return
        for name, average in zip(self._names, self._averaged.module.parameters(), strict=True):
            if name in averages:  # else it keeps its value
                average.data.copy_(averages[name])
        self._averaged.n_averaged.fill_(version)

    def read(self) -> dict[str, Tensor]:
        return dict(zip(self._names, (p.detach() for p in self._averaged.module.parameters()), strict=True))


class KeptByOptimizer(Averages):
    """What the model file's `averaged(optimizer, named_parameters)` returns at each call; the optimizer saves them."""

    def __init__(self, setting: WorkerSetting) -> None:
        self._task, self._trained, self._optimizer = setting.task, setting.trained, setting.optimizer

    def read(self) -> dict[str, Tensor]:
        """Copies of the averages, each with the shape and memory layout of its parameter."""
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


def _fits(value: object, parameter: nn.Parameter | None) -> bool:
    return isinstance(value, Tensor) and parameter is not None and value.shape == parameter.shape

"""Replicas that all make the worker's updates must make the same: their optimizers are compared before training."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fxpipe.errors import RunError
from fxpipe.runtime.wires.collective import Collective
from fxpipe.runtime.worker.replicas_data import unlike_first

_KEY = ("optimizer", -1)


def check_optimizers_alike(
    worker: int, optimizer: Any, scheduler: Any, names: Mapping[int, str], collective: Collective, device: torch.device
) -> None:
    """Compare a replica's optimizer with those of the worker's other replicas; waits for them.

    Classes count, and options that are numbers, texts or None: of each parameter, and of the scheduler of the rate.

    Args:
        optimizer, scheduler: None where there is none.
        names: of parameters, by their id.

    Raises:
        RunError: a replica has another one than replica 0.
    """
    found = torch.zeros(collective.replicas, dtype=torch.int64)
    found[collective.replica] = zlib.crc32(repr(_description(optimizer, scheduler, names)).encode())
    collective.start_sum(_KEY, found.to(device))
    numbers = collective.take(_KEY).tolist()
    if others := unlike_first(numbers):
        raise RunError(
            f"the replicas of worker {worker} do not have the same optimizer: {others} another than replica 0",
            where="optimizer()",
            hint="all processes must be given the same classes, learning rates and other options: replicas with the "
            "same sums of gradients would make different updates",
        )


def _description(optimizer: Any, scheduler: Any, names: Mapping[int, str]) -> list[Any]:
    if optimizer is None:
        return []
    options = [
        (
            sorted(names.get(id(p), "") for p in group["params"]),
            _plain({k: v for k, v in group.items() if k != "params"}),
        )
        for group in optimizer.param_groups
    ]
    state = scheduler.state_dict() if hasattr(scheduler, "state_dict") else {}
    return [type(optimizer).__qualname__, options, type(scheduler).__qualname__, _plain(state)]


def _plain(value: Any) -> Any:
    """What of a value is the same in two processes if they mean the same."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else tuple(value.shape)
    if isinstance(value, Mapping):
        return [(str(key), _plain(value[key])) for key in sorted(value, key=str)]
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value if value is None or isinstance(value, bool | int | float | str) else type(value).__qualname__

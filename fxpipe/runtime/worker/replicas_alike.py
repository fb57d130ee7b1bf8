"""What replicas of a worker must have alike: the data that they read, and the optimizers that all make its updates."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fxpipe.errors import RunError, listed
from fxpipe.runtime.wires.collective import Collective, Key

_KEY = ("optimizer", -1)


def unlike_first(numbers: Sequence[object]) -> str:
    """The replicas whose number is not that of replica 0, for a message; empty if there are none."""
    others = [f"replica {j}" for j, number in enumerate(numbers) if number != numbers[0]]
    return listed(others) if others else ""


def start_comparison(key: Key, number: int, collective: Collective, device: torch.device | str) -> None:
    """Begin to compare a number with those of the worker's other replicas, which are what is then taken of this key."""
    found = torch.zeros(collective.replicas, dtype=torch.int64)
    found[collective.replica] = number
    collective.start_sum(key, found.to(device))


def check_read_alike(numbers: Sequence[object], what: str, hook: str) -> None:
    """Compare what each replica of worker 0 has read.

    Args:
        numbers: of each replica, what stands for the data that it has read.
        what: it is, such as `step 3`.
        hook: that gives the data.

    Raises:
        RunError: a replica has read other data than replica 0; names all that have.
    """
    if others := unlike_first(numbers):
        raise RunError(
            f"the replicas of worker 0 read different batches in {what}: {others} not those of replica 0",
            where=hook,
            hint="every replica reads all data and takes its share: they must come in the same order in every "
            "process, as with random numbers of the process's own generators, which are seeded alike",
        )


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
    described = zlib.crc32(repr(_description(optimizer, scheduler, names)).encode())
    start_comparison(_KEY, described, collective, device)
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

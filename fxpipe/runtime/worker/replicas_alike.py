"""Checks that the replicas of a worker read the same batches and have the same optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fxpipe.errors import RunError
from fxpipe.runtime.wires.collective import Collective, Key


def check_read_alike(collective: Collective, key: Key, what: str, hook: str) -> None:
    """Compare what the replicas of worker 0 have read; waits for them.

    Args:
        key: of the comparison, which has begun.
        what: names the data, such as `step 3`.
        hook: gives the data.

    Raises:
        RunError: replicas read different data from replica 0; names them all.
    """
    if others := collective.unlike_first(key):
        raise RunError(
            f"the replicas of worker 0 read different batches in {what}: {others} unlike replica 0",
            where=hook,
            hint="every replica reads all data and takes its share, so every process must read the same batches in the "
            "same order; fxpipe seeds the default generators of Python, numpy and torch alike in all processes",
        )


_KEY = ("optimizer", -1)
"""The key of the comparison of optimizers."""


def check_optimizers_alike(
    worker: int, optimizer: Any, scheduler: Any, names: Mapping[int, str], collective: Collective
) -> None:
    """Compare a replica's optimizer with those of the worker's other replicas; waits for them.

    It compares classes, and options that are numbers, texts or None: of each parameter, and of the scheduler.

    Args:
        optimizer, scheduler: None where there is none.
        names: of parameters, by `id(parameter)`.

    Raises:
        RunError: a replica has a different one from replica 0.
    """
    collective.start_comparison(_KEY, _description(optimizer, scheduler, names))
    if others := collective.unlike_first(_KEY):
        raise RunError(
            f"the replicas of worker {worker} have different optimizers: {others} unlike replica 0",
            where="optimizer()",
            hint="use the same classes, learning rates and other options in all processes: otherwise replicas make "
            "different updates from the same gradients",
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
    """The part of a value that can be compared between processes."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else tuple(value.shape)
    if isinstance(value, Mapping):
        return [(str(key), _plain(value[key])) for key in sorted(value, key=str)]
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value if value is None or isinstance(value, bool | int | float | str) else type(value).__qualname__

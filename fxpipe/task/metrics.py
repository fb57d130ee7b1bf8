"""The metrics that `loss(model, batch)` returns next to the loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

NO_METRICS: Mapping[str, float] = MappingProxyType({})


def loss_and_metrics(returned: Any) -> tuple[Any, dict[Any, Any]]:
    """The parts of the hook `loss`'s result: `(loss, {"accuracy": ...})`, or the loss alone, without metrics."""
    match returned:
        case (loss, Mapping() as metrics) if isinstance(returned, tuple):
            return loss, dict(metrics)
        case _:
            return returned, {}


def named_numbers(tensor: Any, names: Sequence[str]) -> tuple[float, dict[str, float]]:
    """A minibatch's loss and its metrics by name, from the one tensor in which they travel (see `PartSpec.metrics`)."""
    loss, *metrics = tensor.reshape(-1).tolist()
    return loss, dict(zip(names, metrics, strict=True))

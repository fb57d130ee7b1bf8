"""Metrics of torchmetrics: their arguments are taken from a step, and given to them for all batches at once.

    step, of each batch:   self.acc(logits, y)      →  acc(0).0 = logits, acc(0).1 = y: what an evaluation gathers
    at the end:            acc.update(logits, y) of each batch, acc.compute()

So a metric sees all batches of all replicas in their order, whatever its states are, as in one process.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.errors import TaskError
from fxpipe.torch_private import MODULES, pytree


@dataclass(frozen=True)
class MetricCall:
    """One call of a metric in a step: where the metric is in the model, and what it is given."""

    metric: str
    arguments: tuple[Any, Any]

    def tensors(self, place: int) -> dict[str, Tensor]:
        """What an evaluation has to gather of this call of a step: by name, tensors, and numbers as tensors of one
        element.
        """
        tensors = {}
        for number, value in enumerate(pytree.tree_leaves(self.arguments)):
            if isinstance(value, (bool, int, float)):
                value = torch.full((1,), value, dtype=torch.float64 if isinstance(value, float) else None)
            if isinstance(value, Tensor):
                tensors[f"{self.metric}({place}).{number}"] = value if value.dim() else value.reshape(1)
        return tensors

    def of(self, place: int, gathered: Mapping[str, Tensor]) -> tuple[Any, Any]:
        """The arguments of one batch."""
        leaves, tree = pytree.tree_flatten(self.arguments)
        for number, like in enumerate(leaves):
            value = gathered.get(f"{self.metric}({place}).{number}")
            if value is not None:
                leaves[number] = value.reshape(()) if isinstance(like, Tensor) and not like.dim() else value
                leaves[number] = leaves[number] if isinstance(like, Tensor) else type(like)(value.item())
        arguments: tuple[Any, Any] = pytree.tree_unflatten(leaves, tree)
        return arguments


@dataclass(frozen=True)
class OfBatch:
    """What a metric returns in a step: its value of that batch, which is there when all batches are."""

    call: int


class StandIn(nn.Module):
    """A metric, or a collection of some, while a step runs: it notes what it is given."""

    def __init__(self, path: str, calls: list[MetricCall]) -> None:
        super().__init__()
        self.path, self.calls = path, calls

    def forward(self, *args: Any, **kwargs: Any) -> OfBatch:
        self.update(*args, **kwargs)
        return OfBatch(len(self.calls) - 1)

    def update(self, *args: Any, **kwargs: Any) -> None:
        self.calls.append(MetricCall(self.path, (args, kwargs)))

    def reset(self) -> None:
        """A step begins with nothing anyway."""

    def compute(self) -> Any:
        raise TaskError(
            f"{self.path}.compute() in a step, which knows one batch",
            hint=f"self.log(NAME, self.{self.path}), or compute it in on_validation_epoch_end()",
        )


def metrics_in(model: nn.Module) -> dict[str, nn.Module]:
    """The metrics and collections of a model by their paths, without those inside of others."""
    metrics: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        kinds = {kind.__name__ for kind in type(module).__mro__ if kind.__module__.partition(".")[0] == "torchmetrics"}
        if kinds & {"Metric", "MetricCollection"} and not any(path.startswith(f"{outer}.") for outer in metrics):
            metrics[path] = module
    return metrics


@contextmanager
def in_place(model: nn.Module, others: Mapping[str, nn.Module]) -> Iterator[None]:
    """Inside, other modules are in the place of some."""
    before = {path: model.get_submodule(path) for path in others}
    _put(model, others)
    try:
        yield
    finally:
        _put(model, before)


def _put(model: nn.Module, modules: Mapping[str, nn.Module]) -> None:
    for path, module in modules.items():
        parent, _, name = path.rpartition(".")
        model.get_submodule(parent).__dict__[MODULES][name] = module


def replayed(
    model: nn.Module, calls: Sequence[MetricCall], batches: Sequence[Mapping[str, Tensor]], places: Collection[int]
) -> tuple[dict[str, Any], dict[int, list[Any]]]:
    """Copies of the metrics of a model that have seen all batches, and the values of some calls for each batch."""
    metrics: dict[str, Any] = {path: copy.deepcopy(metric) for path, metric in metrics_in(model).items()}
    for metric in metrics.values():
        metric.reset()
    values: dict[int, list[Any]] = {place: [] for place in places}
    for batch in batches:
        for place, call in enumerate(calls):
            args, kwargs = call.of(place, batch)
            if place in places:
                values[place].append(metrics[call.metric](*args, **kwargs))
            else:
                metrics[call.metric].update(*args, **kwargs)
    return metrics, values

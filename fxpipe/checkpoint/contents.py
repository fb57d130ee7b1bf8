"""What a worker's shard holds besides weights: the types that are read, to the last leaf that fxpipe itself writes.

What an optimizer keeps of a parameter, and a scheduler of itself, is theirs.
"""

from __future__ import annotations

from typing import Annotated, Any, NotRequired, TypedDict

from msgspec import Meta
from torch import Tensor

Count = Annotated[int, Meta(ge=0)]
Tensors = dict[str, Tensor]


class Group(TypedDict):
    """A group of an optimizer: the names of its parameters, and all else that it has."""

    params: list[str]
    options: dict[Any, Any]


class OneOptimizer(TypedDict):
    """One of several optimizers: see `fxpipe.checkpoint.optimizer_state`."""

    own: NotRequired[Any]
    attributes: NotRequired[dict[str, Any]]
    others: NotRequired[dict[Any, Any]]


class OptimizerState(TypedDict):
    """Of each parameter by its name, and of the whole."""

    groups: list[Group]
    state: dict[str, Any]
    parts: list[OneOptimizer]


class LossScaleState(TypedDict):
    """Of the loss's scale."""

    value: Annotated[float, Meta(gt=0)]
    good: Count
    skipped: Count
    in_row: Count


class ScaleState(TypedDict):
    """Of loss scaling; clipping has no state then."""

    loss_scale: LossScaleState
    clip: None


class UpdaterState(TypedDict):
    """What the next updates depend on."""

    clip: list[Annotated[list[float], Meta(min_length=2, max_length=2)]] | ScaleState | None
    optimizer: NotRequired[OptimizerState]
    scheduler: NotRequired[dict[Any, Any] | None]
    evaluated: NotRequired[Count]
    heard: NotRequired[tuple[Count, float]]
    last_updates: NotRequired[dict[str, tuple[Tensor, float | None]]]
    last_steps: NotRequired[dict[str, tuple[Count, list[Tensor]]]]
    set_rates: NotRequired[list[tuple[Count, list[float]]]]
    rates_known: NotRequired[Any]  # of earlier checkpoints, which nothing reads


class OuterState(TypedDict):
    """Of replicas that train apart, what each has for itself."""

    since: Count
    under_way: Count | None
    weights: Tensors
    begun: Tensors


class State(TypedDict):
    """All that is no weight, no buffer and nothing in flight."""

    updater: UpdaterState
    averages: Tensors | None
    outer: NotRequired[OuterState]
    outer_momentum: NotRequired[Tensors]
    decided: NotRequired[list[tuple[Count, Count, str, bool]]]
    staleness: NotRequired[Any]  # as `rates_known`

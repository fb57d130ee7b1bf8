"""The types of a worker's state in a shard, down to every leaf that fxpipe itself writes.

The state of an optimizer for a parameter, and of a scheduler, may be anything.
"""

from __future__ import annotations

from typing import Annotated, Any, NotRequired, TypedDict

from msgspec import Meta
from torch import Tensor

Count = Annotated[int, Meta(ge=0)]
Tensors = dict[str, Tensor]


Square = Annotated[list[Annotated[float, Meta(ge=0)]], Meta(min_length=2, max_length=2)]
"""The square of a norm, and of how many elements."""


class Group(TypedDict):
    """A group of an optimizer: the names of its parameters, and its options."""

    params: list[str]
    options: dict[Any, Any]


class OneOptimizer(TypedDict):
    """One of several optimizers: see `fxpipe.checkpoint.optimizer_state`."""

    own: NotRequired[Any]
    attributes: NotRequired[dict[str, Any]]
    others: NotRequired[dict[Any, Any]]


class OptimizerState(TypedDict):
    """State of each parameter by name, and of the whole optimizer."""

    groups: list[Group]
    state: dict[str, Any]
    parts: list[OneOptimizer]


class LossScaleState(TypedDict):
    """State of the loss scale."""

    value: Annotated[float, Meta(gt=0)]
    good: Count
    skipped: Count
    in_row: Count


class ScaleState(TypedDict):
    """State of loss scaling; clipping has no state then."""

    loss_scale: LossScaleState
    clip: None


class UpdaterState(TypedDict):
    """What the next updates depend on."""

    clip: Annotated[list[Square], Meta(min_length=1)] | ScaleState | None
    optimizer: NotRequired[OptimizerState]
    scheduler: NotRequired[dict[Any, Any] | None]
    evaluated: NotRequired[Count]
    metric_due: NotRequired[tuple[Count, float]]
    heard: NotRequired[tuple[Count, float]]
    last_updates: NotRequired[dict[str, tuple[Tensor, float | None]]]
    last_steps: NotRequired[dict[str, tuple[Count, list[Tensor]]]]
    set_rates: NotRequired[list[tuple[Count, list[float]]]]
    rates_known: NotRequired[Any]  # in earlier checkpoints; not read


class OuterState(TypedDict):
    """Each replica's own state, if replicas train separately."""

    since: Count
    under_way: Count | None
    weights: Tensors
    begun: Tensors
    memories: NotRequired[dict[str, Tensors]]  # of parameters, if a codec encodes what outer steps send


class State(TypedDict):
    """Everything except weights, buffers and values in flight."""

    updater: UpdaterState
    averages: Tensors | None
    outer: NotRequired[OuterState]
    outer_momentum: NotRequired[Tensors]
    decided: NotRequired[list[tuple[Count, Count, str, bool]]]
    staleness: NotRequired[Any]  # as `rates_known`

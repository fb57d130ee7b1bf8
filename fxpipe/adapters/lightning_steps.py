"""The steps of a LightningModule as functions of model and batch, with what they log."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe import user_lines
from fxpipe.adapters import warn_once
from fxpipe.adapters.epochs import JoinedBatches
from fxpipe.adapters.torchmetrics import MetricCall, OfBatch, StandIn, in_place, metrics_in, replayed
from fxpipe.errors import TaskError, listed
from fxpipe.random_state import random_state_kept
from fxpipe.task.batch import Batch
from fxpipe.tracing.step_metrics import TAKEN


@dataclass(frozen=True)
class Logged:
    """One call of `self.log`, or one value of `self.log_dict`; a collection of torchmetrics has the name ''."""

    name: str
    value: Any
    on_step: bool | None
    reduce_fx: Any

    @property
    def averaged(self) -> bool:
        """Whether its epoch's value is the mean over batches."""
        return self.reduce_fx in ("mean", "avg", torch.mean)


def loss_of(model: nn.Module, batch: Any) -> Any:
    """What `training_step` returns, or its `loss`; with what it logs, where that is a number of the step's own.

    What is the loss itself is not repeated: every line of `metrics.jsonl` has it. Of a `JoinedBatches`, the gradient is
    multiplied by its share, and the number is not.
    """
    share: float | None = None
    if isinstance(batch, JoinedBatches):
        batch, share = batch
    entries: list[Logged] = []
    with _logging(model, entries.append), in_place(model, {path: StandIn(path, []) for path in metrics_in(model)}):
        result = _step(model.training_step, batch)
    loss: Tensor = result["loss"] if isinstance(result, dict) else result
    heard = [entry for entry in entries if entry.value is not loss]
    reasons: dict[str, list[str]] = {}
    metrics: dict[str, Tensor] = {}
    for entry in heard:
        if (reason := _not_kept(entry)) is None:
            metrics[entry.name] = entry.value.detach().reshape(())
        else:
            reasons.setdefault(reason, []).append(entry.name)
    for reason, names in reasons.items():
        warn_once(f"{type(model).__name__}.training_step logs {_quoted(names)}: {reason}, so it is not kept")
    if share is not None:
        loss = loss.detach() + share * (loss - loss.detach())
    return (loss, metrics) if metrics else loss


@dataclass(frozen=True)
class Validated:
    """What a `validation_step` has logged, and the calls of metrics in it."""

    logged: list[Logged]
    calls: list[MetricCall]

    @property
    def numbers(self) -> dict[str, Any]:
        """What is logged of the batch alone; one number each, which a tensor with dimensions may be."""
        values = {entry.name: entry.value for entry in self.logged if not isinstance(entry.value, (StandIn, OfBatch))}
        one = {name for name, value in values.items() if isinstance(value, Tensor) and value.numel() == 1}
        return {name: value.reshape(()) if name in one else value for name, value in values.items()}


def validated(model: nn.Module, batch: Any) -> Validated:
    """Run `validation_step`."""
    entries, calls = list[Logged](), list[MetricCall]()
    with _logging(model, entries.append), in_place(model, {path: StandIn(path, calls) for path in metrics_in(model)}):
        _step(model.validation_step, batch)
    if not entries and not calls:
        raise TaskError("validation_step() has logged nothing", hint='self.log("val_loss", loss)')
    return Validated(entries, calls)


def metrics_of(model: nn.Module, batch: Any) -> dict[str, Any]:
    """What `validation_step` logs of a batch, and what it gives metrics of torchmetrics, for `metrics_of_all`."""
    step = validated(model, batch)
    entries = [entry for entry in step.logged if entry.name in step.numbers]
    if others := [entry.name for entry in entries if not entry.averaged]:
        warn_once(
            f"{type(model).__name__}.validation_step logs {_quoted(others)} with a reduce_fx of its own: here the mean "
            "over batches is taken"
        )
    gathered = {name: value for place, call in enumerate(step.calls) for name, value in call.tensors(place).items()}
    return step.numbers | gathered | ({SIZE: torch.full((1,), _size(batch))} if gathered else {})


SIZE = "batch size"


def _size(batch: Any) -> int:
    """How much the batch counts in a mean over batches: its samples, as Lightning finds them."""
    return next((len(value) for value in Batch.of(batch).values if isinstance(value, Tensor) and value.dim()), 1)


def metrics_of_all(model: Any, step: Validated, gathered: Mapping[str, Sequence[Tensor]]) -> dict[str, Any]:
    """What an epoch of step logs of metrics of torchmetrics, by what `metrics_of` has returned for each batch.

    The model has these metrics, and no values of its parameters.
    """
    batches = [dict(zip(gathered, row, strict=True)) for row in zip(*gathered.values(), strict=True)]
    places = {entry.value.call for entry in step.logged if isinstance(entry.value, OfBatch)}
    metrics, values = replayed(model, step.calls, batches, places)
    results: dict[str, Any] = {}
    for entry in step.logged:
        if isinstance(entry.value, StandIn):
            results |= _named(entry.name, metrics[entry.value.path].compute())
        elif isinstance(entry.value, OfBatch):
            sizes = [float(batch[SIZE]) for batch in batches]
            rows = [_named(entry.name, value) for value in values[entry.value.call]]
            means = {n: sum(s * float(row[n]) for s, row in zip(sizes, rows, strict=True)) for n in rows[0]}
            results |= {name: total / sum(sizes) for name, total in means.items()}
    logged: list[Logged] = []
    with _logging(model, logged.append), in_place(model, metrics):
        model.on_validation_epoch_end()
    for entry in logged:
        results |= _named(entry.name, entry.value.compute() if hasattr(entry.value, "compute") else entry.value)
    return results


def names_of_all(model: Any, step: Validated) -> tuple[str, ...]:
    """The names of what `metrics_of_all` returns; none if they are not known: `on_validation_epoch_end` may log more.

    Metrics see a batch of ones.
    """
    tensors = {name: t for place, call in enumerate(step.calls) for name, t in call.tensors(place).items()}
    ones = {name: torch.ones(t.shape, dtype=t.dtype) for name, t in tensors.items()}
    if not ones or user_lines.is_own(model.on_validation_epoch_end.__code__.co_filename):
        return ()
    gathered = {name: [value] for name, value in ones.items()} | {SIZE: [torch.ones(1)]}
    try:
        with warnings.catch_warnings(), random_state_kept():
            warnings.simplefilter("ignore")
            return tuple(metrics_of_all(model, step, gathered))
    except Exception:  # a metric for which ones are no values
        return ()


def _named(name: str, value: Any) -> dict[str, Any]:
    """A metric's value by the name it is logged by; a collection has its own names."""
    return {name: value} if name else dict(value)


def _not_kept(entry: Logged) -> str | None:
    """Why a line of `metrics.jsonl` cannot have this."""
    if isinstance(entry.value, (StandIn, OfBatch)):
        return "a metric of torchmetrics adds up over an epoch's batches"
    if not isinstance(entry.value, Tensor):
        return "a Python number would be a constant of the build"
    if entry.name in TAKEN:
        return "a run has a number of its own by that name"
    if entry.on_step is False and not entry.averaged:
        return "metrics.jsonl has each step's value, and none that reduce_fx makes of an epoch's"
    return None


def _quoted(names: Sequence[str]) -> str:
    return listed([repr(name) for name in dict.fromkeys(names)])


def _step(step: Any, batch: Any) -> Any:
    """Of a step that wants the number of its batch, all batches are the first: a build is one graph."""
    return step(batch, 0) if len(inspect.signature(step).parameters) > 1 else step(batch)


@contextmanager
def _logging(model: nn.Module, log: Callable[[Logged], None]) -> Iterator[None]:
    """`self.log` calls `log` in here."""

    def one(
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        *_: Any,
        **__: Any,
    ) -> None:
        log(Logged(name, value, on_step, reduce_fx))

    def several(values: Any, *others: Any, **options: Any) -> None:
        if isinstance(values, (StandIn, OfBatch)) or hasattr(values, "compute"):
            one("", values, *others, **options)
            return
        for name, value in values.items():
            one(name, value, *others, **options)

    model.__dict__.update(log=one, log_dict=several)
    try:
        yield
    finally:
        del model.__dict__["log"], model.__dict__["log_dict"]

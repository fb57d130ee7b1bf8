"""The steps of a LightningModule as functions of model and batch, with what they log."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.adapters.said_once import warn_once
from fxpipe.errors import TaskError, listed
from fxpipe.tracing.step_metrics import TAKEN


@dataclass(frozen=True)
class Logged:
    """One call of `self.log`, or one value of `self.log_dict`."""

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

    What is the loss itself is not repeated: every line of `metrics.jsonl` has it.
    """
    found: list[Logged] = []
    with _logging(model, found.append):
        made = _step(model.training_step, batch)
    loss: Tensor = made["loss"] if isinstance(made, dict) else made
    heard = [each for each in found if each.value is not loss]
    reasons: dict[str, list[str]] = {}
    metrics: dict[str, Tensor] = {}
    for each in heard:
        if (reason := _not_kept(each)) is None:
            metrics[each.name] = each.value.detach().reshape(())
        else:
            reasons.setdefault(reason, []).append(each.name)
    for reason, names in reasons.items():
        warn_once(f"{type(model).__name__}.training_step logs {_quoted(names)}: {reason}, so it is not kept")
    return (loss, metrics) if metrics else loss


def metrics_of(model: nn.Module, batch: Any) -> dict[str, Any]:
    """What `validation_step` logs."""
    found: list[Logged] = []
    with _logging(model, found.append):
        _step(model.validation_step, batch)
    if not found:
        raise TaskError("validation_step() has logged nothing", hint='self.log("val_loss", loss)')
    if others := [each.name for each in found if not each.averaged]:
        warn_once(
            f"{type(model).__name__}.validation_step logs {_quoted(others)} with a reduce_fx of its own: here the mean "
            "over batches is taken"
        )
    return {each.name: each.value for each in found}


def _not_kept(each: Logged) -> str | None:
    """Why a line of `metrics.jsonl` cannot have this."""
    if not isinstance(each.value, Tensor):
        return "a Python number would be a constant of the build"
    if each.name in TAKEN:
        return "a run has a number of its own by that name"
    if each.on_step is False and not each.averaged:
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
        if isinstance(value, nn.Module):
            raise TaskError(
                f"self.log({name!r}, ...) was given a {type(value).__name__}, which adds up over batches in Python",
                hint="log this batch's value, of torchmetrics.functional for one; the mean over batches is taken",
            )
        log(Logged(name, value, on_step, reduce_fx))

    def several(values: Any, *others: Any, **options: Any) -> None:
        for name, value in values.items():
            one(name, value, *others, **options)

    model.__dict__.update(log=one, log_dict=several)
    try:
        yield
    finally:
        del model.__dict__["log"], model.__dict__["log_dict"]

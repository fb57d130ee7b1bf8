"""Refuses user code that freezes or thaws parameters during a run: it would silently have no effect."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from fxpipe.errors import listed
from fxpipe.plan.plan import Plan
from fxpipe.runtime.worker.executor import Executor
from fxpipe.task.callbacks import CALLBACKS
from fxpipe.task.model_file import Task
from fxpipe.task.what_trains import freezes_or_thaws
from fxpipe.torch_private import DisableTorchFunction
from fxpipe.tracing.reach import Walk

HOOKS = ("model", "optimizer", "configure_optimizers", "reset", *CALLBACKS)


class WhatTrains:
    """The parameters that the user's code can reach, and which of them required gradients when this was made.

    These are the live parameters, and those of each model with the plan's names and shapes: the one that was compiled,
    its view, and models that the hooks reach.
    """

    def __init__(self, plan: Plan, task: Task, executors: Sequence[Executor]) -> None:
        live = {name: p for executor in executors for name, p in executor.store.trained.items()}
        self._live, self._models = _rows(live), [_rows(*found) for found in _models(plan, task)]
        self._where = task.file

    def check(self, who: str) -> None:
        """Refuse changes since then; `who` is the code that has run. It costs a look at each parameter.

        A model in which nothing requires gradients any more is a copy for evaluation, and allowed.

        Raises:
            TaskError: it names the parameters.
        """
        with DisableTorchFunction():  # of parameters that are guarded: reading one takes microseconds
            for rows in (self._live, *self._models):
                changed = [name for name, ref, before in rows if (p := ref()) is not None and p.requires_grad != before]
                if changed and (rows is self._live or any(p.requires_grad for p in _there(rows))):
                    raise freezes_or_thaws(who, listed(changed, 6), self._where)


Row = tuple[str, "weakref.ref[nn.Parameter]", bool]


def _there(rows: Sequence[Row]) -> list[nn.Parameter]:
    return [parameter for _, ref, _ in rows if (parameter := ref()) is not None]


def _rows(parameters: Mapping[str, nn.Parameter], before: Mapping[str, bool] | None = None) -> list[Row]:
    return [
        (name, weakref.ref(p), p.requires_grad if before is None else before[name]) for name, p in parameters.items()
    ]


def _models(plan: Plan, task: Task) -> Iterator[tuple[Mapping[str, nn.Parameter], Mapping[str, bool] | None]]:
    """The parameters of each model, and which required gradients when it was compiled, if it was."""
    roots = [hook for name in HOOKS if (hook := getattr(task.hooks, name)) is not None]
    reached = Walk(nn.Module(), roots).seen.values()
    compiled = None if task.compiled is None else task.compiled.kept()
    for model in {id(m): m for m in (compiled, task.view, *reached) if isinstance(m, nn.Module)}.values():
        named = dict(model.named_parameters())
        if all(p.name in named and named[p.name].shape == p.tensor.shape for p in plan.parameters):
            yield named, task.compiled.trained if task.compiled is not None and model is compiled else None

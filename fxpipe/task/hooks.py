"""The user's hooks as one value: functions of a model file by their names, or what the Python interface is given.

def model(): ...           # a model file has model, loss and train_data, and as many of the others as it needs
def loss(model, batch): ...
def train_data(): ...

build.local(optimizer=make_optimizer, reset=begin_anew, schedule="async")  # hooks and options, by their names
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from fxpipe.task.callbacks import CALLBACKS, OnEpoch, OnEval, OnStep
from fxpipe.task.loss_weights import LossWeight
from fxpipe.task.padding import Pad

Loss = Callable[[nn.Module, Any], "torch.Tensor | tuple[torch.Tensor, Mapping[str, Any]]"]
Metrics = Callable[[nn.Module, Any], Mapping[str, Any]]
MetricsOfAll = Callable[[dict[str, list[torch.Tensor]]], Mapping[str, Any]]
MakeOptimizer = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer | Sequence[torch.optim.Optimizer]]
OptimizerHook = Callable[..., torch.optim.Optimizer | Sequence[torch.optim.Optimizer]]
"""A `MakeOptimizer`, or one that is called with the model as well (`fxpipe.task.model_view`)."""
MakeScheduler = Callable[[torch.optim.Optimizer], Any]


@dataclass(frozen=True, kw_only=True)
class Hooks:
    """What the user defines; None of what is not there.

    Attributes:
        model: `model()` makes the model. A build in memory, and one whose parameters have values, trains without it,
            unless the optimizer or `reset` asks for a model and the build was loaded.
        loss: `loss(model, batch)`: a scalar tensor; or that and metrics by name. With `model`, worker 0 makes stages
            for batches of new shapes during a run (`new_shapes`).
        train_data: `train_data()`: an iterable of an epoch's batches; called on worker 0 alone. The first batch is the
            example for capture.
        optimizer: `optimizer(named_parameters)`, called once for each worker, with its own parameters; by default
            SGD(lr=0.01, momentum=0.9). `optimizer(named_parameters, model)` gets a view of the model, too
            (`fxpipe.task.model_view`).
        configure_optimizers: `configure_optimizers(model)`, in place of `optimizer`.
        lr_scheduler: `lr_scheduler(optimizer)`: a scheduler that makes a step after every update; `(scheduler,
            "epoch")` one after every `steps_per_epoch`, a ReduceLROnPlateau as `(scheduler, METRIC)` one after every
            evaluation.
        averaged: `averaged(optimizer, named_parameters)`: the averaged weights that the optimizer keeps, by name.
        eval_data: `eval_data()`: an iterable of the batches that metrics are computed on, the same at every call;
            called on worker 0 alone.
        metrics: `metrics(model, batch)`: numbers and tensors of one element, by name; a build has those it was compiled
            with.
        metrics_of_all: `metrics_of_all(gathered)`: numbers by name, of the tensors with dimensions that `metrics` has
            returned for all batches of an evaluation: a list by name, in the order of the batches, on the CPU.
        loss_weight: `loss_weight(batch)`: how much a microbatch or a batch of `eval_data` counts, 0 or more; a build
            that was compiled with it needs it.
        reset: `reset(model)` sets the buffers that begin anew with an epoch and an evaluation
            (`fxpipe.task.reset_buffers`).
        on_step, on_eval, on_epoch: called in every process while it trains, with the same numbers, and the run; see
            `fxpipe.task.callbacks`.
        microbatch_dims: `(0, None)`: along which dimension each leaf of a batch is cut, in the structure of the batch.
        pad, pad_to: `{"ids": 0}` and 64: what is appended to which leaves of a batch, to multiples of what.
        constant_batch: `["grid"]`: the tensors of a batch whose values the step reads.
        compile_options, run_options: `{"microbatches": 4}`, `{"epochs": 3}`: options of `fxpipe compile` and `fxpipe
            run`, by their names in Python, where the command line does not give them. A build keeps those of its runs.
    """

    model: Callable[[], nn.Module] | None = None
    loss: Loss | None = None
    train_data: Callable[[], Iterable[Any]] | None = None
    optimizer: OptimizerHook | None = None
    configure_optimizers: OptimizerHook | None = None
    lr_scheduler: MakeScheduler | None = None
    averaged: Callable[[torch.optim.Optimizer, Any], Any] | None = None
    eval_data: Callable[[], Iterable[Any]] | None = None
    metrics: Metrics | None = None
    metrics_of_all: MetricsOfAll | None = None
    loss_weight: LossWeight | None = None
    reset: Callable[[nn.Module], Any] | None = None
    on_step: OnStep | None = None
    on_eval: OnEval | None = None
    on_epoch: OnEpoch | None = None
    microbatch_dims: Any = None
    pad: Pad | None = None
    pad_to: int | None = None
    constant_batch: Any = ()
    compile_options: Mapping[str, Any] = field(default_factory=dict)
    run_options: Mapping[str, Any] = field(default_factory=dict)


NO_HOOKS = Hooks()
OF_LOOPS = ("model", "loss", "optimizer", "lr_scheduler", "averaged", "loss_weight", "reset", "metrics_of_all")
"""Those that the user's own loop takes."""
OF_RUNS = (*OF_LOOPS, "eval_data", *CALLBACKS)
"""Those that a run takes beside its data."""


def taken_apart(hooks: Hooks, names: Sequence[str], changes: Mapping[str, Any]) -> tuple[Hooks, dict[str, Any]]:
    """The hooks with those of the changes that have such names, and the other changes, which are options."""
    found = {name: changes[name] for name in names if name in changes}
    return replace(hooks, **found), {name: value for name, value in changes.items() if name not in found}

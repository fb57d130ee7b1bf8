"""The user's hooks as one value: functions of a model file by name, or arguments of the Python interface.

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

from fxpipe.errors import TaskError
from fxpipe.task.callbacks import ARGUMENTS, CALLBACKS, OnEpoch, OnEval, OnStep
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
    """What a model file defines, by name: `model`, `loss` and `train_data` are required, all others optional.

    `fxpipe.compile`, `build.local`, `build.join` and `fxpipe.join` take the same as keyword arguments. A hook that is
    not defined is None.

    Attributes:
        model: `model()` returns the `nn.Module`. A run calls it only if it needs it: to give values to parameters of
            a build without any, for the view of the model that `optimizer` or `reset` takes, and for `new_shapes`.
        loss: `loss(model, batch)` returns a scalar tensor, or `(tensor, {"accuracy": ...})` with metrics of training.
        train_data: `train_data()` returns an iterable of the batches of one epoch. Its first batch is the example
            that is captured. A run calls it on worker 0 only, for each epoch; it may also be called to count batches,
            so keep no counter of epochs in it.
        optimizer: `optimizer(named_parameters)` returns an optimizer, or a list of them. It is called once on every
            worker that owns parameters, with that worker's `(name, parameter)` pairs, and may leave some out: these
            are not trained. Default: `SGD(lr=0.01, momentum=0.9)`. `optimizer(named_parameters, model)` also gets a
            view of the whole model.
        configure_optimizers: `configure_optimizers(model)` returns the same; define it in place of `optimizer`.
        lr_scheduler: `lr_scheduler(optimizer)` returns a scheduler, which is stepped after every update.
            `(scheduler, "epoch")` is stepped after every epoch, `(ReduceLROnPlateau(...), METRIC)` after every
            evaluation.
        averaged: `averaged(optimizer, named_parameters)` returns the averaged weights that the optimizer keeps, by
            name.
        eval_data: `eval_data()` returns an iterable of the batches that are evaluated, the same at every call. A run
            calls it on worker 0 only. It needs `metrics`.
        metrics: `metrics(model, batch)` returns tensors of one element and numbers, by name. An evaluation averages
            each over `eval_data()`, weighted by samples or by `loss_weight`. Tensors with dimensions go to
            `metrics_of_all`.
        metrics_of_all: `metrics_of_all(gathered)` returns numbers by name. `gathered` has, by name, the tensors with
            dimensions that `metrics` returned: a list with one tensor per batch, in the order of `eval_data()`, on
            the CPU. Worker 0 calls it after each evaluation.
        loss_weight: `loss_weight(batch)` returns a number, 0 or more: how much a microbatch counts in the loss of its
            minibatch, if the graph does not show it, and how much a batch counts in an evaluation. A build that was
            compiled with it needs it.
        reset: `reset(model)` sets the buffers that start afresh with an epoch and with an evaluation, in place or by
            assignment. Their shapes and dtypes stay, and nothing else may change.
        on_step: `on_step(step, loss, run)` is called in every process after every step. If it returns something true,
            the run ends. `run` has `rank`, `metrics` (those that came with the loss), `save()` and `set_lr(rate)`.
        on_eval: `on_eval(step, metrics, run)`: the same, after every evaluation.
        on_epoch: `on_epoch(epoch, run)`: the same, after every epoch and its evaluation, counted from 1.
        microbatch_dims: along which dimension each leaf of a batch is cut into microbatches, in the structure of the
            batch: `(0, None)`. With None, every microbatch gets the whole leaf.
        pad: the value that fills up each leaf of a batch, by the leaf's name: `{"ids": 0}`. `{"ids": (0, 1)}` names
            the dimension, too. Or a function that returns this for the first batch.
        pad_to: lengths are padded to multiples of this number.
        constant_batch: names of the small tensors of a batch whose values the step reads: `["grid"]`, `["batch[2]"]`.
        compile_options: options of `fxpipe compile` and `fxpipe plan`, by their Python names: `{"microbatches": 4}`.
            The command line and fxpipe.toml override them.
        run_options: options of `fxpipe run`: `{"epochs": 3, "clip_norm": 1.0}`. The command line and fxpipe.toml
            override them. The build keeps them, so compile again to change them.
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

    @property
    def of_run(self) -> dict[str, Callable[..., Any]]:
        """The functions that a run calls between steps, and those of steps, by name."""
        return {name: hook for name in ("loss", "metrics", *BETWEEN_STEPS) if (hook := getattr(self, name)) is not None}


OF_OPTIMIZERS = ("optimizer", "configure_optimizers", "lr_scheduler")
BETWEEN_STEPS = (
    "train_data",
    *OF_OPTIMIZERS,
    "averaged",
    "eval_data",
    "metrics_of_all",
    "loss_weight",
    *CALLBACKS,
)
NO_HOOKS = Hooks()
OF_LOOPS = ("model", "loss", "optimizer", "lr_scheduler", "averaged", "loss_weight", "reset", "metrics_of_all")
"""The hooks of the user's own loop."""
OF_RUNS = (*OF_LOOPS, "eval_data", *CALLBACKS)
"""The hooks of a run, in addition to its data."""


def split_hooks(hooks: Hooks, names: Sequence[str], changes: Mapping[str, Any]) -> tuple[Hooks, dict[str, Any]]:
    """The hooks with the changes that have one of these names, and the other changes, which are options."""
    if not isinstance(hooks, Hooks):
        raise TaskError(f"hooks is {type(hooks).__name__}, not Hooks", hint="give optimizer= and so on")
    new_hooks = {name: changes[name] for name in names if name in changes}
    hooks = replace(hooks, **new_hooks)
    for name in ("loss", "train_data", "eval_data", "metrics", *OF_LOOPS):
        value = getattr(hooks, name)
        if not (value is None or callable(value)) or (name == "model" and isinstance(value, nn.Module)):
            raise TaskError(f"{name} is {type(value).__name__}, not a function", hint=f"def {name}{ARGUMENTS[name]}")
    return hooks, {name: value for name, value in changes.items() if name not in new_hooks}


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

"""A LightningModule and its data, as the hooks of a model file.

    settings = {"max_epochs": 10, "gradient_clip_val": 1.0, "callbacks": [EarlyStopping("val_loss")]}  # of Trainer
    globals().update(lightning_hooks(lambda: Classifier(width=64), data=lambda: Digits("data/"), **settings))

The weights that a run writes have the module's own names: `load_state_dict(load_file("out/model.safetensors"))`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.adapters import is_first_process
from fxpipe.adapters.epochs import Epochs, epochs
from fxpipe.adapters.lightning_steps import Validated, loss_of, metrics_of, metrics_of_all, names_of_all, validated
from fxpipe.adapters.lightning_trainer import TrainerSettings
from fxpipe.adapters.torchmetrics import metrics_in
from fxpipe.errors import TaskError
from fxpipe.messages import warn
from fxpipe.task.first_batches import at_most
from fxpipe.task.meta import on_meta
from fxpipe.task.what_trains import freezes_or_thaws, freezing_methods
from fxpipe.torch_private import PARAMETERS, FakeTensorMode

NEVER_CALLED = (
    "on_fit_start",
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_train_batch_end",
    "on_train_epoch_end",
    "on_validation_epoch_start",
    "on_validation_epoch_end",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "backward",
    "optimizer_step",
    "optimizer_zero_grad",
    "configure_gradient_clipping",
    "lr_scheduler_step",
    "on_before_batch_transfer",
    "transfer_batch_to_device",
    "on_after_batch_transfer",
)
"""Methods of a LightningModule that a pipeline has no place for: to define one is worth a warning."""


def lightning_hooks(
    module: Callable[[], Any],
    data: Callable[[], Any] | None = None,
    train_dataloaders: Any = None,
    val_dataloaders: Any = None,
    **settings: Any,
) -> dict[str, Any]:
    """The hooks that train and evaluate a LightningModule as `Trainer(**settings).fit` would.

    `training_step` is the loss, and what it logs are metrics of training, step by step; what `validation_step` logs are
    the metrics of evaluations. `configure_optimizers` is asked on every worker; others' parameters have no value there.
    The training data are those of `Trainer.fit`: the loader is asked for once, and its samplers hear of each epoch.

    Args:
        module: makes the LightningModule.
        data: makes a LightningDataModule; by default the module has `train_dataloader()` itself.
        train_dataloaders, val_dataloaders: what `Trainer.fit` takes, or functions that make it, instead of `data`.
        settings: the keywords of the Trainer. What belongs to a compile or a run is an option of it, where the command
            line does not say otherwise: its length, clipping, precision, seed (of `seed_everything`), evaluations,
            EarlyStopping and ModelCheckpoint. What is not followed is named.

    Raises:
        TaskError: a Trainer takes no such keyword; or a pipeline does not do what one asks for; or there are no data.
    """
    loaders = {"train_dataloader": train_dataloaders, "val_dataloader": val_dataloaders}
    loaders = {name: loader for name, loader in loaders.items() if loader is not None}
    _check_data(data, loaders)
    view = on_meta(module).model
    if (base := _base(view)) is None:
        raise TaskError(f"{type(view).__name__} is no LightningModule")
    trainer = TrainerSettings.of(settings, base)
    if data is None and "train_dataloader" not in loaders and not _overrides(view, "train_dataloader"):
        raise TaskError(f"{type(view).__name__} has no train_dataloader()", hint="data= or train_dataloaders=")
    reload_every = trainer["reload_dataloaders_every_n_epochs"]

    @functools.cache
    def source() -> Any:
        provider: Any = module() if data is None else data()
        for name, loader in loaders.items():
            setattr(provider, name, loader if callable(loader) else lambda loader=loader: loader)
        provider.prepare_data()
        provider.setup("fit")
        return provider

    def make() -> nn.Module:
        instance: nn.Module = module()
        instance.configure_model()  # type: ignore[operator]
        if not instance.automatic_optimization:
            raise TaskError(
                f"{type(instance).__name__} optimizes by hand (automatic_optimization = False)",
                hint="a pipeline steps the optimizer itself: let training_step() return the loss",
            )
        return instance

    @functools.lru_cache(maxsize=1)
    def loader_at(time: int) -> Any:
        batches = source().train_dataloader()
        if time:  # Lightning makes an iterator when it is given a loader, and, but for the first epoch, another one
            iter(batches)
        return batches

    def loader(epoch: int) -> Any:
        batches = loader_at(epoch // reload_every if reload_every else 0)
        owners = (batches, getattr(batches, "batch_sampler", None))
        samplers: list[Any] = [getattr(owner, "sampler", None) for owner in owners]
        for sampler in samplers:
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
        return batches

    @functools.cache
    def train_data() -> Epochs:
        return epochs(loader, exhausts=False, most=trainer["limit_train_batches"], joined=trainer.joined, shares=True)

    def eval_data() -> Iterable[Any]:
        batches = source().val_dataloader()
        if isinstance(batches, (list, tuple)):
            if len(batches) != 1:
                what = f"val_dataloader() returned {len(batches)} loaders, and a model file has one"
                raise TaskError(what, hint="return one of them")
            [batches] = batches
        if (most := trainer["limit_val_batches"]) is None:
            return batches
        return islice(batches, at_most(len(batches) if isinstance(most, float) else most, most))

    @functools.cache
    def a_step() -> Validated:
        """What `validation_step` does with the first batch, of which nothing is computed."""
        meta_model, batch = on_meta(module).model.eval(), next(iter(eval_data()))
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            for part in meta_model.modules():
                part.__dict__[PARAMETERS].update(
                    {n: torch.empty_like(p, device="cpu") for n, p in part.named_parameters(recurse=False)}
                )
            return validated(meta_model, batch)

    def measured(model: Any, batch: Any) -> dict[str, Any]:
        return metrics_of(model, batch)

    measured.names_of_all = lambda: names_of_all(view, a_step())  # type: ignore[attr-defined]

    def of_all(gathered: dict[str, list[Tensor]]) -> dict[str, Any]:
        return metrics_of_all(view, a_step(), gathered)

    def optimizer(named_parameters: list[tuple[str, nn.Parameter]], model: Any) -> torch.optim.Optimizer:
        model._trainer = FitFacts(train_data, trainer)
        torch_optimizer, scheduler = _configured(model.configure_optimizers())
        counted = torch_optimizer.__dict__.pop("step", None)  # the scheduler's own, whose signature cannot be read
        torch_optimizer.lightning_scheduler = scheduler, counted  # type: ignore[attr-defined]
        return torch_optimizer

    def lr_scheduler(optimizer: Any) -> Any:
        scheduler, counted = optimizer.lightning_scheduler
        if counted is not None:
            optimizer.step = counted
        return scheduler

    hooks: dict[str, Callable[..., Any]] = {"model": make, "loss": loss_of, "train_data": train_data}
    hooks |= {"optimizer": optimizer, "lr_scheduler": lr_scheduler}
    validates = _validates(view, data, "val_dataloader" in loaders) and trainer["limit_val_batches"] not in (0, 0.0)
    if is_first_process():
        for line in trainer.not_followed():
            warn(line)
    if validates:
        hooks |= {"eval_data": eval_data, "metrics": measured}
        hooks |= {"metrics_of_all": of_all} if metrics_in(view) else {}
    options = trainer.run_options(validates, lambda: train_data().batches)
    return {**hooks, "compile_options": trainer.compile_options(), "run_options": options}


class FitFacts:
    """What `configure_optimizers` may ask of `self.trainer`."""

    def __init__(self, data: Callable[[], Any], trainer: TrainerSettings) -> None:
        self._data, self.max_epochs, self.max_steps = data, trainer["max_epochs"], trainer["max_steps"]
        self.accumulate_grad_batches = trainer.joined
        self.current_epoch = self.global_step = 0
        self.num_nodes = self.num_devices = self.world_size = 1

    @property
    def num_training_batches(self) -> int:
        """The batches of an epoch; those of an update count one by one."""
        return int(self._data().batches)

    @property
    def estimated_stepping_batches(self) -> int:
        """The steps of the whole training."""
        if self.max_epochs in (None, -1):
            if self.max_steps > 0:
                return int(self.max_steps)
            raise TaskError(
                "configure_optimizers() asks for estimated_stepping_batches, and no length of a run is given",
                hint="lightning_hooks(..., max_epochs=...) or max_steps=...",
            )
        whole = int(self.max_epochs) * len(self._data())
        return min(whole, self.max_steps) if self.max_steps > 0 else whole


def _configured(form: Any) -> tuple[torch.optim.Optimizer, Any]:
    """The optimizer, and what `lr_scheduler()` returns, of the forms that `configure_optimizers` may return."""
    schedulers: Any = []
    monitor = None
    if isinstance(form, tuple) and len(form) == 2 and isinstance(form[0], (list, tuple)):
        form, schedulers = form
    if isinstance(form, (list, tuple)) and len(form) == 1:
        [form] = form
    if isinstance(form, dict):
        schedulers = [form["lr_scheduler"]] if form.get("lr_scheduler") is not None else []
        monitor = form.get("monitor")
        form = form["optimizer"]
    if not isinstance(form, torch.optim.Optimizer) or len(schedulers) > 1:
        raise TaskError(
            f"configure_optimizers() returned {_kinds(form)} and {len(schedulers)} schedulers",
            hint="return one optimizer, and one scheduler or none",
        )
    if not schedulers:
        return form, None
    [scheduler] = schedulers
    if not isinstance(scheduler, dict):
        scheduler = {"scheduler": scheduler}
    if scheduler.get("frequency", 1) != 1:
        raise TaskError("a scheduler's frequency is not followed", hint="leave it 1, and make the schedule slower")
    if isinstance(scheduler["scheduler"], torch.optim.lr_scheduler.ReduceLROnPlateau):
        return form, (scheduler["scheduler"], _monitored(scheduler.get("monitor", monitor), scheduler.get("interval")))
    if scheduler.get("reduce_on_plateau"):
        raise TaskError(
            f"reduce_on_plateau is True, and {type(scheduler['scheduler']).__name__} is no ReduceLROnPlateau",
            hint="leave it out, or return torch's ReduceLROnPlateau",
        )
    return form, (scheduler["scheduler"], scheduler.get("interval", "epoch"))


def _monitored(monitor: Any, interval: Any) -> str:
    """The metric that a ReduceLROnPlateau waits for: it makes a step after every evaluation."""
    if not isinstance(monitor, str):
        raise TaskError("ReduceLROnPlateau waits for a metric, and none is named", hint='"monitor": "val_loss"')
    if interval not in (None, "epoch"):
        raise TaskError(
            f"ReduceLROnPlateau with interval={interval!r} makes its steps between evaluations",
            hint="leave it 'epoch': fxpipe run --eval-every says how often",
        )
    return monitor


def _kinds(form: Any) -> str:
    return ", ".join(type(part).__name__ for part in form) if isinstance(form, (list, tuple)) else type(form).__name__


def _check_data(data: Any, loaders: Mapping[str, Any]) -> None:
    if data is not None and loaders:
        raise TaskError(f"lightning_hooks() is given data and {', '.join(loaders)}s", hint="give one of the two")
    if data is not None and not callable(data):
        raise TaskError(
            f"data is a {type(data).__name__}, not a function that makes a LightningDataModule",
            hint="data=lambda: ...; for loaders, train_dataloaders=..., val_dataloaders=...",
        )


def _validates(model: Any, data: Callable[[], Any] | None, has_loader: bool) -> bool:
    """Whether there are data to validate on and a step for them; warns of what is never called."""
    source = model if data is None else data()
    unheard = NEVER_CALLED if data is None else ("setup", *NEVER_CALLED)
    called = ("on_validation_epoch_end",) if metrics_in(model) else ()  # with the metrics of all batches
    defined = [name for name in unheard if name not in called and _overrides(model, name)]
    if names := freezing_methods(type(model), defined):
        raise freezes_or_thaws(f"{type(model).__name__}.{names[0]}", "parameters")
    if defined and is_first_process():
        warn(f"{type(model).__name__}.{', '.join(defined)}: a pipeline does not call it")
    return _overrides(model, "validation_step") and (has_loader or _overrides(source, "val_dataloader"))


def _overrides(owner: Any, name: str) -> bool:
    return getattr(type(owner), name, None) is not getattr(_base(owner), name, None)


def _base(owner: Any) -> type | None:
    """Lightning's own class: that of the package lightning, or of pytorch_lightning."""
    kinds = [kind for kind in type(owner).__mro__ if kind.__name__ in ("LightningModule", "LightningDataModule")]
    return kinds[0] if kinds else None

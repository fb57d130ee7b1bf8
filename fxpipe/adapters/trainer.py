"""transformers' Trainer: the order in which it gives its samples, and what its arguments ask for beyond hooks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler

from fxpipe.errors import TaskError
from fxpipe.task.first_batches import joined_sizes

OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop", "adafactor")
"""Those that look at each parameter alone and ask nothing of the model; `fxpipe compile` tries them all the same."""

REFUSED = {
    "fp16_full_eval": "evaluations compute in the weights' own type",
    "bf16_full_eval": "evaluations compute in the weights' own type",
    "deepspeed": "fxpipe divides the model itself: take it out",
    "fsdp": "fxpipe divides the model itself: take it out",
    "parallelism_config": "fxpipe divides the model itself: take it out",
    "use_liger_kernel": "change the model in its factory",
    "neftune_noise_alpha": "add the noise in the model",
    "label_smoothing_factor": "compute the smoothed loss in the model",
    "auto_find_batch_size": "give per_device_train_batch_size",
    "activation_offloading": "fxpipe inspect shows what each worker keeps; more workers keep less",
    "sync_ref_model": "the reference of a pipeline does not change: begin another run with the trained model",
    "resume_from_checkpoint": "fxpipe run --resume goes on from its own checkpoints",
    "push_to_hub": "push what save_pretrained() has written",
    "optim_target_modules": "choose the parameters by requires_grad, in the model's factory",
}
"""What would train otherwise, or is waited for in vain: anything but false or empty is an error."""

UNHEARD = {
    "torch_compile": "fxpipe compile --backend inductor",
    "logging_steps": "every step is a line of OUT/metrics.jsonl",
    "report_to": "fxpipe run --log tensorboard, wandb or mlflow",
    "eval_delay": "evaluations begin with the first interval",
    "eval_on_start": "evaluations begin with the first interval",
    "full_determinism": "a run gives the same bits again anyway",
    "dataloader_persistent_workers": "its processes are started for each epoch",
    "save_only_model": "a checkpoint is the whole run",
    "torch_empty_cache_steps": "no cache is emptied",
    "eval_accumulation_steps": "evaluations keep nothing but their sums",
    "batch_eval_metrics": "metrics are those of each batch, and their mean",
    "include_for_metrics": "metrics are those of each batch, and their mean",
    "include_num_input_tokens_seen": "tokens are not counted",
}
"""What changes no weights and is not done: anything but the default is a warning."""


def in_order(dataset: Any, args: Any, options: Mapping[str, Any]) -> Callable[[int], DataLoader[Any]]:
    """A function that gives the loader of an epoch: always the same one, set to that epoch.

    A batch has the samples of one update. Epoch `e` is shuffled by `data_seed + e`, or `seed + e` where there is no
    `data_seed`: Trainer's order, whatever `fxpipe run --seed` says. Under `group_by_length`, and with
    `accelerator_config={"use_seedable_sampler": False}`, Trainer draws the order from torch's global generator, as
    dropout does, so there only the way of drawing it is the same. A streamed dataset has its own order, and learns of
    epochs by its `set_epoch`. `options` go to the `DataLoader`.
    """
    batches: Any = None
    if isinstance(dataset, IterableDataset):  # Trainer's `dataloader_drop_last` does not reach them
        loader = DataLoader(dataset, args.per_device_train_batch_size * args.gradient_accumulation_steps, **options)
    else:
        batches = _batches(dataset, args)
        loader = DataLoader(dataset, batch_sampler=Updates(batches, args.gradient_accumulation_steps), **options)

    def of_epoch(epoch: int) -> DataLoader[Any]:
        counting: tuple[Any, ...] = (dataset, batches, getattr(batches, "sampler", None))
        for counts in counting:
            if hasattr(counts, "set_epoch"):
                counts.set_epoch(epoch)
        return loader

    return of_epoch


class Updates(Sampler[list[int]]):
    """The samples of each update: so many batches, joined; the last ones of an epoch may be fewer."""

    def __init__(self, batches: Any, accumulated: int) -> None:
        self._batches, self._accumulated = batches, accumulated

    def __len__(self) -> int:
        return -(-len(self._batches) // self._accumulated)

    def batch_sizes(self) -> tuple[int | None, int | None]:
        """See `fxpipe.task.first_batches.batch_sizes`."""
        plain = type(self._batches) is BatchSampler
        return joined_sizes(self._batches, self._accumulated) if plain else (None, None)

    def __iter__(self) -> Iterator[list[int]]:
        joined: list[int] = []
        for number, batch in enumerate(self._batches, 1):
            joined += batch
            if number % self._accumulated == 0:
                yield joined
                joined = []
        if joined:
            yield joined


def _batches(dataset: Any, args: Any) -> Any:
    """The batches that Trainer accumulates, by their samples' numbers."""
    from accelerate.data_loader import SeedableRandomSampler  # type: ignore[import-untyped]
    from transformers import Trainer

    asks = SimpleNamespace(args=args, train_dataset=dataset, processing_class=None)  # Trainer's own would start much
    sampler: Any = Trainer._get_train_sampler(asks)
    if args.train_sampling_strategy == "batch_rebalance":
        return sampler
    if isinstance(sampler, RandomSampler) and args.accelerator_config.use_seedable_sampler:
        seed = args.seed if args.data_seed is None else args.data_seed
        sampler = SeedableRandomSampler(dataset, data_seed=seed)
    return BatchSampler(sampler, args.per_device_train_batch_size, args.dataloader_drop_last)


def refuse(args: Any) -> None:
    """Check `TrainingArguments` for what a pipeline cannot do."""
    texts = [f"{name}={getattr(args, name)!r}: {cure}" for name, cure in REFUSED.items() if getattr(args, name, None)]
    if str(args.optim.value) not in OPTIMIZERS:
        texts.append(f"optim={args.optim.value!r}: take one of {', '.join(OPTIMIZERS)}, or write optimizer() yourself")
    if args.lr_scheduler_type.value == "greedy":
        texts.append(f"lr_scheduler_type={args.lr_scheduler_type.value!r}: a schedule must not wait for evaluations")
    if texts:
        raise TaskError(
            "TrainingArguments ask for what a pipeline does not do", hint="take it out:\n    " + "\n    ".join(texts)
        )


def best_metric(args: Any) -> str:
    """The metric of `metric_for_best_model`, as `metrics(model, batch)` calls it."""
    return str(args.metric_for_best_model or "loss").removeprefix("eval_")


def unheard(args: Any, callbacks: Sequence[Any]) -> Iterator[str]:
    """Each argument that is not the default and that nothing here follows, with what to do instead."""
    stops = _early_stopping(callbacks)
    for callback in callbacks:
        if stops is None or _kind(callback) is not type(stops):
            yield f"{_kind(callback).__name__} of Trainer is not called: a model file has on_step, on_eval and on_epoch"
    if stops is not None and stops.early_stopping_threshold:
        yield "early_stopping_threshold is --min-delta: more than that over the last improvement, not over the best"
    for field in dataclasses.fields(args):
        if field.name not in UNHEARD:
            continue
        default = field.default_factory() if callable(field.default_factory) else field.default
        value = getattr(args, field.name)
        if value != default and value not in ([], ["none"], "no"):
            yield f"{field.name}={value!r} of TrainingArguments is not followed: {UNHEARD[field.name]}"
    if args.train_sampling_strategy == "group_by_length" or not args.accelerator_config.use_seedable_sampler:
        yield "Trainer draws this order of samples from the same random numbers as dropout: here it is another one"


def compile_options(args: Any, pads: bool) -> dict[str, Any]:
    """The options of a compile by which it does what `TrainingArguments` say. If it `pads`, lengths differ from batch
    to batch, and padding makes few of them."""
    accumulated = args.gradient_accumulation_steps
    return {
        "seed": args.seed,
        "microbatches": accumulated if accumulated > 1 else None,
        "autocast": "bf16" if args.bf16 else "fp16" if args.fp16 else None,
        "device": "cuda" if args.device.type == "cuda" else None,
        "pad_to": 64 if pads else None,
    }


def run_options(args: Any, callbacks: Sequence[Any], evaluates: bool, updates: Callable[[], int]) -> dict[str, Any]:
    """The options of its runs, without `output_dir`: that has checkpoints of Trainer's own."""
    epochs = args.num_train_epochs
    whole = args.max_steps <= 0 and epochs == int(epochs)
    options = {
        "seed": args.seed,
        "epochs": int(epochs) if whole else None,
        "steps": None if whole else updates(),
        "clip_norm": args.max_grad_norm or None,
        "checkpoint_every": _every(args.save_strategy.value, args.save_steps, updates),
    }
    if options["checkpoint_every"] and args.save_total_limit:
        options["keep"] = args.save_total_limit
    if not evaluates:
        return options
    options["eval_every"] = _every(args.eval_strategy.value, args.eval_steps, updates)
    best = f"{'+' if args.greater_is_better else '-'}{best_metric(args)}"
    if args.load_best_model_at_end or args.save_strategy.value == "best":
        options["save_best"] = best
    if (stops := _early_stopping(callbacks)) is not None:
        options |= {"patience": stops.early_stopping_patience, "patience_metric": best}
        options["min_delta"] = stops.early_stopping_threshold or None
    return options


def _every(strategy: str, steps: float | None, updates: Callable[[], int]) -> str | None:
    """How often, as the options say it; fewer steps than 1 are a share of all."""
    if strategy == "steps" and steps:
        return str(int(steps) if steps >= 1 else math.ceil(steps * updates()))
    return "epoch" if strategy == "epoch" else None


def _early_stopping(callbacks: Sequence[Any]) -> Any:
    """The first EarlyStoppingCallback, which may be given as its class; None if there is none."""
    for callback in callbacks:
        if any(kind.__name__ == "EarlyStoppingCallback" for kind in _kind(callback).__mro__):
            return callback() if isinstance(callback, type) else callback
    return None


def _kind(callback: Any) -> type:
    return callback if isinstance(callback, type) else type(callback)

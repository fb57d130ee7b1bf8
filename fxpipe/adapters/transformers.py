"""What one gives to the Trainer of Hugging Face transformers, as the hooks of a model file.

globals().update(trainer_hooks(model=make, args=lambda: TrainingArguments(...), train_dataset=..., compute_metrics=...))

fxpipe compile model.py -n 2 -o build/ && fxpipe run build/
python -m fxpipe.adapters.transformers model.py out/model.safetensors trained/
"""

from __future__ import annotations

import functools
import inspect
import math
import os
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fxpipe.adapters import is_first_process
from fxpipe.adapters.epochs import Epochs, epochs
from fxpipe.adapters.trainer import best_metric, compile_options, in_order, refuse, run_options, unheard
from fxpipe.errors import FxpipeError, TaskError
from fxpipe.messages import say, warn
from fxpipe.settings import pairs
from fxpipe.task.meta import on_meta
from fxpipe.task.model_file import NONE, load_task
from fxpipe.task.what_trains import freezes_or_thaws, freezing_methods
from fxpipe.task.wrapped_tensors import load_weights

NOT_DECAYED = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
"""The names of parameters without weight decay, in addition to those of LayerNorm, as in `Trainer`."""

_SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
PROCESSES = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", *_SIZES)
"""By these accelerate knows one of several processes."""


def trainer_hooks(
    *,
    model: Callable[[], nn.Module],
    args: Any,
    train_dataset: Any,
    eval_dataset: Any = None,
    data_collator: Callable[[list[Any]], Any] | None = None,
    processing_class: Any = None,
    compute_metrics: Callable[[Any], Mapping[str, Any]] | None = None,
    preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
    callbacks: Sequence[Any] = (),
    metrics: Callable[[nn.Module, Any], Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """The hooks that train as `Trainer(model_init=model, args=args(), ...)` would.

    A minibatch is what Trainer makes one update of: `gradient_accumulation_steps` batches. The optimizer has Trainer's
    groups and rates, and each epoch Trainer's order of samples. What belongs to a compile or a run, such as epochs,
    clipping, evaluations and the best weights, is an option of it where the command line does not say otherwise.

    Args:
        model: makes a new model, as `model_init` does; a PeftModel is fine.
        args: makes TrainingArguments. Made in a file that workers load, they would take each for one of several
            processes that train together, and wait for the others.
        train_dataset, eval_dataset: as Trainer takes them, or functions that make them.
        data_collator, processing_class: as Trainer takes them. Where the collator pads batches to several lengths,
            `--pad-to` makes few of them: what is appended follows from the tokenizer, if that pads at the right.
        compute_metrics, preprocess_logits_for_metrics: as Trainer takes them: evaluations gather all predictions.
        callbacks: of Trainer's, EarlyStoppingCallback; others are named and not called.
        metrics: what a batch is evaluated to, by name, instead of its loss. Means over batches are taken of them.

    Raises:
        TaskError: the arguments ask for what a pipeline does not do.
    """
    from transformers import DataCollatorWithPadding, Trainer, default_data_collator, get_scheduler
    from transformers.trainer_pt_utils import get_parameter_names

    args = _arguments(args)
    for kind in (callback if isinstance(callback, type) else type(callback) for callback in callbacks):
        if names := freezing_methods(kind):
            raise freezes_or_thaws(f"{kind.__name__}.{names[0]}", "parameters")
    collator = data_collator or default_data_collator
    if data_collator is None and hasattr(processing_class, "pad"):
        collator = DataCollatorWithPadding(processing_class)

    @functools.cache
    def skeleton() -> nn.Module:
        """The model without values, for the names that it has."""
        return on_meta(model).model

    def make_model() -> nn.Module:
        instance = model()
        if args.gradient_checkpointing:
            instance.gradient_checkpointing_enable(args.gradient_checkpointing_kwargs)  # type: ignore[operator]
        return instance

    def collate(samples: list[Any]) -> Any:
        if args.remove_unused_columns and isinstance(samples[0], dict):
            columns = _columns(skeleton(), args)
            samples = [{key: value for key, value in sample.items() if key in columns} for sample in samples]
        return collator(samples)

    workers: dict[str, Any] = {"collate_fn": collate, "num_workers": args.dataloader_num_workers}
    if args.dataloader_num_workers:
        workers |= {
            name: getattr(args, f"dataloader_{name}")
            for name in ("prefetch_factor", "multiprocessing_context", "in_order")
        }

    @functools.cache
    def train_data() -> Epochs:
        return epochs(in_order(train_dataset() if callable(train_dataset) else train_dataset, args, workers))

    def optimizer(named_parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        decayed = set(get_parameter_names(skeleton(), [nn.LayerNorm], NOT_DECAYED))
        kind, options = Trainer.get_optimizer_cls_and_kwargs(args)
        groups = [
            {"params": [p for name, p in named_parameters if (name in decayed) is decays], "weight_decay": decay}
            for decays, decay in ((True, args.weight_decay), (False, 0.0))
        ]
        return kind([group for group in groups if group["params"]], **options)

    def lr_scheduler(optimizer: torch.optim.Optimizer) -> Any:
        steps = updates(args, train_data())
        scheduler = get_scheduler(
            args.lr_scheduler_type,
            optimizer,
            num_warmup_steps=args.get_warmup_steps(steps),
            num_training_steps=steps,
            scheduler_specific_kwargs=args.lr_scheduler_kwargs,
        )
        waits = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        return (scheduler, best_metric(args)) if waits else scheduler

    def eval_data() -> Iterable[Any]:
        dataset = eval_dataset() if callable(eval_dataset) else eval_dataset
        return DataLoader(dataset, args.per_device_eval_batch_size, drop_last=args.dataloader_drop_last, **workers)

    def measured(model: nn.Module, batch: Any) -> Mapping[str, Any]:
        with problem_type_kept(model):
            if compute_metrics is not None and metrics is None:
                return predictions_of(model, batch, args.label_names, preprocess_logits_for_metrics)
            return (metrics or loss_alone)(model, batch)

    def of_all(gathered: dict[str, list[Tensor]]) -> Mapping[str, Any]:
        assert compute_metrics is not None
        return computed(compute_metrics, gathered)

    hooks: dict[str, Any] = {"model": make_model, "loss": loss_of, "train_data": train_data}
    hooks |= {"optimizer": optimizer, "lr_scheduler": lr_scheduler}
    tokenizer: Any = getattr(collator, "tokenizer", processing_class)
    if getattr(tokenizer, "pad_token_id", None) is not None and tokenizer.padding_side == "right":
        hooks["pad"] = functools.partial(pad_values, tokenizer)
    if eval_dataset is not None:
        hooks |= {"eval_data": eval_data, "metrics": measured}
        hooks |= {"metrics_of_all": of_all} if compute_metrics is not None and metrics is None else {}
    if is_first_process():
        for remark in (*unheard(args, callbacks), *_remarks(args, collator, "pad" in hooks, skeleton())):
            warn(remark)
    options = run_options(args, callbacks, eval_dataset is not None, lambda: updates(args, train_data()))
    of_compile = compile_options(args, longest(collator) and "pad" in hooks)
    return {**hooks, "compile_options": of_compile, "run_options": options}


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    """The loss that a model of transformers computes where its batch has labels."""
    with problem_type_kept(model):
        outputs = model(**batch)
    return outputs["loss"] if isinstance(outputs, dict) else outputs[0]


@contextmanager
def problem_type_kept(model: nn.Module) -> Iterator[None]:
    """A classifier notes in its config which loss its labels ask for: each batch finds it anew."""
    plain = _plain(model)
    config: Any = getattr(plain, "config", None)
    problem_type = getattr(config, "problem_type", None)
    try:
        yield
    finally:
        if hasattr(config, "problem_type"):
            config.problem_type = problem_type


def pad_values(tokenizer: Any, batch: Mapping[str, Any]) -> dict[str, int]:
    """What `--pad-to` appends to the leaves of a tokenizer's batch: what its model and the usual losses leave out."""
    values = {"input_ids": tokenizer.pad_token_id, "attention_mask": 0, "token_type_ids": 0, "labels": -100}
    return {
        name: value for name, value in values.items() if isinstance(leaf := batch.get(name), Tensor) and leaf.dim() > 1
    }


def loss_alone(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    """The metrics where none are given."""
    return {"loss": loss_of(model, batch)}


def predictions_of(
    model: nn.Module, batch: Any, label_names: Sequence[str] | None, preprocess: Callable[[Any, Any], Any] | None
) -> dict[str, Tensor]:
    """The loss of a batch, and what Trainer would give `compute_metrics` of it: predictions and labels."""
    from transformers.utils import find_labels

    outputs = model(**batch)
    plain = _plain(model)
    config = getattr(plain, "config", None)
    ignored = {"loss", *(getattr(config, "keys_to_ignore_at_inference", ("cache",)) or ())}
    parts = [v for n, v in outputs.items() if n not in ignored] if isinstance(outputs, dict) else list(outputs[1:])
    labels = [batch[name] for name in label_names or find_labels(type(plain)) if name in batch]
    logits, targets = (several[0] if len(several) == 1 else tuple(several) for several in (parts, labels))
    if preprocess is not None:
        logits = preprocess(logits, targets)
    result = {"loss": outputs["loss"] if isinstance(outputs, dict) else outputs[0]}
    return result | dict(_parts(PREDICTIONS, logits)) | dict(_parts(LABELS, targets))


PREDICTIONS, LABELS = "predictions", "labels"


def _parts(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors of nested tuples, by names that say where."""
    if isinstance(value, Tensor):
        yield name, value
    else:
        for number, part in enumerate(value):
            yield from _parts(f"{name}.{number}", part)


def computed(
    compute_metrics: Callable[[Any], Mapping[str, Any]], gathered: Mapping[str, list[Tensor]]
) -> dict[str, Any]:
    """What `compute_metrics` makes of all predictions, as Trainer gives them: joined, padded with -100."""
    from transformers import EvalPrediction
    from transformers.trainer_pt_utils import EvalLoopContainer

    def whole(name: str) -> Any:
        if name in gathered:
            held = EvalLoopContainer(do_nested_concat=True, padding_index=-100)
            for tensor in gathered[name]:
                held.add(tensor)
            return held.get_arrays()
        parts: list[Any] = []
        while any(key == f"{name}.{len(parts)}" or key.startswith(f"{name}.{len(parts)}.") for key in gathered):
            parts.append(whole(f"{name}.{len(parts)}"))
        return tuple(parts)

    metrics = compute_metrics(EvalPrediction(predictions=whole(PREDICTIONS), label_ids=whole(LABELS)))
    return {name.removeprefix("eval_"): value for name, value in metrics.items()}


def updates(args: Any, data: Any) -> int:
    """How many steps a schedule of rates is for: `max_steps`, or the epochs of the data."""
    if args.max_steps > 0:
        return int(args.max_steps)
    try:
        length = len(data)
    except TypeError as error:
        raise TaskError("train_dataset has no length", hint="give TrainingArguments(max_steps=...)") from error
    return math.ceil(args.num_train_epochs * length)


def save_pretrained(
    model: nn.Module | str | Path, weights: str | Path, folder: str | Path, settings: Mapping[str, str] = NONE
) -> nn.Module:
    """Write what a run has trained as transformers, or peft, does: `folder` is for their `from_pretrained`.

    Args:
        model: a model file, or a model as its `model()` makes it, which gets the weights. Of a PeftModel, and of a
            model of diffusers with `add_adapter()`, the adapter is written alone.
        weights: what the run has written, such as `out/model.safetensors`.
        settings: of a model file, as it was compiled.

    Raises:
        TaskError: the weights cannot be read or are of another model, or the model has no `save_pretrained`.
    """
    if not Path(weights).is_file():
        raise TaskError(
            f"{weights} is no file of weights",
            hint="give OUT/model.safetensors, or OUT/best.safetensors; fxpipe run --resume goes on from a checkpoint "
            "and writes them",
        )
    module = model if isinstance(model, nn.Module) else load_task(model, settings).model()
    if not hasattr(module, "save_pretrained"):
        inner = next((path for path, part in module.named_modules() if hasattr(part, "save_pretrained")), "PART")
        raise TaskError(
            f"{type(module).__name__} has no save_pretrained()",
            hint="load the weights, made.load_state_dict(safetensors.torch.load_file(...)), and save the part that has "
            f"one: made.get_submodule({inner!r}).save_pretrained({str(folder)!r})",
        )
    try:
        load_weights(module, weights)
    except SafetensorError as error:
        raise TaskError(f"{weights} cannot be read: {error}", hint="give OUT/model.safetensors") from error
    except (TaskError, RuntimeError) as error:
        raise TaskError(f"{weights} does not fit the model: {error}", hint="give the run's own model file") from error
    adapters = hasattr(module, "save_lora_adapter") and getattr(module, "peft_config", None)  # diffusers' add_adapter()
    (module.save_lora_adapter if adapters else module.save_pretrained)(folder)  # type: ignore[operator]
    return module


def _arguments(make: Any) -> Any:
    """The TrainingArguments, made where nothing says that this process is one of several."""
    if not callable(make):
        raise TaskError(
            "args is no function, and TrainingArguments that every worker makes would wait for processes of their own",
            hint="args=lambda: TrainingArguments(...)",
        )
    with alone():
        arguments = make()
    refuse(arguments)
    return arguments


@contextmanager
def alone() -> Iterator[None]:
    """Inside, nothing says that this process is one of several."""
    hidden = {name: os.environ.pop(name) for name in PROCESSES if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


def _plain(model: nn.Module) -> Any:
    """The model itself, without what peft put around it."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]


def _columns(model: nn.Module, args: Any) -> set[str]:
    """What the model's forward takes, and labels: as Trainer keeps of a data set."""
    plain = _plain(model)
    return {*inspect.signature(plain.forward).parameters, "label", "label_ids", *(args.label_names or ["labels"])}


def _adds_up(model: nn.Module) -> bool:
    """Whether Trainer leaves it to the model to divide the losses of accumulated batches, and the model does not."""
    plain = _plain(model)
    takes = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(plain.forward).parameters.values())
    try:
        source = inspect.getsource(type(plain).forward)
    except (OSError, TypeError):
        return False
    divides = "loss_function" in source or "num_items_in_batch" in source
    return bool(getattr(plain, "accepts_loss_kwargs", takes)) and not divides


def _counts_before_shift(model: nn.Module) -> bool:
    """Whether Trainer counts the labels of a causal model that its loss leaves out: it knows causal models by name."""
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    plain = _plain(model)
    loss_function = LOSS_MAPPING.get(getattr(plain, "loss_type", None))
    return loss_function is None and getattr(plain, "loss_function", None) is ForCausalLMLoss


def _remarks(args: Any, collator: Any, pads: bool, model: nn.Module) -> Iterator[str]:
    """What differs from Trainer, or is worth a change."""
    if longest(collator) and not pads:
        yield (
            f"{type(collator).__name__} pads each batch to its longest sample, and a build has stages for each length: "
            "where lengths differ, give padding='max_length' and max_length"
        )
    if args.gradient_accumulation_steps > 1 and _adds_up(model):
        yield (
            f"gradient_accumulation_steps={args.gradient_accumulation_steps}: the loss of an update is the mean over "
            "its samples; Trainer adds up those of its batches, because this model's forward() takes keywords and does "
            "not divide by num_items_in_batch"
        )
    if _counts_before_shift(model):
        yield (
            f"Trainer divides the loss of {type(model).__name__} by the number of its labels, one too many a "
            "sample, because transformers does not know that this class predicts the next token; here the loss is the "
            "mean over the tokens that are predicted, and so are its gradients"
        )


def longest(collator: Any) -> bool:
    """Whether it makes batches of several lengths."""
    padding = getattr(collator, "padding", None)
    return padding is True or padding == "longest"


if __name__ == "__main__":
    parser = ArgumentParser("python -m fxpipe.adapters.transformers", description="Write what a run has trained.")
    for name in ("MODEL.py", "OUT/model.safetensors", "FOLDER"):
        parser.add_argument(name)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="as it was compiled")
    arguments = vars(parser.parse_args())
    settings = pairs(arguments.pop("set"))
    folder = Path(arguments["FOLDER"])
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*")}
    try:
        save_pretrained(arguments["MODEL.py"], arguments["OUT/model.safetensors"], folder, settings)
    except FxpipeError as error:
        sys.exit(f"error: {error}")
    written = [path.name for path in sorted(folder.glob("*")) if before.get(path) != path.stat().st_mtime_ns]
    say(f"wrote {folder}: {', '.join(written)}")

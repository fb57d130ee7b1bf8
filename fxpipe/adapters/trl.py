"""What one gives to SFTTrainer and DPOTrainer of TRL, as the hooks of a model file.

globals().update(trl_hooks(DPOTrainer, model=make, args=lambda: DPOConfig(...), train_dataset=pairs, peft_config=LORA))

The trainer itself prepares the data and the model, and its own `compute_loss` is the step that is captured.
"""

from __future__ import annotations

import copy
import functools
from collections import defaultdict
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fxpipe.adapters import warn_once
from fxpipe.adapters.transformers import alone, trainer_hooks
from fxpipe.errors import TaskError
from fxpipe.random_state import random_state_kept

LENGTHS = 64
"""Samples are padded to multiples of it, where the arguments name no other: a build has stages for each length."""

NOT_FOLLOWED = (
    *("compute_metrics", "preprocess_logits_for_metrics", "compute_loss_func"),
    *("optimizers", "optimizer_cls_and_kwargs", "quantization_config"),
)
"""What the trainers take and nothing here follows."""


def trl_hooks(trainer: Any, *, model: Callable[[], nn.Module], args: Any, **given: Any) -> dict[str, Any]:
    """The hooks that train as `trainer(model=model(), args=args(), ...).train()` would.

    Each compile and each process of a run makes the trainer, with the whole base, and the trainer prepares the data.
    Before that, all random numbers begin with the arguments' seed, so `--seed` does not change the first weights.

    Args:
        trainer: SFTTrainer, DPOTrainer, or a class derived from one.
        model: makes a new model. It may have adapters already, or get them by `peft_config`.
        args: makes an SFTConfig or a DPOConfig.
        given: as the trainer takes it: `train_dataset`, `eval_dataset`, `processing_class`, `peft_config`,
            `ref_model`, `data_collator`, `formatting_func`, `callbacks`.

    Raises:
        TaskError: this trainer, or what it is asked for, does not train in a pipeline.
    """
    from trl import DPOTrainer

    _check_trainer(trainer)
    if names := [name for name in NOT_FOLLOWED if given.get(name)]:
        raise TaskError(
            f"{trainer.__name__} is given {', '.join(names)}, which a pipeline does not follow",
            hint="evaluations give the loss and what the trainer logs; hooks after globals().update(...) are taken "
            "instead, such as loss(model, batch) or optimizer(named_parameters); give model what is to be quantized",
        )
    if isinstance(eval_dataset := given.get("eval_dataset"), Mapping):
        raise TaskError("eval_dataset is several data sets", hint=f"give one of them: {', '.join(eval_dataset)}")
    paired, of_model = issubclass(trainer, DPOTrainer), list[Any]()
    changed: dict[str, Any] = {name: given[name] for name in ("peft_config", "processing_class") if given.get(name)}

    def make() -> Any:
        """A new trainer, with a new model."""
        from transformers import set_seed

        with random_state_kept(), alone():
            arguments = args()
            arguments.pad_to_multiple_of = arguments.pad_to_multiple_of or LENGTHS
            set_seed(arguments.seed)
            base = model()
            _check_reference(arguments, base, given)
            ready = trainer(model=base, args=arguments, **given | copy.deepcopy(changed))
        if {"image", "images"} & set(ready.train_dataset.column_names or ()):
            raise TaskError("train_dataset has images", hint="write loss(model, batch) with trainer_hooks(...)")
        return ready

    def make_model() -> nn.Module:
        ready = make()
        of_model[:] = [_without_models(ready)]
        if ready.args.gradient_checkpointing:
            ready.model.gradient_checkpointing_enable(ready.args.gradient_checkpointing_kwargs)
        return ready.model

    @functools.cache
    def data() -> tuple[Any, Any, Callable[[list[Any]], Any]]:
        """Both data sets and the collator, without the rest: runs watch all that their hooks reach."""
        ready = make()
        return ready.train_dataset, ready.eval_dataset, ready.data_collator

    def named() -> nn.Module:
        """A model with the names that the trainer's has."""
        if given.get("peft_config") is None:
            return model()
        from peft import get_peft_model

        return get_peft_model(model(), copy.deepcopy(changed["peft_config"]))

    def as_it_is() -> Any:
        """Arguments by which no column is left out: the trainer does that."""
        arguments = args()
        _check_arguments(arguments)
        arguments.remove_unused_columns = False
        return arguments

    def collate(samples: list[Any]) -> Any:
        batch = data()[2](samples)
        return _by_pair(batch) if paired else batch

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        of_model[:] = of_model or [_without_models(make())]
        return loss_of(of_model[0], model, _by_row(batch) if paired else dict(batch))

    def metrics(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        value, logged = loss(model, batch)
        return {"loss": value.detach(), **logged}

    hooks = trainer_hooks(
        model=named,
        args=as_it_is,
        train_dataset=lambda: data()[0],
        eval_dataset=None if eval_dataset is None else lambda: data()[1],
        data_collator=collate,
        callbacks=given.get("callbacks") or (),
        metrics=metrics,
    )
    return {**hooks, "model": make_model, "loss": loss}


def loss_of(trainer: Any, model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """What the trainer's `compute_loss` gives for this model, and what it would log, as tensors."""
    seen = copy.copy(trainer)
    metrics: dict[str, dict[str, list[Any]]] = {"train": defaultdict(list), "eval": defaultdict(list)}
    alone_here = SimpleNamespace(
        gather=_ToLog,
        gather_for_metrics=_ToLog,
        unwrap_model=lambda model: model,
        device=batch["input_ids"].device,
        num_processes=1,
        parallelism_config=None,
    )
    vars(seen).update({"model": model, "accelerator": alone_here, "_metrics": metrics})
    plain: dict[str, Any] = {
        "_use_triton": lambda device: False,
        "_ChunkedLogProbFunction": SimpleNamespace(apply=_log_probs),
    }
    with patch.multiple("trl.trainer.utils", **plain), _RowsChosen():
        loss = seen.compute_loss(model, batch)
    logged = {name: value for of_mode in metrics.values() for name, [value] in of_mode.items()}
    means = {name: value.tensor for name, value in logged.items() if isinstance(value, _ToLog)}
    return loss, {
        name: value.detach() for name, value in means.items() if not name.startswith(("num_tokens", "logits/"))
    }


def _without_models(trainer: Any) -> Any:
    """What a loss needs of a trainer: the step has the model from elsewhere, and this would hold another one."""
    bare = copy.copy(trainer)
    vars(bare).update(dict.fromkeys(("model", "model_wrapped", "ref_model", "optimizer", "accelerator")))
    return bare


class _ToLog:
    """A tensor of one process that stays one where the trainer makes a number of it, to log it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def item(self) -> _ToLog:
        return self

    def sum(self) -> _ToLog:
        return _ToLog(self.tensor.sum())

    def mean(self) -> _ToLog:
        return _ToLog(self.tensor.float().mean())

    def __gt__(self, least: int) -> bool:
        return True  # asked before a division

    def __truediv__(self, count: _ToLog) -> _ToLog:
        return _ToLog(self.tensor / count.tensor.clamp(min=1))

    def __floordiv__(self, count: int) -> _ToLog:
        return _ToLog(self.tensor // count)

    def __radd__(self, earlier: int) -> _ToLog:
        return self


class _RowsChosen(TorchFunctionMode):
    """Where a mask chooses values, their number depends on it: they are only summed, and zeros do not count."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__ and isinstance(args[1], Tensor) and args[1].dtype == torch.bool:
            values, count = args[0].masked_fill(~args[1], 0), args[1].sum()
            return SimpleNamespace(sum=values.sum, mean=lambda: values.sum() / count)
        return func(*args, **(kwargs or {}))


def _log_probs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float, *more: Any
) -> tuple[Tensor | None, ...]:
    """What TRL's `ChunkedLogProbFunction` computes in tiles, which it writes in place and computes again in its own
    backward: the parts of a stage are divided by operators."""
    _, softcap, scale, outputs = more
    logits = F.linear(hidden, weight, bias).float() * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits / temperature
    log_p = logits.log_softmax(-1)
    values = {
        "entropy": -(log_p.exp() * log_p).sum(-1),
        "log_sum_sq_probs": (2 * log_p).logsumexp(-1).detach(),
        "mean_logits": logits.mean(-1).detach(),
        "is_top1": logits.argmax(-1) == targets,
    }
    chosen = log_p.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return chosen, *(value if name in outputs else None for name, value in values.items())


def _by_pair(batch: Mapping[str, Any]) -> dict[str, Any]:
    """A batch of DPO, where all chosen rows are before all rejected ones, as one of samples, for microbatches."""
    return {
        name: leaf if name.startswith("ref_") else leaf.unflatten(0, (2, -1)).transpose(0, 1).contiguous()
        for name, leaf in batch.items()
    }


def _by_row(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The batch as the trainer has it."""
    return {
        name: leaf if name.startswith("ref_") else leaf.transpose(0, 1).flatten(0, 1) for name, leaf in batch.items()
    }


def _check_trainer(trainer: Any) -> None:
    import trl
    from trl.trainer import utils

    if not all(hasattr(utils, name) for name in ("add_fused_lm_head", "_use_triton", "_ChunkedLogProbFunction")):
        raise TaskError(
            f"trl {trl.__version__} does not compute its losses as trl 1.16 does",
            hint="pip install -c constraints.txt 'fxpipe[trl]', or '.[trl]' in the repository",
        )
    if not isinstance(trainer, type) or not issubclass(trainer, (trl.SFTTrainer, trl.DPOTrainer)):
        raise TaskError(
            f"{getattr(trainer, '__name__', trainer)} is neither SFTTrainer nor DPOTrainer",
            hint="those that generate while they train (GRPO, RLOO, online DPO, with vLLM or without) have no step to "
            "capture: generate between runs, and train on what is chosen with DPOTrainer or SFTTrainer. For others "
            "write loss(model, batch) into a model file, after fxpipe.adapters.transformers.trainer_hooks(...)",
        )


def _check_arguments(args: Any) -> None:
    """Refuse batches of one row, without padding: microbatches are of whole rows."""
    packing = getattr(args, "packing", False)
    if args.padding_free or (packing and args.packing_strategy != "wrapped"):
        name = f"packing_strategy={args.packing_strategy!r}" if packing else "padding_free=True"
        raise TaskError(
            f"{name} joins the samples of a batch to one row, which cannot be divided into microbatches",
            hint="packing=True with packing_strategy='wrapped', or neither: --pad-to makes few lengths of many",
        )


def _check_reference(args: Any, model: nn.Module, given: Mapping[str, Any]) -> None:
    """Refuse a reference that is a model of its own."""
    from accelerate.utils import is_peft_model  # type: ignore[import-untyped]

    if getattr(args, "precompute_ref_log_probs", True):
        return
    if given.get("ref_model") is not None or not (given.get("peft_config") or is_peft_model(model)):
        raise TaskError(
            "the reference of DPO is a second model here, and a pipeline trains one",
            hint="DPOConfig(precompute_ref_log_probs=True), by which the trainer computes it before; or adapters, by "
            "peft_config and without ref_model: the reference is then the model without them",
        )
    warn_once(
        "each step computes the reference of DPO by the model without its adapters, and workers hold copies of frozen "
        "weights for it: with DPOConfig(precompute_ref_log_probs=True), the trainer computes it once, before"
    )

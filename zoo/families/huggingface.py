"""An entry for a model of Hugging Face transformers: a class, its configuration made small, a batch, its own loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from families.entry import CLASSES, LENGTH, TRANSFORMERS, VOCABULARY, Loss, ZooModel, own_loss

# What most configurations call their sizes; each takes those that it has.
SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
    "num_attention_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip


def transformers_model(
    name: str,
    head: str,
    kind: str,
    batch: Callable[[int], Any],
    *,
    config: Callable[[], Any] | None = None,
    loss: Loss = own_loss,
    random: bool = False,
    constant_batch: tuple[str, ...] = (),
    refused: tuple[str, str] | None = None,
    base: dict[str, Any] = SMALL,
    **sizes: Any,
) -> ZooModel:
    """The class `head` of transformers, from scratch, with `base` and `sizes` (or `config`) as its configuration.

    Args:
        kind: what the model is, behind "transformers: " in the table's heading.
        config: makes the configuration, where sizes alone do not.
        loss: the model's own, if it is not given.
        sizes: values of the configuration, over those of `base`; None leaves the library's own.
    """

    def make() -> nn.Module:
        import transformers

        cls = getattr(transformers, head)
        values = {k: v for k, v in (base | sizes).items() if v is not None}
        model: nn.Module = cls(config() if config else cls.config_class(**values))
        return model

    return ZooModel(
        name,
        make,
        loss,
        batch,
        needs=TRANSFORMERS,
        kind=f"transformers: {kind}",
        random=random,
        constant_batch=constant_batch,
        refused=refused,
    )


def padded_text(size: int) -> Any:
    """Texts of different lengths, padded at their ends."""
    present = torch.arange(LENGTH) < torch.randint(LENGTH // 2, LENGTH + 1, (size, 1))
    ids = torch.randint(3, VOCABULARY, (size, LENGTH)).masked_fill(~present, 0)
    return {"input_ids": ids, "attention_mask": present.long(), "labels": ids.masked_fill(~present, -100)}


def classes(key: str, *shape: int) -> Callable[[int], Any]:
    """Normal random input of `shape` under the name `key`, and a class for each sample."""
    return lambda size: {key: torch.randn(size, *shape), "labels": torch.randint(0, CLASSES, (size,))}

"""Models of transformers that take images apart by sizes that come in the batch: constants of the capture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from families.entry import LENGTH, VOCABULARY, ZooModel
from families.huggingface import transformers_model

IMAGE, VIDEO, BEGIN, END = 5, 6, 7, 8  # tokens: a patch of an image, of a video, and what is around them
FIRST = 9  # of the tokens that are words
GRID = (1, 4, 4)  # times, rows and columns of an image's patches
MERGED = 4  # patches that become one token
PATCH = 4  # pixels

TEXT = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
    "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0},
}  # fmt: skip
EYES = {
    "depth": 2, "num_heads": 2, "patch_size": PATCH, "spatial_merge_size": 2, "temporal_patch_size": 1,
    "in_channels": 3,
}  # fmt: skip
TOKENS = {
    "image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": BEGIN, "vision_end_token_id": END,
}  # fmt: skip


def _seen(size: int) -> Any:
    """An image and a text about it for each sample, and where its tokens are: [samples, 3, length]."""
    patches = GRID[0] * GRID[1] * GRID[2]
    ids = torch.randint(FIRST, VOCABULARY, (size, LENGTH))
    ids[:, 1] = BEGIN
    ids[:, 2 : 2 + patches // MERGED] = IMAGE
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "position_ids": torch.arange(LENGTH).expand(size, 3, LENGTH).contiguous(),
        "pixel_values": torch.randn(size * patches, 3 * PATCH * PATCH),
        "image_grid_thw": torch.tensor([GRID] * size),
        "labels": ids.masked_fill(ids == IMAGE, -100),
    }


def _answer(model: nn.Module, batch: Any) -> Tensor:
    """The model's own loss; it wants positions as [3, samples, length]."""
    positions = batch["position_ids"].transpose(0, 1)
    loss: Tensor = model(**{**batch, "position_ids": positions}, use_cache=False).loss
    return loss


def _shaped(size: int) -> Any:
    """Patches of images that are padded to one number, with the images' rows and columns, and a class."""
    return {
        "pixel_values": torch.randn(size, 16, 3 * PATCH * PATCH),
        "pixel_attention_mask": (torch.arange(16) < 12).long().repeat(size, 1),
        "spatial_shapes": torch.tensor([[3, 4]] * size),
        "labels": torch.randint(0, 32, (size,)),
    }


def _classified(model: nn.Module, batch: Any) -> Tensor:
    given = {name: value for name, value in batch.items() if name != "labels"}
    return F.cross_entropy(model(**given).pooler_output, batch["labels"])


def _grid(name: str, head: str, refused: tuple[str, str] | None = None, **eyes: Any) -> ZooModel:
    def config() -> Any:
        import transformers

        cls: Callable[..., Any] = getattr(transformers, head).config_class
        return cls(text_config=TEXT, vision_config=EYES | eyes, **TOKENS)

    return transformers_model(
        name,
        head,
        "images by their sizes",
        _seen,
        config=config,
        loss=_answer,
        constant_batch=("image_grid_thw",),
        refused=refused,
    )


MODELS = (
    _grid("qwen2_vl", "Qwen2VLForConditionalGeneration", embed_dim=32, hidden_size=32, mlp_ratio=2),
    _grid("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", hidden_size=32, out_hidden_size=32, intermediate_size=64,
        window_size=16, fullatt_block_indexes=[1]),
    _grid("qwen3_vl", "Qwen3VLForConditionalGeneration", hidden_size=32, out_hidden_size=32, intermediate_size=64,
        num_position_embeddings=16, deepstack_visual_indexes=[0], refused=(r"modeling_qwen3_vl.*visual_pos_masks",
        "adds to the tokens of images, which it finds by their values")),
    transformers_model("siglip2", "Siglip2VisionModel", "images by their sizes", _shaped, loss=_classified,
        constant_batch=("spatial_shapes",), base={}, hidden_size=32, intermediate_size=64, num_hidden_layers=4,
        num_attention_heads=2, patch_size=PATCH, num_patches=16),
)  # fmt: skip

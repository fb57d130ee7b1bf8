"""LoRA of a Flux-like transformer by flow matching, on cached latents and texts, the base in bfloat16."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from diffusers import FluxTransformer2DModel
from peft import LoraConfig
from torch import Tensor, nn
from watched import adamw, resident

import fxpipe

IMPORTED = resident()
LAYERS, HEADS = fxpipe.setting("layers", 4), fxpipe.setting("heads", 6)
ROWS, STEPS = 8, 400
SIDE, WORDS = fxpipe.setting("side", 8), 16
CHANNELS, TEXT, POOLED = 16, 128, 64


def model() -> nn.Module:
    torch.manual_seed(0)
    base = FluxTransformer2DModel(
        in_channels=CHANNELS, num_layers=LAYERS, num_single_layers=2 * LAYERS, attention_head_dim=64,
        num_attention_heads=HEADS, joint_attention_dim=TEXT, pooled_projection_dim=POOLED, axes_dims_rope=(16, 24, 24),
    )  # fmt: skip
    base.requires_grad_(False)
    base.add_adapter(LoraConfig(r=8, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
    return base  # type: ignore[no-any-return]


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    noisy = (1 - batch["sigma"]) * batch["latents"] + batch["sigma"] * batch["noise"]
    [flow] = model(
        hidden_states=noisy,
        timestep=batch["sigma"].flatten(),
        encoder_hidden_states=batch["texts"],
        pooled_projections=batch["pooled"],
        img_ids=batch["places"],
        txt_ids=batch["text_places"],
        return_dict=False,
    )
    return (flow - (batch["noise"] - batch["latents"])).square().mean()


class Cached:
    """Minibatches of random latents and texts, with the noise and the time that are drawn for them."""

    def __len__(self) -> int:
        return STEPS

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        draw = torch.Generator().manual_seed(0)
        rows, columns = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
        places = torch.stack([torch.zeros_like(rows), rows, columns], -1).view(-1, 3).float()
        for _ in range(STEPS):
            yield {
                "latents": torch.randn(ROWS, SIDE**2, CHANNELS, generator=draw),
                "noise": torch.randn(ROWS, SIDE**2, CHANNELS, generator=draw),
                "sigma": torch.randn(ROWS, 1, 1, generator=draw).sigmoid(),
                "texts": torch.randn(ROWS, WORDS, TEXT, generator=draw),
                "pooled": torch.randn(ROWS, POOLED, generator=draw),
                "places": places,
                "text_places": torch.zeros(WORDS, 3),
            }


def train_data() -> Cached:
    return Cached()


def optimizer(named_parameters: Sequence[tuple[str, nn.Parameter]]) -> Any:
    return adamw(named_parameters, IMPORTED)

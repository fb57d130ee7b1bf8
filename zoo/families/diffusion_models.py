"""diffusers: what denoises, and the autoencoders around it, in small configurations of four blocks and more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from families.entry import DIFFUSERS, ZooModel

KIND = "diffusers"
STEPS, WORDS, TEXT = 1000, 6, 32  # noise levels; tokens of a prompt and their width


def _made(name: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import diffusers

        return getattr(diffusers, name)(**options)

    return make


def _denoised(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The squared error of the noise that the model finds."""
    inputs = {name: value for name, value in batch.items() if name != "noise"}
    return F.mse_loss(model(**inputs).sample, batch["noise"])


def _latents(*shape: int, key: str = "sample", **others: Callable[[int], Tensor]) -> Callable[[int], Any]:
    """Noisy latents with their noise and its level, and whatever else a model takes."""

    def make(size: int) -> dict[str, Tensor]:
        found = {key: torch.randn(size, *shape), "timestep": torch.randint(0, STEPS, (size,))}
        return {**found, **{name: other(size) for name, other in others.items()}, "noise": torch.randn(size, *shape)}

    return make


def _normal(*shape: int) -> Callable[[int], Tensor]:
    return lambda size: torch.randn(size, *shape)


def _classes(size: int) -> Tensor:
    return torch.randint(0, 10, (size,))


def _reconstructed(model: nn.Module, batch: Tensor) -> Tensor:
    return F.mse_loss(model(batch).sample, batch)


def _variational(model: nn.Module, batch: Tensor) -> Tensor:
    """A sample of the posterior decoded, and the posterior's distance from a normal one."""
    posterior = model.encode(batch).latent_dist
    return F.mse_loss(model.decode(posterior.sample()).sample, batch) + 1e-3 * posterior.kl().mean()


def _controlled(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The mean square of what a control net adds to each block."""
    found = model(**batch)
    return torch.stack([v.square().mean() for v in (*found.down_block_res_samples, found.mid_block_res_sample)]).sum()


def _pictures(pixels: int) -> Callable[[int], Tensor]:
    return lambda size: torch.rand(size, 3, pixels, pixels) * 2 - 1


def _flux(size: int) -> dict[str, Tensor]:
    """Latents and prompt as sequences with the places of their tokens, which are the same for every sample."""
    return {
        "hidden_states": torch.randn(size, 16, 16),
        "encoder_hidden_states": torch.randn(size, WORDS, TEXT),
        "pooled_projections": torch.randn(size, TEXT),
        "timestep": torch.rand(size),
        "noise": torch.randn(size, 16, 16),
    }


def _denoised_sequence(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    inputs = {name: value for name, value in batch.items() if name != "noise"}
    rows, columns = torch.meshgrid(torch.arange(4.0), torch.arange(4.0), indexing="ij")
    places = torch.stack([torch.zeros(16), rows.flatten(), columns.flatten()], -1)
    found = model(**inputs, img_ids=places, txt_ids=torch.zeros(WORDS, 3)).sample
    return F.mse_loss(found, batch["noise"])


def _control(size: int) -> dict[str, Tensor]:
    return {
        "sample": torch.randn(size, 4, 8, 8),
        "timestep": torch.randint(0, STEPS, (size,)),
        "encoder_hidden_states": torch.randn(size, WORDS, TEXT),
        "controlnet_cond": torch.rand(size, 3, 64, 64),
    }


def _entry(name: str, model: Callable[[], nn.Module], loss: Any, batch: Any, **more: Any) -> ZooModel:
    return ZooModel(name, model, loss, batch, needs=DIFFUSERS, kind=KIND, **more)


_PROMPT = _normal(WORDS, TEXT)
_SMALL = {"layers_per_block": 1, "norm_num_groups": 8}
_HEADS = {"num_attention_heads": 4, "attention_head_dim": 8, "num_layers": 4}

MODELS = (
    _entry(
        "unet_2d",
        _made(
            "UNet2DModel", sample_size=16, block_out_channels=(16, 32, 32), attention_head_dim=8, dropout=0.1,
            down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D"), **_SMALL,
        ),
        _denoised,
        _latents(3, 16, 16),
        random=True,
    ),
    _entry(
        "unet_2d_condition",
        _made(
            "UNet2DConditionModel", sample_size=8, block_out_channels=(16, 32), attention_head_dim=8,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), cross_attention_dim=TEXT, **_SMALL,
        ),
        _denoised,
        _latents(4, 8, 8, encoder_hidden_states=_PROMPT),
    ),
    _entry(
        "controlnet",
        _made(
            "ControlNetModel", block_out_channels=(16, 32), attention_head_dim=8,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), cross_attention_dim=TEXT,
            conditioning_embedding_out_channels=(8, 16, 16, 16), **_SMALL,
        ),
        _controlled,
        _control,
    ),
    _entry(
        "autoencoder_kl",
        _made(
            "AutoencoderKL", sample_size=32, block_out_channels=(16, 32),
            down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, **_SMALL,
        ),
        _variational,
        _pictures(32),
    ),
    _entry(
        "autoencoder_tiny",
        _made("AutoencoderTiny", encoder_block_out_channels=(16,) * 4, decoder_block_out_channels=(16,) * 4),
        _reconstructed,
        _pictures(32),
    ),
    _entry(
        "dit",
        _made(
            "DiTTransformer2DModel", in_channels=4, out_channels=4, sample_size=8, num_embeds_ada_norm=STEPS,
            norm_num_groups=8, **_HEADS,
        ),
        _denoised,
        _latents(4, 8, 8, key="hidden_states", class_labels=_classes),
    ),
    _entry(
        "pixart",
        _made(
            "PixArtTransformer2DModel", in_channels=4, out_channels=4, sample_size=8, cross_attention_dim=32,
            caption_channels=TEXT, use_additional_conditions=False, norm_num_groups=8, **_HEADS,
        ),
        _denoised,
        _latents(4, 8, 8, key="hidden_states", encoder_hidden_states=_PROMPT),
    ),
    _entry(
        "stable_diffusion_3",
        _made(
            "SD3Transformer2DModel", sample_size=8, in_channels=4, out_channels=4, joint_attention_dim=TEXT,
            caption_projection_dim=32, pooled_projection_dim=TEXT, pos_embed_max_size=8, **_HEADS,
        ),
        _denoised,
        _latents(
            4, 8, 8, key="hidden_states", encoder_hidden_states=_PROMPT, pooled_projections=_normal(TEXT)
        ),
    ),
    _entry(
        "flux",
        _made(
            "FluxTransformer2DModel", in_channels=16, num_layers=2, num_single_layers=4, attention_head_dim=16,
            num_attention_heads=2, joint_attention_dim=TEXT, pooled_projection_dim=TEXT, axes_dims_rope=(4, 6, 6),
        ),
        _denoised_sequence,
        _flux,
    ),
    _entry(
        "sana",
        _made(
            "SanaTransformer2DModel", in_channels=4, out_channels=4, sample_size=8, num_attention_heads=4,
            attention_head_dim=8, num_layers=4, num_cross_attention_heads=4, cross_attention_head_dim=8,
            cross_attention_dim=32, caption_channels=TEXT,
        ),
        _denoised,
        _latents(4, 8, 8, key="hidden_states", encoder_hidden_states=_PROMPT),
    ),
    _entry(
        "wan_video",
        _made(
            "WanTransformer3DModel", num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4,
            text_dim=TEXT, freq_dim=32, ffn_dim=48, num_layers=4, rope_max_seq_len=32,
        ),
        _denoised,
        _latents(4, 2, 8, 8, key="hidden_states", encoder_hidden_states=_PROMPT),
    ),
    _entry(
        "unet_3d_condition",
        _made(
            "UNet3DConditionModel", sample_size=8, block_out_channels=(16, 32), attention_head_dim=8,
            down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
            up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"), cross_attention_dim=TEXT, **_SMALL,
        ),
        _denoised,
        _latents(4, 3, 8, 8, encoder_hidden_states=_PROMPT),
    ),
)  # fmt: skip

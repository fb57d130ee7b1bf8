"""Diffusion models: the training recipes of diffusers, with LoRA, and what a loss draws at random for its samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe
from fxpipe.random_state import seed_of

WIDTH, SEED, SIZES = 16, 0, ((4, 4), (2, 8), (4, 4))
"""`SIZES`: latents of each step; two buckets of aspect ratios."""


def _adapted(model: Any, dtype: torch.dtype = torch.float32) -> nn.Module:
    from diffusers.training_utils import cast_training_params
    from peft import LoraConfig

    model.requires_grad_(False).to(dtype)
    model.add_adapter(LoraConfig(r=2, init_lora_weights=False, target_modules=["to_q", "to_v"]))
    cast_training_params([model], dtype=torch.float32)
    model.enable_gradient_checkpointing()
    made: nn.Module = model.train()
    return made


def _flux() -> nn.Module:
    from diffusers import FluxTransformer2DModel

    torch.manual_seed(0)
    sizes = {"num_layers": 1, "num_single_layers": 1, "attention_head_dim": 8, "num_attention_heads": 2}
    widths = {"joint_attention_dim": WIDTH, "pooled_projection_dim": WIDTH, "axes_dims_rope": (2, 2, 4)}
    return _adapted(FluxTransformer2DModel(in_channels=16, **sizes, **widths), torch.bfloat16)


def _flow() -> Any:
    """Flow matching, as in train_dreambooth_lora_flux.py."""
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline
    from diffusers.training_utils import compute_density_for_timestep_sampling, compute_loss_weighting_for_sd3

    scheduler = FlowMatchEulerDiscreteScheduler()

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        latents, prompt = batch["latents"], batch["prompt"]
        size, _, height, width = latents.shape
        noise = torch.randn_like(latents)
        density = compute_density_for_timestep_sampling("logit_normal", size, logit_mean=0.0, logit_std=1.0)
        indices = (density * 1000).long()
        sigmas = scheduler.sigmas[indices][:, None, None, None]
        places = FluxPipeline._prepare_latent_image_ids(size, height // 2, width // 2, latents.device, latents.dtype)
        found = model(
            hidden_states=FluxPipeline._pack_latents((1 - sigmas) * latents + sigmas * noise, *latents.shape),
            timestep=scheduler.timesteps[indices] / 1000, encoder_hidden_states=prompt, img_ids=places,
            pooled_projections=prompt.mean(1), txt_ids=torch.zeros(prompt.shape[1], 3), return_dict=False,
        )[0]  # fmt: skip
        found = FluxPipeline._unpack_latents(found, 8 * height, 8 * width, vae_scale_factor=8)
        weights = compute_loss_weighting_for_sd3("sigma_sqrt", sigmas)
        return (weights.float() * (found.float() - (noise - latents)) ** 2).mean()

    return loss


def _unet() -> nn.Module:
    from diffusers import UNet2DConditionModel

    torch.manual_seed(0)
    blocks = {"down_block_types": ("CrossAttnDownBlock2D",), "up_block_types": ("CrossAttnUpBlock2D",)}
    sizes = {"block_out_channels": (8,), "attention_head_dim": 4, "layers_per_block": 1, "norm_num_groups": 4}
    return _adapted(UNet2DConditionModel(sample_size=4, cross_attention_dim=WIDTH, **blocks, **sizes))


def _noise() -> Any:
    """What train_text_to_image_lora.py does with --snr_gamma and --noise_offset."""
    from diffusers import DDPMScheduler
    from diffusers.training_utils import compute_snr

    scheduler = DDPMScheduler()

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        latents = batch["latents"]
        noise = torch.randn_like(latents) + 0.1 * torch.randn(latents.shape[0], latents.shape[1], 1, 1)
        timesteps = torch.randint(0, 1000, (len(latents),)).long()
        noisy = scheduler.add_noise(latents, noise, timesteps)
        found = model(noisy, timesteps, batch["prompt"], return_dict=False)[0]
        snr = compute_snr(scheduler, timesteps)
        weights = torch.stack([snr, 5.0 * torch.ones_like(timesteps)], dim=1).min(dim=1)[0] / snr
        errors = F.mse_loss(found.float(), noise.float(), reduction="none")
        return (errors.mean(dim=list(range(1, len(errors.shape)))) * weights).mean()

    return loss


def _optimizer(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in named if p.requires_grad], lr=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "make_loss", "autocast"), [(_flux, _flow, "bf16"), (_unet, _noise, None)], ids=["flux", "unet"]
)
@pytest.mark.filterwarnings("ignore")
def test_a_recipe_trains_to_the_bit_what_eager_pytorch_does(
    make: Callable[[], nn.Module], make_loss: Callable[[], Any], autocast: Any
) -> None:
    """In buckets; noise and timesteps are drawn in the loss, on worker 0, from the seed that the law gives it."""
    pytest.importorskip("diffusers")
    draw = torch.Generator().manual_seed(1)
    batches = [
        {"latents": torch.randn(2, 4, *size, generator=draw), "prompt": torch.randn(2, 3, WIDTH, generator=draw)}
        for size in SIZES
    ]
    model, loss = make(), make_loss()
    build = fxpipe.compile(
        model, loss, batches[0], shapes=batches[1:2], workers=2, schedule="1f1b", microbatches=1, cost="analytic",
        optimizer=_optimizer, autocast=autocast,
    )  # fmt: skip
    pipeline = build.local(optimizer=_optimizer, seed=SEED)
    losses = [float(pipeline.step(batch)) for batch in batches]
    optimizer, wanted = _optimizer(list(model.named_parameters())), []
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        torch.manual_seed(seed_of(SEED, 0, "F", step, 0))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast is not None):
            value = loss(model, batch)
        value.backward()
        optimizer.step()
        wanted.append(float(value))
    assert losses == wanted
    state = pipeline.state_dict()
    assert all(state[name].equal(value) for name, value in model.state_dict().items())


def _drawn(weights: Callable[[Tensor], Tensor]) -> Any:
    """A loss that draws a weight for each sample."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        drawn = torch.sigmoid(torch.normal(mean=0.0, std=1.0, size=(len(x),)))
        return (model(x).square().mean(1) * weights(drawn)).mean()

    return loss


@pytest.mark.parametrize(
    ("weights", "why"),
    [
        (lambda drawn: drawn, ""),
        (lambda drawn: drawn / drawn.mean(), "combines samples with a mean over the batch"),
        (lambda drawn: drawn / drawn.max(), "is not a sum or a mean, and goes over the samples of the batch"),
    ],
    ids=["alone", "by their mean", "by the largest"],
)
def test_weights_that_a_loss_draws_for_its_samples_are_rows(weights: Any, why: str) -> None:
    """Their mean is not the same in every microbatch, though the comparison draws the same number for all samples."""
    build = fxpipe.compile(
        nn.Linear(6, 6),
        _drawn(weights),
        torch.randn(4, 6),
        workers=1,
        schedule="gpipe",
        microbatches=2,
        cost="analytic",
    )
    said = "; ".join(w for w in build.warnings if "not proved" in w)
    assert why in said if why else not said

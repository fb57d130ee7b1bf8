"""LoRA for diffusion models, as the training scripts of diffusers do it, on two workers: a new style for digits.

Two recipes: a small Flux with flow matching, and a U-Net that finds the noise, with min-SNR weights. Latents and
prompts are computed before; pictures of one digit, of two side by side and of two on top of each other are buckets of
their own, so batches have three shapes. The base learns scikit-learn's digits, white on black; the adapters, black on
white. The moving average of the adapters is saved, and loaded by diffusers. From the repository's root, with
`pip install -c constraints.txt '.[peft]' diffusers scikit-learn`:

    python examples/diffusion_lora.py flux
    python examples/diffusion_lora.py unet
"""

import sys
import tempfile

import torch
from diffusers import (
    DDIMScheduler,
    DDPMScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    StableDiffusionPipeline,
    UNet2DConditionModel,
)
from diffusers.training_utils import (
    compute_density_for_timestep_sampling,
    compute_loss_weighting_for_sd3,
    compute_snr,
)
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from sklearn.datasets import load_digits
from torch.nn import functional as F

import fxpipe

BATCH, WIDTH, GAMMA = 16, 32, 5.0
BASE_STEPS, STEPS = 200, 100
BUCKETS = {"one": (1, None), "side by side": (2, 2), "on top": (2, 1)}
"""How many digits a picture has, and along which dimension they are put together."""
LAYERS = ["to_q", "to_k", "to_v", "to_out.0", "conv1", "conv2"]
LORA = LoraConfig(r=8, lora_alpha=8, init_lora_weights="gaussian", target_modules=LAYERS)


class Flux:
    """Flow matching: the model finds the direction from the picture to the noise."""

    scheduler = FlowMatchEulerDiscreteScheduler()
    sampler, pipeline, part = FlowMatchEulerDiscreteScheduler(), FluxPipeline, "transformer"

    @staticmethod
    def model():
        return FluxTransformer2DModel(
            in_channels=16, num_layers=1, num_single_layers=2, attention_head_dim=16, num_attention_heads=4,
            joint_attention_dim=WIDTH, pooled_projection_dim=WIDTH, axes_dims_rope=(4, 6, 6),
        )  # fmt: skip

    @staticmethod
    def found(model, noisy, timesteps, prompt):
        size, channels, height, width = noisy.shape
        places = FluxPipeline._prepare_latent_image_ids(size, height // 2, width // 2, noisy.device, noisy.dtype)
        found = model(
            hidden_states=FluxPipeline._pack_latents(noisy, size, channels, height, width), timestep=timesteps / 1000,
            encoder_hidden_states=prompt, pooled_projections=prompt.mean(1), img_ids=places,
            txt_ids=torch.zeros(prompt.shape[1], 3), return_dict=False,
        )  # fmt: skip
        return FluxPipeline._unpack_latents(found[0], 8 * height, 8 * width, vae_scale_factor=8)

    @classmethod
    def loss(cls, model, batch):
        latents = batch["latents"]
        noise = torch.randn_like(latents)
        density = compute_density_for_timestep_sampling("logit_normal", len(latents), logit_mean=0.0, logit_std=1.0)
        indices = (density * cls.scheduler.config.num_train_timesteps).long()
        sigmas = cls.scheduler.sigmas[indices][:, None, None, None]  # the scripts search for each timestep's place
        noisy = (1 - sigmas) * latents + sigmas * noise
        found = cls.found(model, noisy, cls.scheduler.timesteps[indices], batch["prompt"])
        weights = compute_loss_weighting_for_sd3("none", sigmas)
        return (weights.float() * (found.float() - (noise - latents)) ** 2).mean()


class UNet:
    """The model finds the noise; what has little of it counts less (Min-SNR, Hang et al. 2023)."""

    scheduler = DDPMScheduler()
    sampler, pipeline, part = DDIMScheduler.from_config(scheduler.config), StableDiffusionPipeline, "unet"

    @staticmethod
    def model():
        return UNet2DConditionModel(
            sample_size=8, block_out_channels=(32, 64), layers_per_block=1, attention_head_dim=8, norm_num_groups=8,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), cross_attention_dim=WIDTH,
        )  # fmt: skip

    @staticmethod
    def found(model, noisy, timesteps, prompt):
        return model(noisy, timesteps, prompt, return_dict=False)[0]

    @classmethod
    def loss(cls, model, batch):
        latents = batch["latents"]
        noise = torch.randn_like(latents)
        timesteps = torch.randint(0, cls.scheduler.config.num_train_timesteps, (len(latents),))
        found = cls.found(model, cls.scheduler.add_noise(latents, noise, timesteps), timesteps, batch["prompt"])
        snr = compute_snr(cls.scheduler, timesteps)
        weights = torch.stack([snr, GAMMA * torch.ones_like(snr)], dim=1).min(dim=1)[0] / snr
        return (F.mse_loss(found.float(), noise, reduction="none").mean(dim=(1, 2, 3)) * weights).mean()


RECIPE = {"flux": Flux, "unet": UNet}[sys.argv[1] if len(sys.argv) > 1 else "flux"]
WORDS = torch.randn(11, WIDTH, generator=torch.Generator().manual_seed(0))
"""The prompt's tokens: ten digits, and none."""


def loss(model, batch):
    return RECIPE.loss(model, batch)


def metrics(model, batch):
    return {"loss": RECIPE.loss(model, batch)}


def adamw(named_parameters):
    return torch.optim.AdamW([p for _, p in named_parameters], lr=2e-3)


def batches(count, seed, style=1.0):
    """So many batches, each of one bucket: latents (a picture of 2 by 2 pixels in 4 channels) and prompts."""
    digits, draw = load_digits(), torch.Generator().manual_seed(seed)
    pictures = F.interpolate(torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1, scale_factor=2)
    latents, labels = style * F.pixel_unshuffle(pictures, 2), torch.tensor(digits.target)
    made = []
    for _ in range(count):
        several, dim = list(BUCKETS.values())[torch.randint(len(BUCKETS), (), generator=draw)]
        chosen = torch.randint(len(latents), (several, BATCH), generator=draw)
        parts = [latents[c] for c in chosen]
        words = torch.cat([labels[chosen], torch.full((2 - several, BATCH), 10)])
        made.append({"latents": parts[0] if dim is None else torch.cat(parts, 4 - dim), "prompt": WORDS[words.T]})
    return made


@torch.no_grad()
def brightness(model, steps=20):
    """The mean of the pictures that a model makes for the ten digits, from 0 to 1."""
    latents = torch.randn(10, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    prompt = torch.stack([WORDS[:10], WORDS[10:].expand(10, -1)], 1)
    RECIPE.sampler.set_timesteps(steps)
    for timestep in RECIPE.sampler.timesteps:
        found = RECIPE.found(model, latents, timestep.expand(10), prompt)
        latents = RECIPE.sampler.step(found, timestep, latents, return_dict=False)[0]
    return float(F.pixel_shuffle(latents, 2).clamp(-1, 1).mean() + 1) / 2


def pretrained(model, steps):
    """The base, trained as usual: in a real script it comes from the hub."""
    optimizer = adamw(model.named_parameters())
    for batch in batches(steps, seed=1):
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()
    return model


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)  # for so little, more are slower
    model = pretrained(RECIPE.model(), BASE_STEPS)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(f"{folder}/base")
        before = brightness(model.eval())
        model.requires_grad_(False)
        model.add_adapter(LORA)
        model.enable_gradient_checkpointing()
        tuned, summary = fxpipe.fit(
            model.train(), loss, lambda: batches(STEPS, seed=2, style=-1.0), workers=2, optimizer=adamw,
            eval_data=batches(10, seed=3, style=-1.0), metrics=metrics, eval_every=STEPS // 2,
            steps=STEPS, ema=0.95, out=f"{folder}/out",
        )  # fmt: skip
        fxpipe.load_weights(tuned, f"{folder}/out/ema.safetensors")
        layers = {f"{RECIPE.part}_lora_layers": get_peft_model_state_dict(tuned)}
        RECIPE.pipeline.save_lora_weights(f"{folder}/adapter", **layers)
        again = type(model).from_pretrained(f"{folder}/base")
        again.load_lora_adapter(f"{folder}/adapter", prefix=RECIPE.part, use_safetensors=True)
        after = brightness(again.eval())
    (_, early), (_, late) = [(e["step"], e["metrics"]["loss"]) for e in summary["evaluations"]]
    print(
        f"held out: loss {early:.3f} halfway, {late:.3f} at the end; brightness {before:.2f} of the base's pictures, "
        f"{after:.2f} with the adapters that diffusers has loaded"
    )
    assert late < early
    assert before < 0.45
    assert after > before + 0.15


if __name__ == "__main__":
    main()

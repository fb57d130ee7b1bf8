"""LoRA of FLUX.1 (12 billion parameters, in bfloat16) on two cards: will it fit, how fast, and the training itself.

One card of 24 GB has no room for the base and what training it takes; two have. Nothing of it is loaded to plan:

    fxpipe plan examples/flux12b_lora.py -n 2 --meta --device-spec rtx-4090 --links pcie4

Latents and texts are cached, as training scripts of diffusers do. To train, `base` is a folder or a name on the hub,
and `cache` a folder of files that `torch.save` has written, each a batch like that of `cached()`:

    fxpipe compile examples/flux12b_lora.py -n 2 --meta --device cuda --set base=BASE --set cache=CACHE -o build/
    fxpipe run build/

examples/diffusion_lora.py trains a small one on real pictures, and loads the adapters into diffusers.
"""

from pathlib import Path

import torch

import fxpipe

BASE, CACHE = fxpipe.setting("base", ""), fxpipe.setting("cache", "")
LAYERS, HEADS = fxpipe.setting("layers", 19), fxpipe.setting("heads", 24)
ROWS, SIDE, WORDS = fxpipe.setting("rows", 4), fxpipe.setting("side", 64), fxpipe.setting("words", 512)

compile_options = {"microbatches": ROWS, "schedule": "1f1b"}


def model():
    from diffusers import FluxTransformer2DModel
    from peft import LoraConfig

    if BASE:
        base = FluxTransformer2DModel.from_pretrained(BASE, subfolder="transformer", torch_dtype=torch.bfloat16)
    else:
        base = FluxTransformer2DModel(
            num_layers=LAYERS, num_single_layers=2 * LAYERS, num_attention_heads=HEADS, guidance_embeds=True
        ).to(torch.bfloat16)
    base.requires_grad_(False)
    base.enable_gradient_checkpointing()
    base.add_adapter(LoraConfig(r=16, lora_alpha=16, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
    return base


def loss(model, batch):
    """Flow matching: the model sees a mixture of picture and noise, and says which way the noise is."""
    latents, noise, sigma = batch["latents"], batch["noise"], batch["sigma"]
    [flow] = model(
        hidden_states=(1 - sigma) * latents + sigma * noise,
        timestep=sigma.flatten(),
        guidance=torch.ones_like(sigma.flatten()),
        encoder_hidden_states=batch["texts"],
        pooled_projections=batch["pooled"],
        img_ids=batch["places"],
        txt_ids=batch["text_places"],
        return_dict=False,
    )
    return (flow.float() - (noise - latents).float()).square().mean()


def optimizer(named_parameters):
    return torch.optim.AdamW([p for _, p in named_parameters], lr=1e-4)


def cached(draw):
    """A batch of latents (of 1024 × 1024 pixels by default) and texts, with the noise and time drawn for each row."""
    half = {"generator": draw, "dtype": torch.bfloat16}
    rows, columns = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    return {
        "latents": torch.randn(ROWS, SIDE**2, 64, **half),
        "noise": torch.randn(ROWS, SIDE**2, 64, **half),
        "sigma": torch.randn(ROWS, 1, 1, **half).sigmoid(),
        "texts": torch.randn(ROWS, WORDS, 4096, **half),
        "pooled": torch.randn(ROWS, 768, **half),
        "places": torch.stack([torch.zeros_like(rows), rows, columns], -1).view(-1, 3),
        "text_places": torch.zeros(WORDS, 3),
    }


class Cached:
    """The batches of a folder; without one, random ones."""

    def __init__(self):
        self.files = sorted(Path(CACHE).glob("*.pt")) if CACHE else [None] * 100

    def __len__(self):
        return len(self.files)

    def __iter__(self):
        draw = torch.Generator().manual_seed(0)
        for file in self.files:
            yield torch.load(file) if file else cached(draw)


def train_data():
    return Cached()

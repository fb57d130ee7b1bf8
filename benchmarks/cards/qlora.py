"""QLoRA: a Llama with 4-bit linear layers (bitsandbytes, NF4, double quantization), and adapters on all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import bitsandbytes as bnb
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from watched import adamw, resident

import fxpipe

IMPORTED = resident()
LAYERS, WIDTH = fxpipe.setting("layers", 12), fxpipe.setting("width", 512)
ROWS, TOKENS, STEPS = 8, fxpipe.setting("tokens", 96), 400


def model() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": WIDTH * 3, "num_hidden_layers": LAYERS}
    base = LlamaForCausalLM(LlamaConfig(vocab_size=1024, num_attention_heads=8, use_cache=False, **sizes))
    for module in base.model.modules():
        for name, linear in module.named_children():
            if type(linear) is nn.Linear:
                layer = bnb.nn.Linear4bit(
                    linear.in_features, linear.out_features, False, compute_dtype=torch.float32, quant_type="nf4"
                )
                layer.load_state_dict(linear.state_dict())
                setattr(module, name, layer.to("cpu"))
    base.is_loaded_in_4bit = True
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    adapted: nn.Module = get_peft_model(base.requires_grad_(False), LoraConfig(r=8, target_modules=names))
    return adapted


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    computed: Tensor = model(input_ids=batch, labels=batch).loss
    return computed


class Rows:
    """Minibatches of random tokens, (ROWS, TOKENS)."""

    def __len__(self) -> int:
        return STEPS

    def __iter__(self) -> Iterator[Tensor]:
        draw = torch.Generator().manual_seed(0)
        for _ in range(STEPS):
            yield torch.randint(1024, (ROWS, TOKENS), generator=draw)


def train_data() -> Rows:
    return Rows()


def optimizer(named_parameters: Sequence[tuple[str, nn.Parameter]]) -> Any:
    return adamw(named_parameters, IMPORTED)

"""QLoRA of a Llama of 8 billion parameters on two cards: will it fit, how fast, and then the training itself.

The linear layers of the base are packed in 4 bits (bitsandbytes, NF4, double quantization), adapters are trained in
float32, the rest computes in bfloat16. Nothing of it is loaded to plan:

    fxpipe plan examples/llama8b_qlora.py -n 2 --meta --device-spec rtx-4090 --links pcie4

To train, `base` is a folder or a name on the hub (without it, weights are random):

    fxpipe compile examples/llama8b_qlora.py -n 2 --meta --device cuda --set base=meta-llama/Llama-3.1-8B -o build/
    fxpipe run build/
"""

import ast
from pathlib import Path

import torch
from torch import nn

import fxpipe

BASE = fxpipe.setting("base", "")
LAYERS, WIDTH = fxpipe.setting("layers", 32), fxpipe.setting("width", 4096)
ROWS, TOKENS = fxpipe.setting("rows", 8), fxpipe.setting("tokens", 1024)

compile_options = {"microbatches": ROWS, "schedule": "1f1b"}


def packed(model):
    """The model with its linear layers, but for the head, in 4 bits."""
    import bitsandbytes as bnb

    for module in model.model.modules():
        for name, linear in module.named_children():
            if type(linear) is nn.Linear:
                size = linear.in_features, linear.out_features, False
                layer = bnb.nn.Linear4bit(*size, compute_dtype=torch.bfloat16, quant_type="nf4")
                layer.load_state_dict(linear.state_dict())
                setattr(module, name, layer.to(linear.weight.device))  # packs
    model.is_loaded_in_4bit = True  # peft asks for it
    return model


def base_model():
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

    if BASE:
        bits = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
        config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16, **bits)
        return AutoModelForCausalLM.from_pretrained(BASE, quantization_config=config, dtype=torch.bfloat16)
    heads = WIDTH // 128
    config = LlamaConfig(
        vocab_size=128256, hidden_size=WIDTH, intermediate_size=WIDTH * 7 // 2, num_hidden_layers=LAYERS,
        num_attention_heads=heads, num_key_value_heads=max(1, heads // 4), rope_theta=500000.0,
        max_position_embeddings=8192, use_cache=False,
    )  # fmt: skip
    return packed(LlamaForCausalLM(config).to(torch.bfloat16))


def model():
    from peft import LoraConfig, get_peft_model

    base = base_model().requires_grad_(False)
    base.gradient_checkpointing_enable({"use_reentrant": False})
    base.enable_input_require_grads()
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    return get_peft_model(base, LoraConfig(r=16, lora_alpha=32, target_modules=names, task_type="CAUSAL_LM"))


def loss(model, batch):
    return model(input_ids=batch, labels=batch).loss


def optimizer(named_parameters):
    return torch.optim.AdamW([p for _, p in named_parameters], lr=2e-4)


class Texts:
    """Minibatches of pieces of Python's standard library, in the base's tokens; without a base, in bytes."""

    def __len__(self):
        return 500

    def __iter__(self):
        text = "".join(file.read_text() for file in sorted(Path(ast.__file__).parent.glob("*.py"))[:40])
        tokens = torch.tensor(self.encode(text))
        draw = torch.Generator().manual_seed(0)
        for _ in range(len(self)):
            starts = torch.randint(len(tokens) - TOKENS, (ROWS,), generator=draw)
            yield torch.stack([tokens[start : start + TOKENS] for start in starts.tolist()])

    @staticmethod
    def encode(text):
        if not BASE:
            return list(text.encode())
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(BASE)(text)["input_ids"]


def train_data():
    return Texts()

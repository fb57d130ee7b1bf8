"""QLoRA on two workers: a base model in 4 bits, frozen, and adapters that are trained.

The base is the small Llama of hf_llama.py after a few steps on Python's standard library; its linear layers are packed
by bitsandbytes (NF4, double quantization). The adapters learn another corpus: the library's docstrings. A worker has
only the packed bytes of its layers. From the repository's root, with `pip install -c constraints.txt '.[packed,peft]'`:

    python examples/qlora.py

With a base from the hub, `model` is `from_pretrained(BASE, quantization_config=BitsAndBytesConfig(...))` and
`get_peft_model`, and nothing else changes.
"""

import ast
import tempfile
from pathlib import Path

import bitsandbytes as bnb
import hf_llama
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import fxpipe

BASE_STEPS, STEPS = 120, 80
LORA = LoraConfig(r=8, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"], task_type="CAUSAL_LM")


def adamw(named_parameters):
    return torch.optim.AdamW([p for _, p in named_parameters], lr=2e-3, betas=(0.9, 0.95))


def base_model():
    return LlamaForCausalLM(LlamaConfig(**hf_llama.model().config.to_dict() | {"intermediate_size": 384}))


def packed(model):
    """The model with its linear layers, but for the head, in 4 bits, and without a gradient."""
    for module in model.model.modules():
        for name, linear in module.named_children():
            if type(linear) is nn.Linear:
                size = linear.in_features, linear.out_features, False
                layer = bnb.nn.Linear4bit(*size, compute_dtype=torch.float32, quant_type="nf4")
                layer.load_state_dict(linear.state_dict())
                setattr(module, name, layer.to("cpu"))  # packs
    model.is_loaded_in_4bit = True  # peft asks for it
    return model.requires_grad_(False)


def docstrings(batches, seed):
    """Minibatches of paragraphs from the docstrings of the standard library."""
    texts = []
    for file in sorted(Path(ast.__file__).parent.glob("*.py")):
        tree = ast.parse(file.read_bytes())
        nodes = (n for n in ast.walk(tree) if isinstance(n, (ast.Module, ast.ClassDef, ast.FunctionDef)))
        texts += [part for node in nodes for part in (ast.get_docstring(node) or "").encode().split(b"\n\n")]
    chosen = [torch.frombuffer(bytearray(t), dtype=torch.uint8).long() for t in texts if 1 < len(t) <= hf_llama.CONTEXT]
    return hf_llama.Paragraphs(chosen, batches, seed)


def metrics(model, batch):
    return {"loss": model(**batch).loss}


def main():
    torch.manual_seed(0)
    common = {"workers": 2, "optimizer": adamw, "metrics": metrics}
    with tempfile.TemporaryDirectory() as folder:
        base, _ = fxpipe.fit(
            base_model(), hf_llama.loss, hf_llama.train_data, eval_data=hf_llama.eval_data, steps=BASE_STEPS,
            out=f"{folder}/base", **common,
        )  # fmt: skip
        base.save_pretrained(f"{folder}/llama")
        model = get_peft_model(packed(base), LORA)
        held_out = list(docstrings(10, seed=1))
        with torch.no_grad():
            before = sum(float(model(**batch).loss) for batch in held_out) / len(held_out)
        tuned, summary = fxpipe.fit(
            model, hf_llama.loss, lambda: docstrings(STEPS, seed=0), eval_data=held_out, steps=STEPS,
            out=f"{folder}/tuned", **common,
        )  # fmt: skip
        tuned.save_pretrained(f"{folder}/adapter")
        again = PeftModel.from_pretrained(
            packed(LlamaForCausalLM.from_pretrained(f"{folder}/llama")), f"{folder}/adapter"
        )
        with torch.no_grad():
            after = sum(float(again(**batch).loss) for batch in held_out) / len(held_out)
    print(
        f"docstrings: loss {before:.3f} of the base, {after:.3f} with adapters, as PeftModel.from_pretrained loads them"
    )
    assert after < before - 0.1
    assert abs(after - summary["evaluation"]["loss"]) < 1e-3


if __name__ == "__main__":
    main()

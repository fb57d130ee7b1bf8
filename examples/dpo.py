"""DPO with LoRA on two workers, by TRL's DPOTrainer: a small Llama learns to prefer docstrings to shuffled ones.

The base is the small Llama of hf_llama.py after some steps on Python's standard library; a token is a byte. A pair is
what a function of that library is called, with its docstring's first line, and with the words of that line shuffled.
The file is a script and a model file at once. From the repository's root, with
`pip install -c constraints.txt '.[trl]'`:

    python examples/dpo.py

As a model file it gives `trl_hooks` what a script gives DPOTrainer. It is compiled for two workers and run, and the
adapter is loaded by `PeftModel.from_pretrained`.
"""

import ast
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import hf_llama
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn import functional as F
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode
from trl import DPOConfig, DPOTrainer

import fxpipe
from fxpipe.adapters.transformers import save_pretrained
from fxpipe.adapters.trl import trl_hooks

BASE_STEPS, PAIRS, HELD_OUT, BETA = 60, 240, 24, 0.1
FOLDER = Path(os.environ.setdefault("DPO_FOLDER", tempfile.mkdtemp()))  # the workers' is that of the script
LORA = LoraConfig(r=8, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"], task_type="CAUSAL_LM")


def base_model():
    return LlamaForCausalLM.from_pretrained(FOLDER / "llama")


def make_args():
    return DPOConfig(
        output_dir=str(FOLDER / "trainer"),
        precompute_ref_log_probs=True,
        beta=BETA,
        learning_rate=2e-3,
        num_train_epochs=1,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=8,
        pad_to_multiple_of=hf_llama.CONTEXT,  # all batches have one length
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        report_to=[],
    )


def tokenizer():
    """One token a byte, as in hf_llama.py; two bytes that no text has are those of padding and of the end."""
    names = bytes_to_unicode()
    made = Tokenizer(models.BPE(vocab={name: byte for byte, name in names.items()}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token=names[0], eos_token=names[4])


def pairs():
    """Prompts with a chosen and a rejected answer."""
    draw, found = random.Random(0), {}
    for file in sorted(Path(ast.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.FunctionDef) and (text := ast.get_docstring(node)):
                line = text.splitlines()[0]
                shuffled = " ".join(draw.sample(line.split(), len(line.split())))
                prompt = f'def {node.name}():\n    """'
                if shuffled != line and len(f"{prompt}{line}".encode()) < hf_llama.CONTEXT:
                    found[line] = {"prompt": prompt, "chosen": line, "rejected": shuffled}
    return draw.sample(list(found.values()), PAIRS + HELD_OUT)


def on_disk(rows):
    """The rows as a file: next to it, the trainer keeps what it has computed of them for the run that follows."""
    return Dataset.from_generator(lambda: iter(rows), cache_dir=str(FOLDER / "rows"))


def score(model, row, answer):
    """The logarithm of the probability of an answer."""
    prompt, answer = (torch.tensor([*text.encode()]) for text in (row["prompt"], row[answer] + "\4"))
    with torch.no_grad():
        logits = model(input_ids=torch.cat([prompt, answer])[None]).logits[0, len(prompt) - 1 : -1]
    return -F.cross_entropy(logits, answer, reduction="sum").item()


def margin(model, rows):
    """The reward of chosen answers above that of rejected ones, against the model without adapters."""
    ahead = sum(score(model, row, "chosen") - score(model, row, "rejected") for row in rows)
    with model.disable_adapter():
        before = sum(score(model, row, "chosen") - score(model, row, "rejected") for row in rows)
    return BETA * (ahead - before) / len(rows)


def main():
    torch.manual_seed(0)
    base, _ = fxpipe.fit(
        hf_llama.model(), hf_llama.loss, hf_llama.train_data, optimizer=hf_llama.optimizer, steps=BASE_STEPS,
        out=FOLDER / "base",
    )  # fmt: skip
    base.save_pretrained(FOLDER / "llama")
    os.environ["OMP_NUM_THREADS"] = "1"  # of the commands: a core for each worker
    command = [sys.executable, "-m", "fxpipe"]
    subprocess.run([*command, "compile", __file__, "-n", "2", "--cost", "analytic", "-o", FOLDER / "build"], check=True)
    running = [*command, "run", FOLDER / "build", "--out", FOLDER / "out", "--json"]
    summary = json.loads(subprocess.run(running, check=True, stdout=subprocess.PIPE).stdout)
    save_pretrained(__file__, FOLDER / "out" / "model.safetensors", FOLDER / "adapter")
    tuned = PeftModel.from_pretrained(base_model(), FOLDER / "adapter")
    own = margin(tuned, pairs()[PAIRS:])
    evaluation = summary["evaluation"]
    print(
        f"{summary['steps']} steps: held-out docstrings are preferred in {evaluation['rewards/accuracies']:.0%}, "
        f"by a margin of {own:.2f}, as PeftModel.from_pretrained loads the adapter"
    )
    assert evaluation["rewards/accuracies"] > 0.7
    assert own > 0.1
    assert abs(own - evaluation["rewards/margins"]) < 1e-2


if __name__ == "__main__":
    main()
else:
    given = pairs()
    globals().update(
        trl_hooks(
            DPOTrainer,
            model=base_model,
            args=make_args,
            train_dataset=on_disk(given[:PAIRS]),
            eval_dataset=on_disk(given[PAIRS:]),
            processing_class=tokenizer(),
            peft_config=LORA,
        )
    )

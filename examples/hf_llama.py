"""A small Llama of Hugging Face transformers, as the library has it, that learns Python from Python's standard library.

Nothing is downloaded, and nothing of the model is changed for pipelining: key-value cache and loss are the library's
defaults. The functions at the end are what fxpipe looks for by name. From the repository's root:

    fxpipe compile examples/hf_llama.py -n 4 -o build/ --verify
    fxpipe run build/

`compile` needs transformers; the emitted stages are plain PyTorch, and their workers never import it.
"""

import os
from pathlib import Path

import torch

CONTEXT = 64  # bytes a sample is long
BATCH = 8  # samples in a minibatch
EPOCH = 500  # minibatches in an epoch
EVAL_BATCHES = 20

HELD_OUT = {"argparse.py", "dataclasses.py", "heapq.py", "statistics.py", "threading.py", "zipfile.py"}


def read_library(held_out: bool) -> torch.Tensor:
    """The bytes of the standard library's top-level modules, in alphabetical order."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    text = b"\n".join(file.read_bytes() for file in files if (file.name in HELD_OUT) == held_out)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


class Windows:
    """Minibatches of random windows of a text; transformers shifts the labels by one itself."""

    def __init__(self, text: torch.Tensor, batches: int, seed: int) -> None:
        self.text, self.batches = text, batches
        self.generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return self.batches

    def __iter__(self):
        for _ in range(self.batches):
            starts = torch.randint(len(self.text) - CONTEXT, (BATCH, 1), generator=self.generator)
            window = self.text[starts + torch.arange(CONTEXT)]
            yield {"input_ids": window, "labels": window.clone()}


def model():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT,
    )
    return LlamaForCausalLM(config)


def loss(model, batch):
    return model(**batch).loss


def train_data():
    return Windows(read_library(held_out=False), EPOCH, seed=torch.initial_seed())


def optimizer(named_parameters):
    return torch.optim.AdamW(named_parameters, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)


def eval_data():
    return list(Windows(read_library(held_out=True), EVAL_BATCHES, seed=0))


def metrics(model, batch):
    return {"loss": model(**batch).loss}

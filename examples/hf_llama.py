"""A small Llama of Hugging Face transformers, as the library has it, that learns Python from Python's standard library.

Nothing is downloaded, and nothing of the model is changed for pipelining: key-value cache and loss are the library's
defaults. Samples are whole paragraphs, padded to one length, so that microbatches have different numbers of bytes to
learn: the loss is the mean over those of the whole minibatch all the same. The functions at the end are what fxpipe
looks for by name. From the repository's root:

    fxpipe compile examples/hf_llama.py -n 4 --schedule 1f1b --microbatches 4 -o build/ --verify
    fxpipe run build/

`compile` needs transformers; the emitted stages are plain PyTorch, and their workers never import it.
"""

import os
from pathlib import Path

import torch

CONTEXT = 128  # bytes a sample is long, with its padding
BATCH = 8  # samples in a minibatch
EPOCH = 500  # minibatches in an epoch
EVAL_BATCHES = 20

HELD_OUT = {"argparse.py", "dataclasses.py", "heapq.py", "statistics.py", "threading.py", "zipfile.py"}


def read_library(held_out: bool) -> list[torch.Tensor]:
    """The bytes of each paragraph of the standard library's top-level modules that is not longer than a sample."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    text = b"\n\n".join(file.read_bytes() for file in files if (file.name in HELD_OUT) == held_out)
    paragraphs = [p for p in text.split(b"\n\n") if 1 < len(p) <= CONTEXT]
    return [torch.frombuffer(bytearray(p), dtype=torch.uint8).long() for p in paragraphs]


class Paragraphs:
    """Minibatches of random paragraphs, padded; transformers shifts the labels by one itself."""

    def __init__(self, paragraphs: list[torch.Tensor], batches: int, seed: int) -> None:
        self.paragraphs, self.batches = paragraphs, batches
        self.generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return self.batches

    def __iter__(self):
        for _ in range(self.batches):
            drawn = torch.randint(len(self.paragraphs), (BATCH,), generator=self.generator)
            ids = torch.zeros(BATCH, CONTEXT, dtype=torch.long)
            mask = torch.zeros_like(ids)
            for row, i in enumerate(drawn):
                text = self.paragraphs[i]
                ids[row, : len(text)], mask[row, : len(text)] = text, 1
            yield {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


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
    return Paragraphs(read_library(held_out=False), EPOCH, seed=torch.initial_seed())


def optimizer(named_parameters):
    return torch.optim.AdamW(named_parameters, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)


def eval_data():
    return list(Paragraphs(read_library(held_out=True), EVAL_BATCHES, seed=0))


def metrics(model, batch):
    return {"loss": model(**batch).loss}

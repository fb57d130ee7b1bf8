"""Fine-tuning on pairs of texts, as for GLUE, with LoRA of peft on a small BERT of transformers.

Does the second of two lines of Python stand deeper than the first? They are from Python's standard library, in bytes,
without their margins: nothing is downloaded. A real run would begin with BertForSequenceClassification.from_pretrained.
This BERT has random weights, so its embeddings are trained, too, beside the adapters and the classifier. From the
repository's root:

    fxpipe compile examples/glue_lora.py -n 2 -o build/ --verify
    fxpipe run build/ --epochs 2 --eval-every epoch
"""

import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

LENGTH = 48  # bytes of a pair: [CLS] end of the first [SEP] beginning of the second [SEP], padded
FIRST = 28  # bytes of the first line
BATCH = 32
TRAINED, HELD_OUT = 3200, 640  # pairs
CLS, SEP, PAD = 256, 257, 258
LEARNING_RATE = 1e-3

HELD_OUT_FILES = {"argparse.py", "dataclasses.py", "heapq.py", "statistics.py", "threading.py", "zipfile.py"}


def read_pairs(count: int, held_out: bool) -> list[tuple[bytes, bytes, int]]:
    """Neighbouring lines, without their margins, and whether the second stands deeper: half of them do."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    texts = [file.read_bytes() for file in files if (file.name in HELD_OUT_FILES) == held_out]
    found: tuple[list[Any], list[Any]] = ([], [])
    for text in texts:
        lines = [line for line in text.splitlines() if line.strip()]
        for first, second in pairwise(lines):
            deeper = len(second) - len(second.lstrip()) > len(first) - len(first.lstrip())
            found[deeper].append((first.strip(), second.strip(), int(deeper)))
    generator = torch.Generator().manual_seed(int(held_out))
    return [each[i] for each in found for i in torch.randint(len(each), (count // 2,), generator=generator).tolist()]


def collate(pairs):
    """A batch as a tokenizer and a padding collator make it, always LENGTH long."""
    ids = torch.full((len(pairs), LENGTH), PAD)
    types = torch.zeros_like(ids)
    for row, (first, second, _) in enumerate(pairs):
        one, two = [CLS, *first[-FIRST:], SEP], [*second[: LENGTH - FIRST - 3], SEP]
        ids[row, : len(one) + len(two)] = torch.tensor(one + two)
        types[row, len(one) : len(one) + len(two)] = 1
    labels = torch.tensor([label for _, _, label in pairs])
    return {"input_ids": ids, "token_type_ids": types, "attention_mask": (ids != PAD).long(), "labels": labels}


def model():
    from peft import LoraConfig, TaskType, get_peft_model
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=259,
        hidden_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=192,
        max_position_embeddings=LENGTH,
        pad_token_id=PAD,
        num_labels=2,
        problem_type="single_label_classification",
        initializer_range=0.1,  # the random layers that are not trained must pass something on
    )
    lora = LoraConfig(
        task_type=TaskType.SEQ_CLS,
        r=16,
        lora_alpha=32,
        target_modules=["query", "key", "value", "dense"],
        modules_to_save=["classifier", "word_embeddings", "position_embeddings"],
    )
    return get_peft_model(BertForSequenceClassification(config), lora)


def loss(model, batch):
    return model(**batch).loss


def train_data():
    pairs = read_pairs(TRAINED, held_out=False)
    return DataLoader(pairs, BATCH, shuffle=True, drop_last=True, collate_fn=collate)


def optimizer(named_parameters):
    return torch.optim.AdamW([p for _, p in named_parameters], lr=LEARNING_RATE, weight_decay=0.01)


def lr_scheduler(optimizer):
    return torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.05, total_iters=50)


def eval_data():
    return DataLoader(read_pairs(HELD_OUT, held_out=True), BATCH, collate_fn=collate)


def metrics(model, batch):
    made = model(**batch)
    right = made.logits.argmax(-1) == batch["labels"]
    return {"loss": made.loss, "accuracy": right.float().mean()}

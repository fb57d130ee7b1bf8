"""Trainer of transformers and fxpipe train the same BERT: 400 rows in batches of 32, a smaller last batch, early end.

    python examples/trainer_adapter.py

The file is a training script and a model file at once. It compiles itself for two workers with a synchronous schedule,
runs that in two processes, trains from the same weights with `Trainer.train`, and prints both. It fails where they
differ by more than rounding. TrainingArguments are options of `fxpipe compile` and `fxpipe run`:

    fxpipe compile examples/trainer_adapter.py -n 2 --schedule 1f1b --microbatches 2 -o build/
    fxpipe run build/
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import BertConfig, BertForSequenceClassification, EarlyStoppingCallback, Trainer, TrainingArguments

from fxpipe.adapters.transformers import trainer_hooks

CLASSES, VOCABULARY, LENGTH = 3, 64, 12


def make():
    """A small BERT without dropout: each worker would draw for itself."""
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=CLASSES,
    )
    return BertForSequenceClassification(config)


def samples(count, seed):
    """The first token decides the class; one label in ten is another."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCABULARY, (count, LENGTH), generator=generator)
    noise = torch.randint(CLASSES, (count,), generator=generator)
    labels = torch.where(torch.rand(count, generator=generator) < 0.1, noise, ids[:, 0] % CLASSES)
    return [{"input_ids": row, "labels": int(label)} for row, label in zip(ids, labels, strict=True)]


def make_args():
    return TrainingArguments(
        output_dir=str(Path(tempfile.gettempdir()) / "trainer-adapter"),
        num_train_epochs=12,
        per_device_train_batch_size=32,
        per_device_eval_batch_size=32,
        learning_rate=3e-3,
        weight_decay=0.01,
        warmup_steps=0.1,
        lr_scheduler_type="cosine",
        max_grad_norm=1.0,
        eval_strategy="epoch",
        save_strategy="best",
        metric_for_best_model="f1",
        load_best_model_at_end=True,
        logging_strategy="steps",
        logging_steps=1,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )


def compute_metrics(evaluated):
    logits, labels = evaluated
    found = logits.argmax(-1)
    right = [((found == k) & (labels == k)).sum() for k in range(CLASSES)]
    f1 = [2 * right[k] / max(1, (found == k).sum() + (labels == k).sum()) for k in range(CLASSES)]
    return {"f1": np.mean(f1), "accuracy": (found == labels).mean()}


def given():
    """What a Trainer is given besides the model and its arguments; made anew, because callbacks remember."""
    return {
        "train_dataset": samples(400, 0),
        "eval_dataset": samples(120, 1),
        "compute_metrics": compute_metrics,
        "callbacks": [EarlyStoppingCallback(2)],
    }


globals().update(trainer_hooks(model=make, args=make_args, **given()))


def by_trainer(weights):
    """What `Trainer.train` makes of these weights."""
    model = make()
    model.load_state_dict(weights, strict=False)  # docs/reference/files.md: a build has other tensors, too
    trainer = Trainer(model=model, args=make_args(), **given())
    trainer.train()
    return trainer


def by_fxpipe(folder):
    """What `fxpipe run` makes of this file: its summary, its first weights and the best ones."""
    command = [sys.executable, "-m", "fxpipe"]
    compiling = ["compile", __file__, "-n", "2", "--schedule", "1f1b", "--microbatches", "2", "-o", folder / "build"]
    subprocess.run([*command, *compiling], check=True)
    running = ["run", folder / "build", "--threads", "1", "--out", folder / "out", "--json"]
    summary = json.loads(subprocess.run([*command, *running], check=True, stdout=subprocess.PIPE).stdout)
    return summary, load_file(folder / "build" / "weights.safetensors"), load_file(folder / "out" / "best.safetensors")


def main():
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        found, first, best = by_fxpipe(Path(name))
    trainer = by_trainer(first)
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    rows = [row for row in trainer.state.log_history if "eval_loss" in row]
    steps, last = len(losses), {name: rows[-1][f"eval_{name}"] for name in ("loss", "f1", "accuracy")}
    apart = max(abs(mine - its) for mine, its in zip(found["losses"], losses, strict=False))
    metrics = max(
        abs(mine["metrics"][name] - row[f"eval_{name}"])
        for mine, row in zip(found["evaluations"], rows, strict=False)
        for name in last
    )
    trained = trainer.model.state_dict()  # those of the best evaluation: load_best_model_at_end
    weights = max(float((best[name] - value).abs().max()) for name, value in trained.items())
    print(f"\nan epoch: {-(-400 // 32)} steps, the last one of {400 % 32} rows")
    print(f"early end: Trainer after step {steps}, fxpipe after {found['steps']}, because of {found['stopped']}")
    print(f"losses of {steps} steps: at most {apart:.1e} apart, from {losses[0]:.4f} to {losses[-1]:.4f}")
    print(f"metrics of {len(rows)} evaluations: at most {metrics:.1e} apart; the last: {last}")
    print(f"best weights: f1 {found['best']['value']:.4f} of step {found['best']['step']}, at most {weights:.1e} apart")
    if max(apart, metrics, weights) > 5e-3:
        sys.exit("they differ by more than rounding")


if __name__ == "__main__":
    main()

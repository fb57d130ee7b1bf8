"""Lightning's Trainer and fxpipe train the same module: 400 rows in batches of 32, a smaller last batch, early end.

    python examples/lightning_adapter.py

The file is a training script and a model file at once. It compiles itself for two workers with a synchronous schedule,
runs that in two processes, trains from the same weights with `Trainer.fit`, and prints both. It fails where they differ
by more than rounding. The settings of the Trainer are options of `fxpipe compile` and `fxpipe run`:

    fxpipe compile examples/lightning_adapter.py -n 2 --schedule 1f1b --microbatches 2 -o build/
    fxpipe run build/
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import Accuracy, F1Score

from fxpipe.adapters.lightning import lightning_hooks

CLASSES, FEATURES = 4, 16
KIND = {"task": "multiclass", "num_classes": CLASSES}


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        layers = [nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, CLASSES)]
        self.net = nn.Sequential(*layers)
        self.accuracy = Accuracy(**KIND)
        self.f1 = F1Score(average="macro", **KIND)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        self.log("val_loss", F.cross_entropy(logits, y))
        for name in ("accuracy", "f1"):
            metric = getattr(self, name)
            metric(logits, y)
            self.log(name, metric)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02, weight_decay=0.01)
        falling = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0.2, self.trainer.estimated_stepping_batches)
        return [optimizer], [{"scheduler": falling, "interval": "step"}]


class Points(L.LightningDataModule):
    """Which of the first four features is the largest; one label in ten is another."""

    def setup(self, stage):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(520, FEATURES, generator=generator)
        noise = torch.randint(CLASSES, (520,), generator=generator)
        y = torch.where(torch.rand(520, generator=generator) < 0.1, noise, x[:, :CLASSES].argmax(1))
        self.rows, self.held_out = TensorDataset(x[:400], y[:400]), TensorDataset(x[400:], y[400:])

    def train_dataloader(self):
        return DataLoader(self.rows, 32, shuffle=True, generator=torch.Generator().manual_seed(1))

    def val_dataloader(self):
        return DataLoader(self.held_out, 32)


def settings(folder="lightning"):
    """The keywords of the Trainer; made anew for each, because callbacks remember."""
    return {
        "max_epochs": 12,
        "gradient_clip_val": 1.0,
        "accelerator": "cpu",
        "callbacks": [
            EarlyStopping("val_loss", patience=2, min_delta=0.01),
            ModelCheckpoint(folder, monitor="f1", mode="max"),
        ],
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }


globals().update(lightning_hooks(Classifier, data=Points, **settings()))


class Kept(L.Callback):
    """The losses of all steps, and the metrics of all evaluations."""

    def __init__(self):
        self.losses, self.evaluations = [], []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.losses.append(float(outputs["loss"]))

    def on_validation_end(self, trainer, module):
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self.evaluations.append({"step": trainer.global_step, "metrics": metrics})


def by_lightning(weights, folder):
    """What `Trainer.fit` makes of these weights: its losses and evaluations, and the best weights."""
    module, kept, given = Classifier(), Kept(), settings(folder / "lightning")
    module.load_state_dict(weights, strict=False)  # docs/reference/files.md: a build has other tensors, too
    best = given["callbacks"][1]
    given["callbacks"].append(kept)
    L.Trainer(**given, num_sanity_val_steps=0, default_root_dir=folder).fit(module, Points())
    return kept, torch.load(best.best_model_path)["state_dict"]


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
        kept, their_best = by_lightning(first, Path(name))
    steps, rows = len(kept.losses), len(kept.evaluations)
    evaluations = found["evaluations"][:rows]
    apart = max(abs(mine - its) for mine, its in zip(found["losses"], kept.losses, strict=False))
    metrics = max(
        abs(mine["metrics"][name] - value)
        for mine, its in zip(evaluations, kept.evaluations, strict=True)
        for name, value in its["metrics"].items()
    )
    weights = max(float((value - their_best[name]).abs().max()) for name, value in best.items())
    print(f"\nan epoch: {-(-400 // 32)} steps, the last one of {400 % 32} rows")
    print(f"early end: Lightning after step {steps}, fxpipe after {found['steps']}, because of {found['stopped']}")
    print(f"losses of {steps} steps: at most {apart:.1e} apart, from {kept.losses[0]:.4f} to {kept.losses[-1]:.4f}")
    print(f"metrics of {rows} evaluations: at most {metrics:.1e} apart; the last: {kept.evaluations[-1]['metrics']}")
    print(f"best weights: f1 {found['best']['value']:.4f} of step {found['best']['step']}, at most {weights:.1e} apart")
    if max(apart, metrics, weights) > 1e-3:
        sys.exit("they differ by more than rounding")


if __name__ == "__main__":
    main()

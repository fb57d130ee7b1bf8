"""Compile and train in one call, from a script or a notebook: handwritten digits on two workers.

It starts two processes, or takes those of torchrun (torchrun --nproc-per-node 2 examples/fit.py).
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import fxpipe


def loss(model, batch):
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def metrics(model, batch):
    images, labels = batch
    return {"accuracy": (model(images).argmax(1) == labels).float().mean()}


def main() -> None:
    digits = load_digits()
    images, labels = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16, torch.tensor(digits.target)
    data = DataLoader(TensorDataset(images[:1408], labels[:1408]), batch_size=64, shuffle=True)
    held_out = DataLoader(TensorDataset(images[1408:], labels[1408:]), batch_size=389)

    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(128, 128), nn.LayerNorm(128), nn.GELU())]
    model = nn.Sequential(nn.Linear(64, 128), *layers, nn.Linear(128, 10))

    trained = fxpipe.fit(
        model,
        loss,
        data,
        workers=2,
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-3),
        eval_data=held_out,
        metrics=metrics,
        epochs=10,
        out="out-fit",
    )
    if trained is not None:  # the first process of torchrun's
        model, summary = trained
        model.eval()
        print(f"loss {summary['losses'][-1]:.3f}, accuracy {summary['evaluation']['accuracy']:.3f}")
        print(f"the first image is a {model(images[:1]).argmax().item()}: {labels[0].item()}")


if __name__ == "__main__":
    main()

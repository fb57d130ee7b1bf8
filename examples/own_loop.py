"""A loop of one's own over processes: early stopping and a falling learning rate, decided by what was evaluated.

Handwritten digits (scikit-learn's, no download) and a plain network, on as many workers as torchrun starts processes.
Each process runs all of this file, and one stage of the pipeline:

    torchrun --nproc-per-node 2 examples/own_loop.py

What a call returns is the same in every process, so all decide alike. The batches are those of the first one.
"""

import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import fxpipe

BUILD, BEST = "build-own-loop", "out-own-loop/best"
BATCH = 64  # images in a minibatch
EPOCHS = int(os.environ.get("EPOCHS", "12"))
PATIENCE = 2  # epochs without a better accuracy, after which the rate falls; after twice as many the loop ends


def model() -> nn.Module:
    layers = [layer for _ in range(4) for layer in (nn.Linear(128, 128), nn.LayerNorm(128), nn.GELU())]
    return nn.Sequential(nn.Linear(64, 128), *layers, nn.Linear(128, 10))


def loss(net, batch):
    images, labels = batch
    return F.cross_entropy(net(images), labels)


def metrics(net, batch):
    images, labels = batch
    scores = net(images)
    return {"loss": F.cross_entropy(scores, labels), "accuracy": (scores.argmax(1) == labels).float().mean()}


def optimizer(named_parameters):
    return torch.optim.SGD([p for _, p in named_parameters], lr=0.03, momentum=0.9)


def batches(images: torch.Tensor, labels: torch.Tensor, order: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Whole minibatches, in an order."""
    return [(images[rows], labels[rows]) for rows in order.split(BATCH) if len(rows) == BATCH]


def compile_once(rank: int, workers: int, example, held_out) -> None:
    """The first process compiles; the others wait for the build."""
    if rank == 0:
        torch.manual_seed(0)
        fxpipe.compile(
            model(), loss, example, workers=workers, optimizer=optimizer, evaluation=(metrics, held_out)
        ).save(BUILD)
    dist.barrier()


def main() -> None:
    found = load_digits()
    images, labels = torch.tensor(found.images, dtype=torch.float32).flatten(1) / 16, torch.tensor(found.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    held_out = batches(images, labels, order[: 6 * BATCH])
    rest = order[6 * BATCH :]

    dist.init_process_group("gloo")  # as most scripts do; fxpipe takes it
    rank, workers = dist.get_rank(), dist.get_world_size()
    compile_once(rank, workers, held_out[0], held_out)

    best, since = 0.0, 0
    shuffled = torch.Generator().manual_seed(1)
    with fxpipe.join(BUILD, optimizer=optimizer) as pipeline:
        for epoch in range(1, EPOCHS + 1):
            losses = []
            for batch in batches(images, labels, rest[torch.randperm(len(rest), generator=shuffled)]):
                losses.append(pipeline.step(batch))
            pipeline.flush()  # an evaluation takes weights that all workers have updated equally often
            measured = pipeline.evaluate(held_out)
            mean = sum(float(value) for value in losses) / len(losses)
            if rank == 0:
                text = " ".join(f"{name} {value:.3f}" for name, value in measured.items())
                print(f"epoch {epoch}: training loss {mean:.3f}, held out: {text}", flush=True)
            since = 0 if measured["accuracy"] > best else since + 1
            if since == 0:
                best = measured["accuracy"]
                pipeline.save(BEST)
            elif since == PATIENCE:
                pipeline.set_lr(0.003)
            elif since == 2 * PATIENCE:
                break
        pipeline.load(BEST)
        again = pipeline.evaluate(held_out)
    if rank == 0:
        print(f"best accuracy {again['accuracy']:.3f}, weights in {BEST}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

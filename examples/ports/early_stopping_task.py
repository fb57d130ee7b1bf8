"""early_stopping.py for fxpipe, with its own loop: torchrun --nproc-per-node 2 early_stopping_task.py BUILD"""

import json
import sys

import torch
from early_stopping import EPOCHS, PATIENCE, RATE, loaders
from early_stopping import criterion as loss
from early_stopping import make_model as model
from early_stopping import measured as metrics

__all__ = ["eval_data", "loss", "metrics", "model", "optimizer", "train_data"]


def train_data():
    return loaders()[0]


def optimizer(named_parameters):
    return torch.optim.SGD([p for _, p in named_parameters], lr=RATE, momentum=0.9)


def eval_data():
    return loaders()[1]


def main(pipeline, folder):
    train, val = loaders()
    losses, best, since, rate = [], float("inf"), 0, RATE
    for _ in range(EPOCHS):
        losses += pipeline.run(train)
        found = pipeline.evaluate(val)["loss"]
        if found < best:
            best, since = found, 0
            pipeline.save(folder)
        else:
            rate, since = 0.3 * rate, since + 1
            pipeline.set_lr(rate)
        if since == PATIENCE:
            break
    pipeline.load(folder)
    return losses, {**pipeline.evaluate(val), "rate": rate}


if __name__ == "__main__":
    import fxpipe

    with fxpipe.join(sys.argv[1], optimizer=optimizer) as made:
        sys.stdout.write(json.dumps(main(made, "best")) + "\n")

"""Trains a model file of this benchmark in one process of eager PyTorch, and prints the seconds of each minibatch."""

from __future__ import annotations

import importlib
import json
import os
import sys
import time

import torch

from fxpipe.settings import pairs, use


def main(name: str, threads: int, steps: int, settings: list[str]) -> None:
    """Train; `settings` are those of `fxpipe.setting`, as `layers=2`."""
    os.environ["RANK"] = "0"
    torch.set_num_threads(threads)
    use(pairs(settings))
    subject = importlib.import_module(name)
    model = subject.model()
    optimizer = subject.optimizer(list(model.named_parameters()))
    seconds = []
    for _, batch in zip(range(steps), subject.train_data(), strict=False):
        begin = time.perf_counter()
        optimizer.zero_grad()
        subject.loss(model, batch).backward()
        optimizer.step()
        seconds.append(time.perf_counter() - begin)
    print(json.dumps(seconds))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])

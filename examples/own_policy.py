"""A policy of your own: which weights every forward and every backward sees, in one class and one line before it.

`halfway` is such a policy. This file is a script that compares it with others on examples/digits.py, and a model file
with which every worker of a run knows it, since every worker imports this file. From the repository's root:

    python examples/own_policy.py            # or with --quick, in seconds, only to see that it runs

    fxpipe compile examples/own_policy.py -n 2 -o build/
    fxpipe run build/ --policy halfway
    fxpipe run build/ --policy halfway+down
"""

import sys
from dataclasses import dataclass
from itertools import chain, islice, repeat
from statistics import mean

import torch
from digits import eval_data, loss, metrics, model, train_data

import fxpipe
from fxpipe import policy, schedule

__all__ = ["eval_data", "loss", "metrics", "model", "optimizer", "train_data"]  # what makes this a model file

WORKERS = 4
STEPS = 60
SEEDS = 5
LEARNING_RATE = 0.07  # high enough for stale weights to hurt


@policy.register
@dataclass(frozen=True)
class Halfway(policy.PredictingPolicy):
    """A forward sees weights predicted half as far as it is behind: a long prediction may be worse than none.

    A forward of minibatch m has version v of the weights, m − v updates short of what its own update will meet.
    `F3@1+1` is the forward of minibatch 3 with the weights after 1 update, predicted 1 further:

        worker 0: F0@0   F1@0+1 F2@0+1 ..     ..     B0@0   F3@1+1 B1@1   ..     B2@2   ..     B3@3
        worker 1: ..     F0@0   F1@0+1 ..     B0@0   F2@1+1 B1@1   F3@2+1 B2@2   ..     B3@3
        worker 2: ..     ..     F0@0   B0@0   F1@1   B1@1   F2@2   B2@2   F3@3   B3@3

    Attributes:
        down: half of an odd number is rounded down, not up.
    """

    name = "halfway"

    down: bool = False  # what is annotated is an option

    def ahead(self, action, version, owner, schedule):
        behind = action.minibatch - version
        return behind // 2 if self.down else (behind + 1) // 2


def optimizer(named_parameters):
    return torch.optim.SGD(named_parameters, lr=LEARNING_RATE, momentum=0.9, weight_decay=1e-4)


def train(build, name, seed, steps):
    """The mean loss of the last 10 steps, and the held-out accuracy."""
    torch.manual_seed(seed)  # of the order of the data
    pipeline = build.local(optimizer=optimizer, policy=name)
    losses = pipeline.run(islice(chain.from_iterable(repeat(train_data())), steps))  # epoch after epoch
    trained = model().eval()
    trained.load_state_dict(pipeline.state_dict())
    with torch.no_grad():
        accuracies = [float(metrics(trained, batch)["accuracy"]) for batch in eval_data()]
    return mean(losses[-10:]), mean(accuracies)


def main(steps=STEPS, seeds=SEEDS):
    """Print what `halfway` sees, then a table of what it makes of the digits beside others."""
    torch.set_num_threads(1)
    print(policy.sees(Halfway(), schedule.make("async", WORKERS), minibatches=6), end="\n\n")
    results = {name: [] for name in ("latest", "stash", "halfway", "halfway+down", "pipeoptim")}
    for seed in range(seeds):
        torch.manual_seed(seed)
        batch, options = next(iter(train_data())), {"workers": WORKERS, "cuts": "same", "cost": "analytic"}
        build = fxpipe.compile(model(), loss, batch, **options, microbatches=1)  # with more, weights are hardly stale
        for name, found in results.items():
            found.append(train(build, name, seed, steps))
    print(f"{steps} steps on {WORKERS} workers, means of {seeds} seeds\n\n{'policy':<14}{'loss':>8}{'accuracy':>10}")
    for name, found in results.items():
        losses, accuracies = zip(*found, strict=True)
        print(f"{name:<14}{mean(losses):>8.3f}{mean(accuracies):>10.3f}")


if __name__ == "__main__":
    main(*((12, 1) if "--quick" in sys.argv else ()))

"""A codec of your own: how values are written in fewer bytes to cross slow links, in one class.

`signs` is such a codec, for gradients: one bit a value. This file is a script that compares it with others on
examples/digits.py, and a model file with which every worker of a run knows it, since every worker imports this file.
From the repository's root:

    python examples/own_codec.py            # or with --quick, in seconds, only to see that it runs

    fxpipe compile examples/own_codec.py -n 2 --codec gradient=signs --verify -o build/
    fxpipe run build/
"""

import sys
from dataclasses import dataclass
from itertools import chain, islice, repeat
from statistics import mean

import torch
from digits import eval_data, loss, metrics, model, train_data

import fxpipe
from fxpipe import codecs
from fxpipe.codecs.carry_over import CarryOver
from fxpipe.codecs.lossless import Bits
from fxpipe.inspection.sentences import codec_facts
from fxpipe.plan.spec import TensorSpec

__all__ = ["eval_data", "loss", "metrics", "model", "optimizer", "train_data"]  # what makes this a model file

WORKERS = 3
STEPS = 150
SEEDS = 3
BITS = Bits()


@codecs.register
@dataclass(frozen=True)
class Signs(CarryOver):
    """The signs, and the means of the values that are at least 0 and of the others, in whose place they are read.

    What is lost is added to the next message of the same edge: `CarryOver` sees to it, and asks for C in `compress`.

    Packed: uint8[8 + n/8], two float32, then a bit for each of n values.

    Source: Seide et al., 1-bit Stochastic Gradient Descent (2014), with one pair of means for the whole tensor.
    """

    name = "signs"

    def packed(self, tensor):
        return TensorSpec((8 + BITS.packed(tensor).shape[0],), (1,), "uint8")

    def compress(self, target, state):
        up = target >= 0
        counts = torch.stack([up.sum(), (~up).sum()]).clamp(min=1)
        means = torch.stack([(target * up).sum(), (target * ~up).sum()]) / counts
        return torch.cat([means.view(torch.uint8), BITS.encode(up, None)]), {}  # nothing else to remember

    def decode(self, packed, shape, dtype):
        above, below = packed[:8].view(torch.float32)
        return torch.where(BITS.decode(packed[8:], shape, torch.bool), above, below).to(dtype)


def optimizer(named_parameters):
    return torch.optim.SGD(named_parameters, lr=0.05, momentum=0.9)


def train(codec, seed, steps):
    """The share of bytes that travels, the mean loss of the last 10 steps, and the held-out accuracy."""
    torch.manual_seed(seed)  # of the weights and the order of the data
    batch, options = next(iter(train_data())), {"workers": WORKERS, "microbatches": 1, "cost": "analytic"}
    build = fxpipe.compile(model(), loss, batch, **options, cuts="same", codec=codec)
    found = codec_facts(build.plan)
    pipeline = build.local(optimizer=optimizer, seed=seed)
    batches = islice(chain.from_iterable(repeat(train_data())), steps)  # epoch after epoch
    losses = pipeline.run(batches)
    trained = model().eval()
    trained.load_state_dict(pipeline.state_dict())
    with torch.no_grad():
        accuracies = [float(metrics(trained, b)["accuracy"]) for b in eval_data()]
    return found["bytes"] / found["plain_bytes"] if found else 1.0, mean(losses[-10:]), mean(accuracies)


def main(steps=STEPS, seeds=SEEDS):
    """Print a table of what `signs` makes of the digits beside others."""
    torch.set_num_threads(1)
    print(f"{steps} steps on {WORKERS} workers, means of {seeds} seeds\n")
    print(f"{'codec':<18}{'bytes':>8}{'loss':>8}{'accuracy':>10}")
    for codec in ("none", "gradient=int8", "gradient=topk:0.02", "gradient=signs"):
        share, loss_, accuracy = map(mean, zip(*(train(codec, seed, steps) for seed in range(seeds)), strict=True))
        print(f"{codec:<18}{share:>8.2f}{loss_:>8.3f}{accuracy:>10.3f}")


if __name__ == "__main__":
    main(*((12, 1) if "--quick" in sys.argv else ()))

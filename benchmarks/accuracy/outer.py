"""What outer steps cost with a codec: the held-out metric of replicas that train separately, mean of three seeds.

python benchmarks/accuracy/outer.py            # workloads × codecs × seeds, about half an hour of one core
python benchmarks/accuracy/outer.py gpt        # one workload
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import sys
from typing import Any

from training import make_optimizer, make_scheduler, snapshot
from workloads import WORKLOADS, loss

import fxpipe
from fxpipe.codecs.packs import outer_bytes

REPLICAS, OUTER_STEPS, SEEDS = 4, 20, (0, 1, 2)
OPTIMIZERS = {"gpt": "adamw", "vgg": "sgd", "lstm": "sgd"}
OUTER: dict[str, dict[str, Any]] = {
    "sums in every step": {},
    "none": {"outer": "diloco"},
    "none, lr 1, momentum 0": {"outer": "diloco", "outer_lr": 1.0, "outer_momentum": 0.0},
    "int8": {"outer": "diloco", "codec": "outer=int8"},
    "topk:0.0156, lr 0.7, momentum 0.9": {
        "outer": "diloco",
        "outer_lr": 0.7,
        "outer_momentum": 0.9,
        "codec": "outer=topk:0.0156",
    },
    "topk:0.0156": {"outer": "diloco", "codec": "outer=topk:0.0156"},
    "sparseloco:64": {"outer": "diloco", "codec": "outer=sparseloco:64"},
    "sparseloco:16": {"outer": "diloco", "codec": "outer=sparseloco:16"},
}
"""The contenders: compile options by name."""


@functools.cache
def build(workload: str, method: str) -> fxpipe.Build:
    """A workload's build, compiled once for all seeds."""
    chosen, asked = WORKLOADS[workload], dict(OUTER[method])
    if asked:
        asked["outer_every"] = chosen.steps // OUTER_STEPS
    example = next(chosen.batches(seed=0))
    plain = {"workers": 1, "microbatches": 1, "schedule": "gpipe", "cost": "analytic", "accept_microbatch_loss": True}
    return fxpipe.compile(chosen.make(seed=0), loss, example, dp=REPLICAS, **plain, **asked)


def trained(workload: str, method: str, seed: int) -> float:
    """The held-out metric at the end."""
    chosen = WORKLOADS[workload]
    compiled, model = build(workload, method), chosen.make(seed)
    initial = model.state_dict()
    seeded = {name: initial.get(name, tensor) for name, tensor in compiled.tensors.items()}
    kind = OPTIMIZERS[workload]
    pipeline = dataclasses.replace(compiled, tensors=seeded).local(
        optimizer=lambda named: make_optimizer(kind, list(named), chosen.rates[kind]),
        lr_scheduler=lambda optimizer: make_scheduler(optimizer, chosen.steps),
    )
    for _, batch in zip(range(chosen.steps), chosen.batches(seed), strict=False):
        pipeline.step(batch)
    pipeline.flush()
    snapshot(pipeline, model)
    return chosen.evaluate(model)


def main() -> None:
    """Train all, and print a row for each workload and contender."""
    print("| workload | outer steps | held out | an outer step sends |\n|---|---|---|---|")
    for workload in sys.argv[1:] or OPTIMIZERS:
        for method in OUTER:
            found = [trained(workload, method, seed) for seed in SEEDS]
            plan = build(workload, method).plan
            sent = outer_bytes(plan, 0, plan.outer.codec) if plan.outer else None
            size = "" if sent is None else f"{sent:,.0f} bytes, 1/{outer_bytes(plan, 0, '') / sent:.1f}"
            mean, deviation = statistics.mean(found), statistics.stdev(found)
            print(f"| {workload} | {method} | {mean:.4f} ± {deviation:.4f} | {size} |", flush=True)


if __name__ == "__main__":
    main()

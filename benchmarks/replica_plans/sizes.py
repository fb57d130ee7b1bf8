"""How long planning for N GPUs takes, by their number and that of units; see README.md."""

from __future__ import annotations

import time
from math import sqrt
from typing import Any

from fxpipe.planner.links import Links
from fxpipe.planner.profile import Profile, Unit, Value, backward_values
from fxpipe.planner.replicated import notation, replicated_partitions
from fxpipe.planner.setting import Setting
from fxpipe.planner.workers import Machines

ALL = [(units, gpus) for units in (50, 100, 200, 500, 1000) for gpus in (8, 64, 256, 1024)]
"""Units and GPUs of the README's table."""

_TOKENS = 4096
_FLOPS, _MOVED = 400e12, 2e12  # a GPU's, each second
_BLOCK = (  # name, weights in squares of the width, activations that it moves, saves and makes, what it adds to
    ("norm1", 0, 2, 1, 1, 0),
    ("qkv", 3, 4, 1, 3, 0),
    ("attention", 0, 8, 4, 1, 0),
    ("proj", 1, 2, 1, 1, 0),
    ("drop1", 0, 2, 0.5, 1, 0),
    ("add1", 0, 3, 0, 1, 6),
    ("norm2", 0, 2, 1, 1, 0),
    ("up", 4, 5, 1, 4, 0),
    ("gelu", 0, 8, 4, 4, 0),
    ("down", 4, 5, 4, 1, 0),
    ("drop2", 0, 2, 0.5, 1, 0),
    ("add2", 0, 3, 0, 1, 6),
)


def gpt(units: int, parameters: float = 13e9) -> Profile:
    """The blocks of a GPT with so many parameters in bfloat16, in about so many units: 12 a block."""
    blocks = max(round(units / len(_BLOCK)), 1)
    width = sqrt(parameters / blocks / sum(weights for _, weights, *_ in _BLOCK))
    activation, made, read = 2 * _TOKENS * width, list[Unit](), dict[int, list[int]]()
    for block in range(blocks):
        for name, weights, moved, saved, output, skipped in _BLOCK:
            here, matmul = len(made), 1e3 * 2 * weights * width**2 * _TOKENS / _FLOPS
            other = 1e3 * moved * activation / _MOVED + 0.005
            held = 2 * weights * width**2
            unit = Unit(f"{block}.{name}", matmul + other, matmul + other, matmul, 1e4 * held / _MOVED)
            sizes = {"output_bytes": output * activation, "saved_bytes": saved * activation, "parameter_bytes": held}
            sizes |= {"weight_saved_bytes": saved * activation * (weights > 0), "temporary_bytes": activation}
            sizes["gradient_bytes"] = sizes["output_bytes"]
            made.append(Unit(**{**vars(unit), **sizes}))
            for producer in {here - 1, here - skipped if skipped else here - 1} - {-1}:
                read.setdefault(max(producer, 0), []).append(here)
    values = [Value(i, made[i].output_bytes, tuple(readers)) for i, readers in sorted(read.items())]
    return Profile(tuple(made), tuple(values), backward_values(made, values))


def planned(units: int, gpus: int) -> dict[str, Any]:
    """Seconds of one core that all three kinds of cuts take for machines of eight, and the best plan."""
    profile, inner = gpt(units), Links(400e9, 3e-6)
    setting = Setting(
        links=Links(50e9, 5e-6),
        microbatches=gpus,
        evenly=True,
        memory=(80 * 2.0**30,),
        machines=Machines(8, inner),
    )
    begin = time.process_time()
    found = replicated_partitions(profile, setting, gpus)
    seconds, best = time.process_time() - begin, min(found.values(), key=lambda plan: plan.bottleneck)
    row = {"units": len(profile.units), "gpus": gpus, "seconds": seconds, "replicas": list(best.replicas)}
    return {**row, "ms": 1e3 * best.bottleneck, "efficiency": best.efficiency, "cuts": best.mode}


def show(row: dict[str, Any]) -> None:
    """A row of the README's table."""
    plan = f"{notation(row['replicas'])}, {row['cuts']}"
    print(
        f"| {row['units']:,} | {row['gpus']:,} | {row['seconds']:.1f} | {plan} | {row['efficiency']:.2f} |", flush=True
    )

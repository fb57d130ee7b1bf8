"""What microbatches cost: the work of all workers for a minibatch, against the same one trained as a whole."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

WORKERS = 4
COUNTS = (1, 2, 4)
ROUNDS, STEPS = 5, 2


def costs(model: Path, batches: Sequence[int], rounds: int = ROUNDS) -> Iterator[dict[str, Any]]:
    """For minibatches of so many samples, the time with each number of microbatches over that with one.

    All workers are in one process of one thread; the pipelines take turns. CPU time: other processes do not count.

    Yields:
        `batch`, `milliseconds` of one microbatch, and `ratios` by number of microbatches: medians over the rounds.
    """
    import torch

    import fxpipe
    from fxpipe.runtime.process.device import reuse_freed_memory
    from fxpipe.task.model_file import load_task

    reuse_freed_memory()  # as the workers do
    torch.set_num_threads(1)
    task = load_task(model)
    first = list(task.train_data())
    for batch in batches:
        parts = [torch.cat([row[i] for row in first]).repeat(-(-batch // len(first)), 1)[:batch] for i in range(2)]
        made = (parts[0].contiguous(), parts[1].contiguous())
        pipelines = {}
        for count in COUNTS:
            torch.manual_seed(0)
            options: dict[str, Any] = {"workers": WORKERS, "microbatches": count, "cuts": "same", "cost": "analytic"}
            pipelines[count] = fxpipe.compile(task.model(), task.loss, made, **options).local()
            for _ in range(WORKERS):  # it fills, and memory is first touched
                pipelines[count].step(made)
        found: dict[int, list[float]] = {count: [] for count in COUNTS}
        for number in range(rounds):
            for count in COUNTS if number % 2 == 0 else COUNTS[::-1]:
                begin = time.process_time()
                for _ in range(STEPS):
                    pipelines[count].step(made)
                found[count].append((time.process_time() - begin) / STEPS)
        ratios = {
            count: statistics.median(a / b for a, b in zip(found[count], found[1], strict=True)) for count in COUNTS
        }
        yield {"batch": batch, "milliseconds": 1e3 * statistics.median(found[1]), "ratios": ratios}

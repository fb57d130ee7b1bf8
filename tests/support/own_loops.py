"""A user's own loop, as a list of calls that a pipeline plays, in one process or in several."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.distributed import TCPStore
from warm import Popen

Call = tuple[Any, ...]

WORKER = """
import json, sys
from pathlib import Path
sys.path.insert(0, str(Path(sys.argv[2])))
from own_loops import work
work(Path(sys.argv[1]))
"""


def optimizer(named: Any) -> torch.optim.Optimizer:
    named = list(named)
    groups = [{"params": [p for _, p in part]} for part in (named[::2], named[1::2])]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def halving(made: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(made, 3, 0.5)


def random_calls(draw: random.Random, count: int, flushes: bool = True) -> list[Call]:
    """Some calls, of which most are steps; `flushes` where there may be minibatches in flight."""
    calls: list[Call] = [("step",)]
    saved = False
    while len(calls) < count:
        kind = draw.choices(["step", "flush", "lr", "lrs", "save", "load"], [12, 1, 2, 1, 1, 1])[0]
        if kind == "lr":
            calls.append(("lr", draw.choice([0.2, 0.05, 0.01])))
        elif kind == "lrs":
            calls.append(("lr", draw.choice([0.2, 0.05]), 0.03))
        elif kind == "load":
            if saved:
                calls += [("flush",), ("load",)] if flushes else [("load",)]
        else:
            calls.append((kind,))
            saved |= kind == "save"
    return calls


def play(pipeline: Any, calls: Sequence[Call], batches: Sequence[Any], folder: Path) -> list[Any]:
    """What the calls give: the losses in their order, and how many minibatches were fed."""
    losses = []
    late = random.Random(getattr(pipeline, "rank", 0))
    fed = 0
    for call, *values in calls:
        if late.random() < 0.1:
            time.sleep(0.01)
        if call == "step":
            losses.append(pipeline.step(batches[fed % len(batches)]))
            fed += 1
            if late.random() < 0.3:
                float(late.choice(losses))
        elif call == "lr":
            pipeline.set_lr(*values)
        elif call in ("save", "load"):
            getattr(pipeline, call)(folder / "saved")
        else:
            pipeline.flush()
    pipeline.flush()
    return [[float(loss) for loss in losses], pipeline.fed]


def in_processes(builds: Sequence[dict[str, Any]], workers: int, folder: Path) -> list[tuple[list[list[Any]], Any]]:
    """Play loops in the same processes, one after another.

    Args:
        builds: of each: folder, calls, options, and the name of the file with batches.

    Returns:
        Of each what each rank found, and all weights.
    """
    (folder / "worker.py").write_text(WORKER)
    stores = [TCPStore("localhost", 0, is_master=True, wait_for_workers=False) for _ in builds]
    listed = [{**build, "port": store.port} for store, build in zip(stores, builds, strict=True)]
    (folder / "loops.json").write_text(json.dumps(listed))
    worker_errors([sys.executable, str(folder / "worker.py"), str(folder), str(Path(__file__).parent)], workers, 300)
    results = []
    for number in range(len(builds)):
        found = [json.loads((folder / f"found_{number}_{rank}.json").read_text()) for rank in range(workers)]
        weights: dict[str, Any] = {}
        for rank in range(workers):
            weights |= load_file(folder / f"weights_{number}_{rank}.safetensors")
        results.append((found, weights))
    return results


def worker_errors(command: Sequence[str], workers: int, timeout: float) -> list[str]:
    """What each of the processes of a run writes to stderr, all started by this command; they must end well."""
    shared = {
        "WORLD_SIZE": str(workers),
        "LOCAL_WORLD_SIZE": str(workers),
        "MASTER_ADDR": "localhost",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    with ExitStack() as stack:
        files = [stack.enter_context(TemporaryFile("w+")) for _ in range(workers)]
        processes = [
            Popen(command, env={**os.environ, **shared, "RANK": str(rank)}, stderr=file)
            for rank, file in enumerate(files)
        ]
        try:
            until = time.monotonic() + timeout
            while time.monotonic() < until and any(process.poll() is None for process in processes):
                time.sleep(0.01)
            codes = [process.poll() for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        found = []
        for file in files:
            file.seek(0)
            found.append(file.read())
    assert codes == [0] * workers, "\n".join(
        f"rank {rank} ended with {code}, and wrote to stderr:\n{text or 'nothing'}"
        for rank, (code, text) in enumerate(zip(codes, found, strict=True))
    )
    return found


def work(folder: Path) -> None:
    """One of the processes."""
    import fxpipe
    from fxpipe.runtime.process.ends import end_process

    rank = int(os.environ["RANK"])
    for number, loop in enumerate(json.loads((folder / "loops.json").read_text())):
        os.environ["MASTER_PORT"] = str(loop["port"])
        batches = torch.load(loop["batches"])
        with fxpipe.join(
            loop["build"], optimizer=optimizer, lr_scheduler=halving, threads=1, **loop["options"]
        ) as pipeline:
            own = batches if rank == 0 else [None] * len(batches)
            found = play(pipeline, loop["calls"], own, folder / str(number))
            weights = {name: value.clone() for name, value in pipeline.state_dict().items()}
            (folder / f"found_{number}_{rank}.json").write_text(json.dumps(found))
            save_file(weights, folder / f"weights_{number}_{rank}.safetensors")
    end_process(0)

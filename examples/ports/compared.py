"""Runs a training script in the manner of a well-known one, and its port to fxpipe, to be compared.

`NAME.py` is an ordinary script, whose `main()` returns the loss of every step and what it measures at the end;
`NAME_task.py` is the model file that its user would write. Both begin with the same weights and read the same batches,
since a script seeds before it makes its model, as `compile` does, and again before it reads its data, as `run` does.

Losses are of float32. Microbatches and eager PyTorch add the same gradients in another order, and optimizers that
divide by the size of a gradient carry such differences on: hence a tolerance, for each script. A script whose own
losses jump when its first weights change by 1e-7 compares nothing: where a ReLU did that, it is a GELU.
"""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from commands import QUICK, fxpipe

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Script:
    """How a script is run.

    Attributes:
        length: of the run, as options.
        compiled: more options of the compile.
        run: more options of the run: what the script does in its loop.
        tolerance: relative, of losses and of metrics.
        processes: whether the workers are processes, and not in the one of the test.
    """

    name: str
    length: tuple[str, ...]
    microbatches: int = 2
    compiled: tuple[str, ...] = ()
    run: tuple[str, ...] = ()
    tolerance: float = 1e-5
    processes: bool = False


def run_itself(name: str) -> tuple[list[float], dict[str, float]]:
    """What the script's own loop leaves."""
    with torch.random.fork_rng():
        losses, measured = importlib.import_module(name).main()
    assert len(losses) >= 10
    return losses, measured


def trained(script: Script, folder: Path, *options: str) -> tuple[list[float], dict[str, float]]:
    """The losses and the last evaluation of `fxpipe run`, of the build in `folder`."""
    where = () if script.processes else ("--local",)
    options = (*script.length, *where, *script.run, *options, "--threads", "1", "--json")
    summary = fxpipe("run", folder / "build", "--out", folder / "out", *options).json
    lines = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line], summary["evaluation"]


def built(script: Script, folder: Path, schedule: str) -> Any:
    task = HERE / f"{script.name}_task.py"
    options = ("-n", 2, "--schedule", schedule, "--microbatches", script.microbatches, *script.compiled)
    return fxpipe("compile", task, "-o", folder / "build", *options, *QUICK, "--json")

"""A case in a loop of one's own, in this process or as one of several: python own.py FOLDER '[[PORT, OPTIONS], …]'"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "support")]

import torch
from case import STEPS, Case, of_text
from refused import APART_TRAINED
from safetensors.torch import load_file, save_file
from task import Task, cycled

import fxpipe
from fxpipe.runtime.options import PipelineOptions, RunOptions

WEIGHTS, AVERAGES, NUMBERS = "own-weights", "own-averages", "own.json"


def loop(options: RunOptions, rank: int | None = None) -> None:
    """Train by calls, and leave in the output folder what `left` reads.

    Args:
        rank: of this process among several; None where all workers are in it.
    """
    assert options.out is not None
    case = of_text((Path(options.build).parent / "case.txt").read_text())
    task, out = Task(case), Path(options.out)
    given = {f.name: getattr(options, f.name) for f in dataclasses.fields(PipelineOptions)}
    hooks = {name: hook for name, hook in task.hooks().items() if name in TAKEN}
    given |= {"out": options.out, "steps_per_epoch": len(list(task.train_data())), **hooks}
    given = {name: value for name, value in given.items() if value != DEFAULTS.get(name)}
    build = fxpipe.load(options.build)
    data = cycled(task.train_data(), STEPS)
    evaluates = case.evaluation == "often" and case.flushes and case.replicas not in APART_TRAINED
    with build.local(**given) if rank is None else fxpipe.join(options.build, threads=1, **given) as pipeline:
        found: dict[str, Any] = {"fed": pipeline.fed, "losses": [], "metrics": [], "evaluation": {}}
        for batch in data[pipeline.fed :]:
            loss = pipeline.step(batch if pipeline.reads else None)
            found["losses"].append(float(loss))
            if pipeline.metrics:
                found["metrics"].append(pipeline.metrics)
            if evaluates:  # in the middle of training, which is to change nothing of it
                pipeline.evaluate(task.eval_data() if pipeline.reads else ())
        pipeline.flush()
        if case.evaluation != "none":
            found["evaluation"] = pipeline.evaluate(task.eval_data() if pipeline.reads else ())
        out.mkdir(exist_ok=True)
        save_file(apart(pipeline.state_dict()), out / f"{WEIGHTS}-{rank or 0}")
        if case.average:
            save_file(apart(pipeline.averaged_state_dict()), out / f"{AVERAGES}-{rank or 0}")
        if not rank:
            (out / NUMBERS).write_text(json.dumps(found))


def apart(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What has several names has one memory, which the file's format refuses."""
    return {name: value.clone() for name, value in state.items()}


TAKEN = ("model", "loss", "optimizer", "lr_scheduler", "loss_weight", "metrics_of_all")
DEFAULTS = {f.name: f.default for f in dataclasses.fields(PipelineOptions)}


def left(runs: list[RunOptions]) -> tuple[dict[str, Any], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The numbers of loops that went on from each other, and the weights and averages of the last one: replica 0's."""
    outs = [Path(str(options.out)) for options in runs]
    numbers = [json.loads((out / NUMBERS).read_text()) for out in outs]
    whole = numbers[-1]
    for name in ("losses", "metrics"):
        whole[name] = numbers[0][name][: whole["fed"]] + whole[name]
    states = []
    for kind in (WEIGHTS, AVERAGES):
        files = sorted(outs[-1].glob(f"{kind}-*"), reverse=True)
        states.append({name: value for file in files for name, value in load_file(file).items()})
    return whole, states[0], states[1]


def possible(case: Case) -> bool:
    """Whether a loop of one's own can do what a run does: `reset()` takes a flush, and a loop has its own rates."""
    return case.model != "lstm" and case.rate != "set"


if __name__ == "__main__":
    import nccl

    from fxpipe.runtime.process.ends import end_process

    nccl.use(*sys.argv[3:])
    for port, options in json.loads(sys.argv[2]):
        os.environ["MASTER_PORT"] = str(port)
        loop(RunOptions.from_json(options), int(os.environ["RANK"]))
    nccl.finish()
    end_process(0)

"""A case as its user has it: a model file that is compiled, and run in this process or in several."""

from __future__ import annotations

import contextlib
import functools
import json
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, redirect_stderr
from dataclasses import dataclass, field, replace
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch
from warnings import catch_warnings

import own
import torch
from case import STEPS, Case
from own_loops import worker_errors
from random_cuts import legal_cuts, with_units
from safetensors.torch import load_file
from task import FACTOR, MODELS, Task
from torch import Tensor
from torch.distributed import TCPStore
from torch.utils import _pytree as pytree

import fxpipe
from fxpipe.cli.cost_options import CostOptions
from fxpipe.cli.model_build import build_model
from fxpipe.errors import ScheduleError
from fxpipe.ir.program import Program
from fxpipe.lowering import evaluation, minibatch_loss
from fxpipe.lowering.options import CompileOptions
from fxpipe.observe.rates import RATES
from fxpipe.passes import outline
from fxpipe.planner.links import Links
from fxpipe.runtime.options import RunOptions
from fxpipe.runtime.process.start import run_local
from fxpipe.schedule import from_csv, make, to_csv
from fxpipe.task.batch import split
from fxpipe.task.model_file import load_task
from fxpipe.task.model_options import ModelOptions

SEED, CLIP, DECAY = 3, 0.5, 0.7
OUTER_EVERY = 3
SCALE, INTERVAL = 2.0**19, 2
"""The first loss scale, so great that steps overflow, and after how many good ones it doubles."""
PLAIN, OF_UNITS = Case(), ("model", "precision", "batches", "device", "state", "own")
FAST = Links(bandwidth=1e12)
"""Cuts that differ are worth their messages."""

MODEL_FILE = """
import sys
sys.path[:0] = [path for path in {paths} if path not in sys.path]
from case import of_text
from task import Task
from fxpipe import setting
CASE = {case!r}
HOOKS = Task(of_text(CASE)).hooks()
{hooks}
"""
SET = """
def optimizer(named):
    return Task(of_text(CASE)).optimizer(named, setting("factor", 1.0))
"""


def _once(capture: Callable[..., Any]) -> Callable[..., Any]:
    """Captures what was not captured before: most cases differ in what comes after, and this is the slow part."""
    known: dict[Any, Any] = {}

    def captured(model: Any, step: Any, batch: Any, **more: Any) -> Any:
        if step.__self__.fades:  # the program has the value of a tensor that hooks have changed since
            return capture(model, step, batch, **more)
        compared = {name: value for name, value in more.items() if name != "hooks"}
        leaves = [(tuple(v.shape), v.dtype) if isinstance(v, Tensor) else v for v in pytree.tree_leaves(batch)]
        task: Task = step.__self__
        case = task.case
        key = (
            case.model,
            case.attributes,
            task.weighed,
            case.precision,
            task.device,
            step.__name__,
            str(leaves),
            str(compared),
        )
        if key not in known:
            known[key] = capture(model, step, batch, **more)
        return known[key]

    return captured


CAPTURES = (
    (minibatch_loss, "capture", _once(minibatch_loss.capture)),
    (evaluation, "capture_evaluation", _once(evaluation.capture_evaluation)),
)


@contextlib.contextmanager
def captured_once() -> Iterator[None]:
    """In this block, what was captured before is not captured again."""
    with ExitStack() as stack:
        for module, name, captured in CAPTURES:
            stack.enter_context(patch.object(module, name, captured))
        yield


@dataclass(frozen=True)
class Outcome:
    """What a run left: losses by step, the trained weights, its lines without times, metrics of the last weights.

    Attributes:
        lines: None of a loop of one's own, which writes none; over processes it has the parameters alone.
        metrics: of training, by step.
    """

    losses: list[float]
    weights: dict[str, Tensor]
    averages: dict[str, Tensor]
    lines: list[dict[str, Any]] | None
    evaluation: dict[str, float]
    metrics: list[dict[str, float]] = field(default_factory=list)

    def same_bits(self, other: Outcome) -> list[str]:
        """In words, what is not the other's."""
        pairs = [
            *((f"step {step}", *both) for step, both in enumerate(zip(self.losses, other.losses, strict=False), 1)),
            ("the number of steps", len(self.losses), len(other.losses)),
            ("metrics of training", self.metrics, other.metrics),
            ("the metrics", self.evaluation, other.evaluation),
        ]
        if self.lines is not None and other.lines is not None:
            pairs += [("a line", *both) for both in zip(self.lines, other.lines, strict=False)]
            pairs.append(("the number of lines", len(self.lines), len(other.lines)))
        found = [f"{what}: {mine} is not {its}" for what, mine, its in pairs if mine != its]
        for mine, its in ((self.weights, other.weights), (self.averages, other.averages)):
            missing = mine.keys() - its.keys() if self.lines is None and mine else mine.keys() ^ its.keys()
            if missing:
                found.append(f"weights: {sorted(missing)} in one of them alone")
            found += [name for name in mine.keys() & its.keys() if not _same(mine[name], its[name])]
        return found


def _same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))


def compiled(case: Case, folder: Path) -> None:
    """Write the model file, and its build next to it."""
    here = Path(__file__).parent
    path = folder / "model.py"
    (folder / "case.txt").write_text(str(case))
    hooks = {name: f"{name} = HOOKS[{name!r}]" for name in Task(case).hooks()}
    if case.rate == "set":
        hooks["optimizer"] = SET
    paths = [str(here), str(here.parent / "support")]
    path.write_text(MODEL_FILE.format(paths=paths, case=str(case), hooks="\n".join(hooks.values())))
    asked = compile_options(case)
    least = {"LEAST_CALLS": 2, "LEAST_LINES": -1000} if case.outline == "all" else {"LEAST_CALLS": outline.LEAST_CALLS}
    with redirect_stderr(StringIO()), captured_once(), patch.multiple(outline, **least):
        build_model(load_task(path), ModelOptions(), asked, CostOptions()).build.save(folder / "build", model_file=path)
        if case.moved:
            asked = compile_options(case, moved=True)
            moved = build_model(load_task(path), ModelOptions(), asked, CostOptions())
            moved.build.save(folder / "moved", model_file=path)


def compile_options(case: Case, moved: bool = False) -> CompileOptions:
    """What the case asks of a compile; `moved` with the cuts under which a run goes on."""
    asked: dict[str, Any] = {
        "workers": case.ranks,
        "schedule": _rows(case) if case.schedule == "csv" else case.schedule.removesuffix("*2"),
        "virtual": 2 if case.schedule.endswith("*2") else None,
        "microbatches": case.microbatches,
        "cost": "analytic",
        "threads": 1,
        "policy": None if case.policy == "default" else case.policy,
        "codec": case.codec,
        "recompute": case.recompute,
        "backend": case.engine,
        **_computes(case.precision),
        "scan": 2 if case.shapes == "new" else 8,
        "accept_optimizer_per_worker": True,
        "accept_microbatch_loss": case.model == "lstm",
        **_cuts(case, moved),
    }
    if case.unequal:
        ones = [1] * (case.ranks - 1)
        asked["replicas"] = (2, *ones) if case.replicas == "2,1" else (*ones, 2)
    elif case.replicas != "one":
        asked["dp"] = 2
    if case.replicas == "shard":
        asked["shard"] = "optimizer"
    if case.replicas in ("outer", "delayed"):
        asked |= {"outer": "diloco", "outer_every": OUTER_EVERY, "outer_delay": int(case.replicas == "delayed")}
    return CompileOptions(**{name: value for name, value in asked.items() if value is not None})


@functools.cache
def _rows(case: Case) -> str:
    """A table of one's own: zb-v with neighbours exchanged, as far as that is accepted."""
    draw = random.Random(str(case))
    rows = [line.split(",") for line in to_csv(make("zb-v", case.workers, case.microbatches)).splitlines()]
    for _ in range(20):
        number = draw.randrange(len(rows))
        place = draw.randrange(len(rows[number]) - 1)
        row = [*rows[number]]
        row[place : place + 2] = reversed(row[place : place + 2])
        with contextlib.suppress(ScheduleError):
            from_csv(_text([*rows[:number], row, *rows[number + 1 :]]))
            rows[number] = row
    return _text(rows)


def _text(rows: list[list[str]]) -> str:
    return "\n".join(",".join(row) for row in rows)


def _cuts(case: Case, moved: bool) -> dict[str, Any]:
    if case.cuts == "planned":
        return {"links": FAST}
    if case.cuts == "three-way":
        return {"cuts": "three-way", "links": FAST}
    if case.cuts == "random":
        program = units_of(replace(PLAIN, **{name: getattr(case, name) for name in OF_UNITS}), case.parts)
        return {"cuts": legal_cuts(program, case.workers, f"{case.model}/{case.workers}"), "split_backward": True}
    paths, (forward, backward) = MODELS[case.model].paths, places(case, moved)
    return {"forward_at": tuple(paths[a] for a in forward), "backward_at": tuple(paths[a] for a in backward)}


def places(case: Case, moved: bool = False) -> tuple[list[int], list[int]]:
    """Before which of the model's paths forward and backward are cut, where the case pins both; `moved`: as far ahead
    as they can be."""
    count, shift = len(MODELS[case.model].paths), {"same": 0, "later": 1, "earlier": -1}[case.cuts]
    last = count - case.workers
    at = [min(1 + (k * (count - 2)) // case.workers, last + k) for k in range(1, case.workers)]
    at = [1 + k for k in range(len(at))] if moved else at
    return at, [min(max(a + shift, 1 + k), last + k + 1) for k, a in enumerate(at)]


@functools.cache
def units_of(case: Case, parts: int) -> Program:
    """The step on one microbatch, with the units that cuts are numbers of."""
    task = Task(case)
    made, hooks = task.model(), task.hooks()
    hooks = {name: hooks[name] for name in ("loss", "train_data", "on_step") if name in hooks and case.fades}
    batch = split(task.train_data()[0], parts)[0]
    return with_units(fxpipe.capture(made, task.loss, batch, hooks=hooks, **_computes(case.precision)), parts)


def _computes(precision: str) -> dict[str, Any]:
    """The options of a compile that say in which type the step computes."""
    autocast = precision if precision in ("bf16", "fp16") else None
    return {"autocast": autocast, "params": "bf16" if Case(precision=precision).mixed else None}


def run_options(case: Case, folder: Path, out: str, **more: Any) -> RunOptions:
    """What the case asks of a run that is not interrupted."""
    return RunOptions(
        str(folder / "build"),
        out=str(folder / out),
        **{
            "steps": STEPS,
            "seed": SEED,
            "threads": 1,
            "clip_norm": CLIP if case.clip else None,
            "ema": DECAY if case.average else None,
            "eval_every": 2 if case.evaluation == "often" else None,
            "new_shapes": 8 if case.shapes == "new" else None,
            "settings": (f"factor={FACTOR}",) if case.rate == "set" else (),
            "loss_scale": SCALE,
            "loss_scale_interval": INTERVAL,
            **more,
        },
    )


def runs_of(case: Case, folder: Path) -> list[RunOptions]:
    """The runs that the case asks for, in their order; the last one's outcome counts."""
    if not case.stop:
        return [run_options(case, folder, "out")]
    first = run_options(case, folder, "stopped", checkpoint_every=str(case.stop), keep=STEPS)
    saved = folder / "stopped" / "checkpoints" / f"step-{case.stop}"
    more = {"eval_every": first.eval_every, "new_shapes": first.new_shapes}
    build = str(folder / "moved") if case.moved else first.build
    return [first, RunOptions(build, out=str(folder / "out"), steps=STEPS, threads=1, resume=str(saved), **more)]


def run_here(options: RunOptions) -> Outcome:
    """Train with all workers in this process."""
    assert options.out is not None
    shutil.rmtree(options.out, ignore_errors=True)
    with redirect_stderr(StringIO()), captured_once():
        return outcome(run_local(options), Path(options.out))


def run_in_processes(
    runs: list[RunOptions], processes: int, folder: Path, *wires: str, script: str = "rank.py"
) -> Outcome | None:
    """Train with a worker in each of as many processes as torchrun would start, one run after the other.

    Args:
        wires: 'shared', 'peer', 'gloo' or 'nccl', which keeps its rules (see `nccl.py`); after it a fault that breaks
            them.
        script: what each process runs; only runs leave an outcome.
    """
    stores = [TCPStore("localhost", 0, is_master=True, wait_for_workers=False) for _ in runs]
    listed = [(store.port, options.to_json()) for store, options in zip(stores, runs, strict=True)]
    command = [sys.executable, str(Path(__file__).with_name(script)), str(folder), json.dumps(listed), *wires]
    worker_errors(command, processes, 120)
    assert runs[-1].out is not None
    if script != "rank.py":
        return None
    return outcome(json.loads((folder / f"summary_{len(runs) - 1}.json").read_text()), Path(runs[-1].out))


def run_own(runs: list[RunOptions], processes: int, folder: Path, *wires: str) -> Outcome:
    """Train by calls of a loop, one after the other: in so many processes; 0: in this one."""
    if processes:
        run_in_processes(runs, processes, folder, *wires, script="own.py")
    for options in () if processes else runs:
        with redirect_stderr(StringIO()), captured_once(), catch_warnings(action="ignore"):
            own.loop(options)
    found, weights, averages = own.left(runs)
    return Outcome(found["losses"], weights, averages, None, found["evaluation"], found["metrics"])


TIMES = ("time", "seconds", "eta", "ms", *RATES)


def outcome(summary: dict[str, Any], out: Path) -> Outcome:
    """What a run left in its folder, without what its times decide."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").open()]
    kept = [{name: value for name, value in line.items() if not name.endswith(TIMES)} for line in lines]
    averaged = out / "ema.safetensors"
    return Outcome(
        [line["loss"] for line in lines if "loss" in line],
        load_file(out / "model.safetensors"),
        load_file(averaged) if averaged.is_file() else {},
        kept,
        summary.get("evaluation", {}),
        [line["metrics"] for line in lines if "metrics" in line],
    )

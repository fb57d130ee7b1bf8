"""Checks a recipe of the zoo: trained in a pipeline, in one process and in several, against eager on whole batches."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import tempfile
import time
import warnings
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from check import Failure, Row
from families import RECIPES, Recipe
from families.recipe import STEPS, WORKERS
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed import TCPStore
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fxpipe
from fxpipe.builds.build import Build
from fxpipe.errors import FxpipeError
from fxpipe.lowering.minibatch_loss import UNPROVED
from fxpipe.lowering.steady_randomness import SteadyRandomness
from fxpipe.stages.compare import relative_error
from fxpipe.threads import threads
from fxpipe.tracing.capture import autocasting

SECONDS = 120.0  # for all workers together, from their start
LOSS = 2e-6  # a run reports losses in float32
FLOOR = 1e-3  # of a weight's norm: what moves is its change, and a bias may begin and stay near 0


@dataclass
class Trained:
    """What training leaves: a loss for each step, the state, the averaged state and the metrics."""

    losses: list[float]
    state: dict[str, Tensor]
    averages: dict[str, Tensor] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


def check_recipe(recipe: Recipe, workers: Workers) -> Row:
    """The whole check of a recipe, on one thread."""
    row = Row(recipe.name, "failed")
    doing = "eager"
    try:
        with recipe.dtype(), threads(1, WORKERS), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if recipe.refused is not None:
                doing = "compile"
                return _refused(recipe, row)
            eager = train_eagerly(recipe)
            doing = "compile"
            start = time.perf_counter()
            recipe, build, reason = _compiled(recipe)
            row = dataclasses.replace(row, compile=time.perf_counter() - start, microbatches=recipe.microbatches)
            row = dataclasses.replace(row, unproved=any(w.startswith(UNPROVED) for w in build.warnings), reason=reason)
            with tempfile.TemporaryDirectory(prefix="fxpipe_recipe_") as folder:
                saved = build.save(Path(folder) / "build")
                doing = "local"
                local = train_locally(recipe, saved, steady=recipe.random)
                row = dataclasses.replace(row, loss_error=_loss_error(local, eager), error=_state_error(local, eager))
                _agree(recipe, local, eager)
                doing = "distributed"
                if recipe.random:
                    local = train_locally(recipe, saved, steady=False)
                _equal(local, workers.train(recipe, saved, Path(folder)))
    except Exception as error:  # whatever it is, it is this recipe's row
        return dataclasses.replace(row, reason=f"{doing}: {type(error).__name__}: {error}")
    return dataclasses.replace(row, status="passed")


def _refused(recipe: Recipe, row: Row) -> Row:
    assert recipe.refused is not None
    try:
        _build(recipe)
    except FxpipeError as error:
        if re.search(recipe.refused[0], str(error)):
            return dataclasses.replace(row, status="refused", reason=recipe.refused[1])
        raise
    raise Failure("compiled, though its entry says that it is refused")


def _compiled(recipe: Recipe) -> tuple[Recipe, Build, str]:
    """The build; of one microbatch, and with the reason, if several make another loss, as the entry says."""
    if recipe.differs is None:
        return recipe, _build(recipe), ""
    pattern, reason = recipe.differs
    try:
        build = _build(recipe)
        notes = [build.plan.loss.batch_norm, *(w for w in build.warnings if w.startswith(UNPROVED))]
        said = build.plan.step.differs_from_whole or "; ".join(filter(None, notes))
    except FxpipeError as error:
        said = str(error)
    if not said:
        raise Failure("compiled with microbatches, though its entry says that they make another loss")
    if not re.search(pattern, said):
        raise Failure(f"what differs is said to be: {said}")
    recipe = dataclasses.replace(recipe, microbatches=1, dims=None)
    return recipe, _build(recipe), reason


def _build(recipe: Recipe) -> Build:
    batches = recipe.batches()
    return fxpipe.compile(
        recipe.make(),
        recipe.loss,
        batches[0],
        workers=WORKERS,
        schedule="1f1b",
        cost="analytic",
        microbatches=recipe.microbatches,
        microbatch_dims=recipe.dims,
        loss_weight=recipe.loss_weight,
        autocast=recipe.autocast,
        optimizer=recipe.optimizer,
        lr_scheduler=recipe.scheduler,
        evaluation=(recipe.metrics, batches) if recipe.metrics is not None else None,
    )


def train_eagerly(recipe: Recipe) -> Trained:
    """As a user writes it, without fxpipe: each step on its whole batch."""
    model = recipe.make()
    named = recipe.named(model)
    made = recipe.optimizer(named)
    optimizers = made if isinstance(made, list) else [made]
    schedulers = [recipe.scheduler(each) for each in optimizers] if recipe.scheduler is not None else []
    moving = None if recipe.ema is None else AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(recipe.ema))
    losses = []
    for batch in recipe.batches():
        for each in optimizers:
            each.zero_grad()
        with SteadyRandomness() if recipe.random else contextlib.nullcontext():
            with autocasting("cpu", recipe.autocast):
                loss = recipe.loss(model, batch)
            loss.backward()
        if recipe.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        for each in (*optimizers, *schedulers):
            each.step()
        if moving is not None:
            moving.update_parameters(model)
        losses.append(loss.item())
    state = {name: v.detach().clone() for name, v in model.state_dict().items()}
    found = Trained(losses, state)
    if moving is not None:
        found.averages = dict(moving.module.state_dict())
    if recipe.averaged is not None:
        kept = {id(dict(named)[name]): v.detach().clone() for name, v in recipe.averaged(made, named).items()}
        every = model.named_parameters(remove_duplicate=False)
        found.averages = {**state, **{name: kept[id(p)] for name, p in every if id(p) in kept}}
    if recipe.metrics is not None:
        found.metrics = _evaluated(recipe, model)
    return found


def _evaluated(recipe: Recipe, model: torch.nn.Module) -> dict[str, float]:
    assert recipe.metrics is not None
    model.eval()
    with torch.no_grad():
        rows = [recipe.metrics(model, batch) for batch in recipe.batches()]
    return {name: sum(float(row[name]) for row in rows) / len(rows) for name in rows[0]}


def train_locally(recipe: Recipe, build: Build, *, steady: bool) -> Trained:
    """All workers in this process.

    Args:
        steady: whether what the step draws at random is the same for every element, as in `train_eagerly`.
    """
    batches = recipe.batches()
    with SteadyRandomness() if steady else contextlib.nullcontext():
        pipeline = build.local(**_hooks(recipe), **_options(recipe))
        found = Trained(pipeline.run(batches), pipeline.state_dict())
    if recipe.averaged is not None or recipe.ema is not None:
        found.averages = pipeline.averaged_state_dict()
    if recipe.metrics is not None:
        found.metrics = pipeline.evaluate(recipe.batches())
    return found


def _hooks(recipe: Recipe) -> dict[str, Any]:
    return {
        "optimizer": recipe.optimizer,
        "lr_scheduler": recipe.scheduler,
        "loss_weight": recipe.loss_weight,
        "averaged": recipe.averaged,
    }


def _options(recipe: Recipe) -> dict[str, Any]:
    return {"clip_norm": recipe.clip, "ema": recipe.ema}


class Workers:
    """Processes that wait for runs, each a worker that joins as one that torchrun started.

    They are there before they are wanted: a process that has computed nothing yet may fork, which takes no time.

    Args:
        context: of multiprocessing: 'fork' for such a process, else 'spawn'.
    """

    def __init__(self, context: Any) -> None:
        self._ends: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(WORKERS):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(rank, theirs, os.getpid()), daemon=True)
            process.start()
            theirs.close()
            self._ends.append(ours)
            self._processes.append(process)

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    def train(self, recipe: Recipe, build: Build, folder: Path) -> Trained:
        """Train a recipe of the table.

        Args:
            folder: where the run leaves its files.

        Raises:
            Failure: a worker failed, with its error; or it ended, or took too long.
        """
        store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        for end in self._ends:
            end.send((recipe.name, str(build.folder), str(folder), store.port))
        failed = []
        until = time.monotonic() + SECONDS
        for rank, end in enumerate(self._ends):
            try:
                said = end.recv() if end.poll(max(0.0, until - time.monotonic())) else f"took more than {SECONDS:.0f} s"
            except EOFError:
                said = "ended"
            failed += [f"worker {rank}: {said}"] if said else []
        if failed:
            raise Failure("; ".join(failed))
        summary = json.loads((folder / "summary.json").read_text())
        found = Trained(summary["losses"], load_file(folder / "out" / "model.safetensors"))
        if recipe.averaged is not None or recipe.ema is not None:
            found.averages = load_file(folder / "out" / "ema.safetensors")
        if recipe.metrics is not None:
            found.metrics = summary["evaluation"]
        return found


def _work(rank: int, end: Connection, parent: int) -> None:
    """One worker's process: a run for each message, until there is nobody to send one."""
    torch.set_num_threads(1)
    while True:
        while not end.poll(1.0):
            if os.getppid() != parent:
                return
        try:
            end.send(_join(rank, *end.recv()))
        except EOFError:
            return


def _join(rank: int, name: str, build: str, folder: str, port: int) -> str:
    """Train as one worker; what went wrong, or nothing."""
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(WORKERS),
        "LOCAL_WORLD_SIZE": str(WORKERS),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    recipe = RECIPES[name]
    recipe.missing()  # finds what is installed apart
    more = {"eval_data": recipe.batches} if recipe.metrics is not None else {}
    try:
        with recipe.dtype(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            summary = fxpipe.load(build).join(
                recipe.batches,
                **_hooks(recipe),
                **_options(recipe),
                **more,
                steps=STEPS,
                threads=1,
                out=str(Path(folder) / "out"),
                progress=False,
            )
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if summary is not None:
        (Path(folder) / "summary.json").write_text(json.dumps(summary))
    return ""


def _loss_error(found: Trained, expected: Trained) -> float:
    """Relative to the largest of all steps: losses near 0 are what large ones have left over."""
    return max(abs(a - b) for a, b in zip(found.losses, expected.losses, strict=True)) / max(map(abs, expected.losses))


def _state_error(found: Trained, expected: Trained) -> float:
    return max(_errors(found, expected).values())


def _errors(found: Trained, expected: Trained) -> dict[str, float]:
    """By name, how far each tensor of the state, and of the averages, is off; infinite where one is missing."""
    made = {}
    for kind, ours, theirs in (
        ("", found.state, expected.state),
        ("average of ", found.averages, expected.averages),
    ):
        made |= {kind + n: relative_error(ours.get(n), v, FLOOR) for n, v in theirs.items()}
        made |= {kind + n: float("inf") for n in ours.keys() - theirs.keys()}
    return made


def _agree(recipe: Recipe, found: Trained, expected: Trained) -> None:
    errors = _errors(found, expected)
    name, error = max(errors.items(), key=lambda item: item[1])
    loss = _loss_error(found, expected)
    if not loss <= max(LOSS, recipe.bound):
        raise Failure(f"losses {found.losses} are {expected.losses} in eager PyTorch: off by {loss:.1e}")
    if not error <= recipe.bound:
        raise Failure(f"{name} is off by {error:.1e}")
    for key, value in expected.metrics.items():
        if not abs(found.metrics[key] - value) <= max(LOSS, recipe.bound) * max(1.0, abs(value)):
            raise Failure(f"the metric {key} is {found.metrics[key]}, and {value} in eager PyTorch")
    before = recipe.make().state_dict()
    if all(torch.equal(found.state[name], before[name]) for name, _ in recipe.named(recipe.make())):
        raise Failure("no weight has changed")


def _equal(local: Trained, apart: Trained) -> None:
    """The run in several processes gave the bits of the one in this process."""
    if (apart.losses, apart.metrics) != (local.losses, local.metrics):
        raise Failure(
            f"losses {apart.losses} and metrics {apart.metrics}, in one process {local.losses}, {local.metrics}"
        )
    for ours, theirs in ((apart.state, local.state), (apart.averages, local.averages)):
        if ours.keys() != theirs.keys():
            raise Failure(f"{', '.join(sorted(ours.keys() ^ theirs.keys()))} on one side only")
        differing = [name for name, tensor in ours.items() if not torch.equal(tensor, theirs[name])]
        if differing:
            raise Failure(f"{', '.join(differing[:5])}: other bits than in one process")

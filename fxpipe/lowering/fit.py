"""Compile and train in one call: `fxpipe.fit`.

It is `fxpipe.compile` and a run of the build, like `fxpipe run`. The worker processes load the caller's objects from a
model file that unpickles them, `OUT/fit/fitted_model.py`; so every command works on what `fit` leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from fxpipe.builds.build import Build
from fxpipe.errors import FxpipeError, TaskError, near
from fxpipe.files import disk_explained, next_to, put
from fxpipe.lowering.first_of_each import batches_to_compile, open_end
from fxpipe.lowering.lower import compile
from fxpipe.lowering.options import CompileOptions
from fxpipe.messages import say, warn
from fxpipe.observe.out_folder import FINAL_WEIGHTS
from fxpipe.options import names, taken
from fxpipe.plan.plan import Plan
from fxpipe.runtime.options import RunOptions
from fxpipe.runtime.process.check_run import check_moves, refuse_moves, writing
from fxpipe.runtime.process.launch import launch
from fxpipe.runtime.process.start import join, run_local
from fxpipe.runtime.wires.group import place_of_process
from fxpipe.task.captured import captured_of
from fxpipe.task.first_batches import buffers_kept, first_batches, generator_of
from fxpipe.task.hooks import OF_RUNS, Hooks, Loss, split_hooks
from fxpipe.task.model_file import Task
from fxpipe.task.pickled_hooks import MODEL_FILE, write_hooks
from fxpipe.task.step_hooks import uncompiled
from fxpipe.task.wrapped_tensors import load_weights

HOOKS = (*OF_RUNS, "metrics", "microbatch_dims", "pad", "pad_to", "constant_batch")
FOLDER = "fit"
OF_FILES = ("model_file", "settings", "arguments", "out")
"""Options of a run that are for model files, or given otherwise."""


class Fitted(NamedTuple):
    """A model and how it was trained.

    Attributes:
        model: the caller's own, with the trained weights and buffers.
        summary: the content of `OUT/run.json`: `losses`, one a step; `evaluation`, the metrics at the end, if there are
            any; `samples_per_second`, and where the time went.
    """

    model: nn.Module
    summary: dict[str, Any]


def fit(
    model: nn.Module,
    loss: Loss,
    data: Iterable[Any] | Callable[[], Iterable[Any]],
    *,
    workers: int = 2,
    eval_data: Iterable[Any] | Callable[[], Iterable[Any]] | None = None,
    out: str | Path = "out",
    local: bool = False,
    **changes: Any,
) -> Fitted | None:
    """Train a model as a pipeline: `model, summary = fxpipe.fit(model, loss, batches, workers=2, steps=500)`.

    The workers are processes of this machine. Under torchrun, where every process makes the same call, they are those
    processes; `out` is then a folder that all of them see.

    Args:
        model, loss: `loss(model, batch)` is the training step: a scalar, or that and a dictionary of metrics.
        data: the batches of an epoch (a list, a DataLoader), or a function that returns them. The first is captured.
        eval_data: likewise, the batches for `metrics=`, at the end and every `eval_every` steps.
        out: the folder for metrics, weights and the build.
        local: all workers in this process.
        changes: hooks (`optimizer=`, by default `SGD(lr=0.01, momentum=0.9)`, `lr_scheduler=`, `metrics=`, `on_step=`,
            …: `fxpipe.task.hooks.Hooks`), options of the compile (`schedule=`, `microbatches=`, …:
            `fxpipe.lowering.options.CompileOptions`) and options of the run (`steps=`, `epochs=`, `clip_norm=`, …:
            `fxpipe.runtime.options.RunOptions`).

    Returns:
        `model` itself, with the trained weights and in the mode it had, and the summary; under torchrun, None in all
        processes but the first.

    Raises:
        FxpipeError: as `fxpipe.compile` and `Build.join`; or an option is unknown, or what the processes need cannot be
            pickled.
    """
    out, local = Path(taken("out", out, str)), taken("local", local, bool)
    model = uncompiled(model)
    if (eval_data is None) != (changes.get("metrics") is None):
        raise TaskError("only one of eval_data and metrics is given", hint="give both, or none")
    held_out = None if eval_data is None else _function("eval_data", eval_data)
    hooks = Hooks(loss=loss, train_data=_function("data", data), eval_data=held_out)
    hooks, given = split_hooks(hooks, HOOKS, changes)
    task = Task(replace(hooks, model=lambda: model))
    of_compile, of_run = _options({"workers": workers, **given})
    options = CompileOptions(**of_compile).for_task(task)
    run = RunOptions(str(out / "build"), out=str(out), **{"progress": True, **of_run})
    place = place_of_process()
    if local or place is not None:
        refuse_moves(run, "with local=True, and under torchrun, nothing here can", "call fxpipe.fit without them")
    check_moves(run)
    problem: FxpipeError | None = None
    with ExitStack() as held:
        if place is None or place[0] == 0:
            try:
                held.enter_context(writing(run.out, again=True))
                plan = _built(model, task, options, out, hooks if place is None and not local else None)
                run = replace(run, plan_digest=plan.digest)
            except FxpipeError as error:
                if place is None:
                    raise
                problem = error  # the other processes wait for this one
        if place is not None:
            summary = join(run, task, problem=problem)
        elif local:
            summary = run_local(run, task)
        else:
            summary = launch(run, plan.processes, plan.mesh)
        if summary is None:
            return None
        load_weights(model, out / FINAL_WEIGHTS)
    return Fitted(model, summary)


def _built(model: nn.Module, task: Task, options: CompileOptions, out: Path, sent: Hooks | None) -> Plan:
    """Write the build; and what worker processes load, if hooks are sent to them. An error leaves all as it was."""
    if sent is None:
        return _compiled(model, task, options).save(out / "build").plan
    folder, hint = out / FOLDER, "choose another out"
    with ExitStack() as held:
        with disk_explained(folder, hint):  # before batches are read: a loader's own generator moves on with them
            fresh = held.enter_context(next_to(folder))
            write_hooks(fresh, model, sent)
        build, file = _compiled(model, task, options), fresh / MODEL_FILE
        lines = [row.source for row in build.nodes.rows if row.source] if build.nodes else []
        build = replace(build, plan=replace(build.plan, model_file=captured_of(file, {}, (), lines)))
        with disk_explained(folder, hint):
            put(fresh, folder)
        return build.save(out / "build", model_file=folder / MODEL_FILE).plan


def _function(name: str, data: Any) -> Callable[[], Iterable[Any]]:
    if isinstance(data, Iterator):
        raise TaskError(
            f"{name} is a {type(data).__name__}, which gives its batches only once",
            hint="give a list, a DataLoader, or a function that makes one",
        )
    return data if callable(data) else lambda: data


@contextmanager
def _generators_kept(data: Any) -> Iterator[None]:
    """Inside, batches may be read; afterwards a DataLoader's own generators are as before, for the run."""
    batches = getattr(data, "batch_sampler", None)
    owners = (data, getattr(data, "sampler", None), batches, getattr(batches, "sampler", None))
    found = [generator for owner in owners if (generator := generator_of(owner)) is not None]
    before = [generator.get_state() for generator in found]
    try:
        yield
    finally:
        for generator, state in zip(found, before, strict=True):
            generator.set_state(state)


def _options(given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options of the compile and of the run; one that both have goes to the compile, and the run takes it over.

    Raises:
        FxpipeError: neither has such an option.
    """
    of_compile, of_run = set(names(CompileOptions)), set(names(RunOptions)).difference(OF_FILES)
    for name in given:
        if name not in of_compile | of_run:
            known = sorted({*of_compile, *of_run, *HOOKS})
            raise FxpipeError(f"fit() has no option {name!r}{near(name, known)}", hint=f"one of {', '.join(known)}")
    both = {"threads", "accept_optimizer_per_worker"}
    return (
        {name: value for name, value in given.items() if name in of_compile},
        {name: value for name, value in given.items() if name in of_run - of_compile | both},
    )


def _compiled(model: nn.Module, task: Task, options: CompileOptions) -> Build:
    """The build of the model, for the shapes of its first batches."""
    data = task.train_data()
    with _generators_kept(data), buffers_kept(model):
        first = first_batches(data, options.scan)
    if not first.batches:
        raise TaskError("data has no batch", hint="give a list of batches, or a DataLoader that has some")
    (batch, *shapes), last = batches_to_compile(first, options)
    evaluation = None
    if task.validates:
        evaluation = task.metrics, task.eval_data(), task.hooks.metrics_of_all
    say(f"compiling for {options.workers} workers")
    build = compile(model, task.loss, batch, options, shapes=shapes, last=last, evaluation=evaluation)
    for warning in (*build.warnings, *open_end(first, len(build.plan.of_shapes), options)):
        warn(warning)
    return build

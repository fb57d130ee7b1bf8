"""What a run reports: warnings before it begins, and `run.json`: its settings, its results and where its time went."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from fxpipe.codecs import accuracy_warnings
from fxpipe.errors import FxpipeError
from fxpipe.files import replaced
from fxpipe.messages import warn
from fxpipe.observe.rates import samples_of
from fxpipe.observe.record import AVERAGED_WEIGHTS, BEST_NOTE, BEST_WEIGHTS, FINAL_WEIGHTS, Record
from fxpipe.observe.rows_of_ranks import plans_of_ranks, rows_of_ranks, share_ranks
from fxpipe.observe.run_folder import FORMAT, RUN
from fxpipe.observe.time_losses import time_losses
from fxpipe.observe.trace import OF_TRAINING, Kind
from fxpipe.optimizer.hurried_scheduler import hurried
from fxpipe.plan.spec import Plan
from fxpipe.planner.costs_file import read_costs
from fxpipe.planner.throttle import read_throttle
from fxpipe.policy.accuracy_warnings import warning
from fxpipe.policy.recipe import Recipe
from fxpipe.runtime.options import SHOWN, RunOptions
from fxpipe.runtime.process.resume import Resumed, say_resumed
from fxpipe.runtime.worker.executor import Executor
from fxpipe.runtime.worker.final_weights import warn_of_little_room
from fxpipe.runtime.worker.not_finite import NotFinite
from fxpipe.settings import read
from fxpipe.simulator.forecast import expect
from fxpipe.simulator.memory import peak_bytes
from fxpipe.stages.loaded import LoadedStage
from fxpipe.task.several_optimizers import parts_of
from fxpipe.threads import cores
from fxpipe.typed_json import dumps

_OWN: tuple[Kind, ...] = tuple(kind for kind in OF_TRAINING if kind != "wait")
_COMPUTE: tuple[Kind, ...] = tuple(kind for kind in _OWN if kind != "receive")
_PLANNED: dict[str, tuple[Kind, ...]] = {"F": ("F",), "B": ("B", "W"), "update": ("update",)}


def worker_row(executor: Executor, rank: int, replica: int = 0, processes: int = 1) -> dict[str, Any]:
    """The row of a worker, or of one of its replicas, in `run.json`.

    `engines` are those of its forward and its backward. `forward_ms` and `backward_ms` (with weight gradients and
    updates) are means over microbatches, without waits; `wait_ms` is the mean wait in a microbatch. `seconds` is the
    time of the worker's training, and the entries of `spent` add up to it (`others` is the time in which its rank ran
    its other workers, if it has some); `evaluate` is the time of evaluations during training, in addition. `took` is
    the time of its forwards, of its backwards and weight gradients without updates, and of its updates, each without
    waits and receives, as the plan has it (see `fxpipe.plan.cost_records.StageTime`). `waits` says what the worker
    waited for and from which worker, `fill` how much of that came before the first backward that no flush followed.
    `staleness` is there if it was logged (see `StalenessLog.summary`), `peak_bytes` if the worker had a process to
    itself on CUDA (`peak_row`), `sent` if it has replicas: the bytes that its process sent to them, by what was
    exchanged; `profile` is the file of its process, with `--profile`. `host` says what shares the cores of its
    host: the run's `processes` there, the `threads` of this one, the `cores`, and for how many `cpu_seconds` the
    worker's thread ran on one during training; null on CUDA.
    """
    watch, log = executor.watch, executor.store.staleness
    forward = watch.seconds(*_OWN, within="F")
    backward = sum(watch.seconds(*_OWN, within=whole) for whole in ("B", "W", "update"))
    row = {
        "worker": executor.worker,
        "rank": rank,
        "replica": replica,
        "engines": list(executor.stage.engines),
        "busy": watch.busy / max(watch.training, 1e-9),
        "forward_ms": 1000 * forward / max(watch.count("F"), 1),
        "backward_ms": 1000 * backward / max(watch.count("B"), 1),
        "wait_ms": 1000 * watch.seconds("wait") / max(watch.count("B"), 1),
        "seconds": watch.training,
        "evaluate": watch.seconds("evaluate"),
        "spent": watch.spent,
        "took": {
            name: sum(watch.seconds(*_COMPUTE, within=whole) for whole in wholes) for name, wholes in _PLANNED.items()
        },
        "waits": watch.waits,
        "fill": watch.fill,
        "not_finite": asdict(NotFinite.of(executor)),
        "loss_scale": None if executor.scaler is None else asdict(executor.scaler.scale),
        "host": {
            "processes": processes,
            "threads": torch.get_num_threads(),
            "cores": cores(),
            "cpu_seconds": watch.cpu if executor.device.type == "cpu" else None,
        },
    }
    if executor.collective is not None:
        row["sent"] = executor.collective.sent
    return row if log is None else row | {"staleness": log.summary()}


def watch_peak(device: torch.device) -> None:
    """Training begins: from now on, a worker on CUDA that has this process to itself measures its peak memory."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_row(device: torch.device) -> dict[str, int]:
    """On CUDA, the peak bytes of tensors in the process since `watch_peak`, by torch's allocator."""
    return {"peak_bytes": torch.cuda.max_memory_allocated(device)} if device.type == "cuda" else {}


def take_place(options: RunOptions, record: Record | None, averages: bool, rows: Sequence[Mapping[str, Any]]) -> None:
    """The weights of a run are written: replace an earlier run's logs by this run's.

    Args:
        record: in worker 0's process.
        averages: averages of the weights are written, too.
        rows: of all workers, which name their profiles.
    """
    if record is not None:
        best = {BEST_WEIGHTS, BEST_NOTE} if options.save_best is not None or options.resume is not None else set[str]()
        averaged = {AVERAGED_WEIGHTS} if averages else set[str]()
        profiles = {str(row["profile"]) for row in rows if "profile" in row}
        record.take_place({FINAL_WEIGHTS} | best | averaged | profiles)


def settings_of(options: RunOptions, plan: Plan, recipe: Recipe) -> dict[str, Any]:
    """The settings of a run that comparisons of runs show."""
    return {
        "schedule": recipe.schedule.name,
        "policy": str(recipe.policy),
        "microbatches": plan.microbatches,
        "dp": plan.dp,
        **{name: getattr(options, name) for name in SHOWN},
        "settings": read(),
        "arguments": list(plan.captured.given_arguments if options.arguments is None else options.arguments),
        "throttle": options.throttle,
        "device": plan.device,
    }


def summarize_run(
    record: Record,
    options: RunOptions,
    plan: Plan,
    recipe: Recipe,
    rows: Sequence[dict[str, Any]],
    transport: str,
    threads: int,
) -> dict[str, Any]:
    """The run as one JSON object, without its trace; write all of it except the losses to `run.json`.

    `seconds`, and all that is computed from times, is of training; `evaluation_seconds` is the time of evaluations
    before the last step, on worker 0. `evaluations` is a list of `{"step", "metrics", "averaged"}`, with the metrics
    of averaged weights in `averaged` if they were evaluated. `evaluation` is the metrics of the newest, if there is
    one; `add_evaluation` keeps both up to date.
    With `save_best`, `best` is the `{"metric", "step", "value", "kept"}` of the best one, `kept` is false if its
    weights could not be written, and `stopped` says why the run ended early: `patience`, or null.
    `averaged_evaluation` is the metrics of the averaged weights. `log_problems` has a row for each log with lines that
    could not be written: `{"file", "late", "lost"}`, how many were written late and how many never.
    `not_finite` counts the losses, and in the end the trained weights, that were not finite: 0 without `keep_going`.

    `loss_scaling` is there if the loss was scaled: `{"scale", "skipped_steps"}`, the scale of the next step, and how
    many steps made no update because gradients overflowed.

    `samples`, `tokens` and `flops` (of forward and backward) are of a minibatch of the build's first shape; the last
    two are null where they are not known. `samples_per_second` and the other rates that are known
    (`fxpipe/observe/rates.py`) are means of the whole run.

    `last_metrics` is there if the loss comes with metrics: the metrics of the last step.

    `workers` has the rows of all workers' first replicas (see `worker_row`); `replicas` has those of the others, whose
    `busy` is a share of their own time.

    `restarts` is a list of `{"cause", "where", "step"}` (see `fxpipe.runtime.process.launch`), and `moves` of what
    `fxpipe.runtime.process.moves` says.

    `busy` of a worker is a share of the time of the whole run, because a worker that ends first waits for the others.
    `bubble` is the share in which the ranks are not busy. `efficiency` is the throughput between the filling and the
    emptying of the pipeline, divided by the forecast's; None if too few steps are between them. In one process
    (`local`) the workers take turns, and both are None.

    Args:
        rows: of all workers, in their order.
        transport: how messages travelled: 'gloo', 'shared memory', both, 'nccl', or 'local'.
        threads: CPU threads of a worker.
    """
    steps = record.steps
    rows, others = [row for row in rows if not row["replica"]], [row for row in rows if row["replica"]]
    together = transport != "local"
    seconds = max(row["seconds"] for row in rows)
    rows = [{**row, "busy": row["busy"] * row["seconds"] / max(seconds, 1e-9)} for row in rows]
    weights = sum(len(row.pop("not_finite")["weights"]) for row in rows)
    scale = next(iter([row.pop("loss_scale", None) for row in rows]))
    for row in others:
        row.pop("not_finite")
        row.pop("loss_scale")
    forecast = _forecast(options.build, plan, recipe, options.throttle) if together else None
    steady = record.steady_samples_per_second
    share_ranks(rows)
    of_ranks = rows_of_ranks(rows) if plan.virtual else rows
    summary: dict[str, Any] = {
        "format": FORMAT,
        "build": {"folder": options.build, "digest": plan.digest},
        **settings_of(options, plan, recipe),
        "threads": threads,
        "transport": transport,
        "steps": steps,
        "resumed_after": steps - record.own_steps,
        "samples": record.samples,
        "tokens": plan.tokens * plan.microbatches or None,
        "flops": sum(plan.flops.values()) * plan.microbatches or None,
        "seconds": record.seconds,
        "evaluation_seconds": record.evaluation_seconds,
        **record.rates,
        "bubble": 1 - sum(row["busy"] for row in of_ranks) / len(of_ranks) if together else None,
        "forecast": forecast,
        "efficiency": steady / forecast["samples_per_second"] if forecast and steady is not None else None,
        "time_losses": _time_losses(of_ranks, forecast, seconds, record, plan, recipe) if together else [],
        "workers": list(rows),
        "replicas": others,
        "restarts": [],
        "moves": [],
        "trace": None,
        "out": None if record.out is None else str(record.out),
        "evaluations": [],
        "not_finite": {"losses": sum(not math.isfinite(loss) for loss in record.losses), "weights": weights},
        "log_problems": record.problems,
        "losses": record.losses.tolist(),
    }
    if record.metrics:
        summary["last_metrics"] = record.metrics
    if scale is not None:
        summary["loss_scaling"] = {"scale": scale["value"], "skipped_steps": scale["skipped"]}
    for evaluation in record.evaluations:
        add_evaluation(summary, evaluation["step"], evaluation["metrics"])
        summary["evaluations"][-1] |= evaluation
    write_run(summary)
    return summary


def add_evaluation(summary: dict[str, Any], step: int, metrics: dict[str, float]) -> None:
    """Put an evaluation into a run's summary; the caller writes the summary again."""
    # The run may have gone on from an earlier run's end, which was evaluated.
    if summary["evaluations"] and summary["evaluations"][-1]["step"] == step:
        summary["evaluations"].pop()
    summary["evaluations"].append({"step": step, "metrics": metrics})
    summary["evaluation"] = metrics


def evaluated_last(
    record: Record, summary: dict[str, Any], metrics: dict[str, float], seconds: float, best: bool = False
) -> None:
    """Record the evaluation of the trained weights in the metrics, in the summary and in `run.json`."""
    record.evaluated(summary["steps"], metrics, seconds, best)
    add_evaluation(summary, summary["steps"], metrics)
    write_run(summary)


def write_run(summary: dict[str, Any]) -> None:
    """Write `run.json` into the run's folder, if it has one; if that fails, print a warning."""
    if summary["out"] is None:
        return
    out = Path(summary["out"])
    body = {name: value for name, value in summary.items() if name != "losses"}
    if body["trace"] is not None:
        body["trace"] = os.path.relpath(body["trace"], out)
    try:
        out.mkdir(parents=True, exist_ok=True)
        with replaced(out / RUN) as file:
            file.write((dumps(body, indent=1) + "\n").encode())
    except OSError as error:
        warn(f"{out / RUN} cannot be written: {error.strerror or error}")


def averages_evaluated(summary: dict[str, Any], metrics: dict[str, float]) -> None:
    """The averages of the weights were evaluated, too."""
    summary["averaged_evaluation"] = summary["evaluations"][-1]["averaged"] = metrics
    write_run(summary)


def _time_losses(
    rows: Sequence[dict[str, Any]],
    forecast: dict[str, Any] | None,
    seconds: float,
    record: Record,
    plan: Plan,
    recipe: Recipe,
) -> list[dict[str, Any]]:
    """Where the ranks lost their time. If some have several workers, `worker` of a loss is a rank, and its text says
    rank."""
    of_ranks = forecast
    if forecast is not None and plan.virtual:
        of_ranks = {**forecast, "workers": plans_of_ranks(forecast["workers"], plan.placement)}
    name = recipe.schedule.name
    found = time_losses(rows, of_ranks, seconds, record.own_steps, plan.own_microbatches, name)
    return [{**loss, "text": loss["text"].replace("worker", "rank")} for loss in found] if plan.virtual else found


def _forecast(folder: str, plan: Plan, recipe: Recipe, throttle: str | None = None) -> dict[str, Any] | None:
    """What the simulator forecasts for such a run from the build's costs; None if it cannot.

    `milliseconds` is the time of a minibatch between the filling and the emptying of the pipeline. For each worker,
    `forward_ms` and `backward_ms` are of a microbatch, `update_ms` and `copy_ms` (copying messages) of a minibatch,
    `peak_bytes` is its memory at its fullest.
    `measured` says whether the stages were timed; else their costs were computed.
    """
    try:
        costs = read_costs(Path(folder), plan)
        if costs is None or not costs.workers:
            return None
        if (links := read_throttle(throttle, plan.processes)) is not None:
            costs = replace(costs, links=replace(links, copy=costs.links.copy))
        scenario, simulation = expect(plan, costs, recipe)
        peaks = peak_bytes(plan, costs, recipe.demand)
    except FxpipeError as error:
        warn(f"{error.what}: there is no forecast to compare the run with")
        return None
    if not simulation.seconds_per_minibatch:
        return None
    count = plan.own_microbatches
    return {
        "samples_per_second": simulation.samples_per_second(samples_of(plan)),
        "milliseconds": 1e3 * simulation.seconds_per_minibatch,
        "bubble": simulation.bubble,
        "measured": bool(costs.times),
        "workers": [
            {
                "forward_ms": 1e3 * cost.forward,
                "backward_ms": 1e3 * (cost.backward + cost.weight),
                "update_ms": 1e3 * cost.update,
                "peak_bytes": peaks[k],
                "copy_ms": 1e3 * (scenario.busy(k, count) - count * cost.microbatch - cost.update),
            }
            for k, cost in enumerate(scenario.workers)
        ],
    }


def say_first(
    resumed: Resumed | None,
    plan: Plan,
    recipe: Recipe,
    executor: Executor,
    out: str | None,
    total: int,
    epoch: int | None,
) -> None:
    """Print where the run goes on, and warn of what may go wrong; called in worker 0's process.

    Args:
        executor: of worker 0.
        out: the run's output folder.
        total: the steps of the run.
        epoch: the steps of an epoch, if known.
    """
    if resumed is not None:
        say_resumed(resumed)
    else:
        _warn_of_hurry(executor, total, epoch)
    _warn_of_staleness(recipe, executor)
    # Of codecs with which the accuracy was lower by more than a standard deviation.
    if found := accuracy_warnings.warning(accuracy_warnings.used_by(plan)):
        warn(found)
    warn_of_little_room(out, plan, executor.store.averages is not None)


def _warn_of_staleness(recipe: Recipe, executor: Executor) -> None:
    """Warn about a policy that failed with this worker's optimizer in the accuracy study."""
    optimizer = executor.store.updater.optimizer
    if recipe.schedule.synchronous or optimizer is None:
        return
    behind = recipe.demand.versions.lag("F", 0, 0)
    kinds = dict.fromkeys(type(part).__name__ for part in parts_of(optimizer))
    for found in (warning(str(recipe.policy), kind, behind) for kind in kinds):
        if found:
            warn(found)


def _warn_of_hurry(executor: Executor, total: int, epoch: int | None) -> None:
    """Warn about a scheduler that makes a step after every update and seems to be meant for epochs."""
    updater = executor.store.updater
    if updater.optimizer is None or updater.scheduler is None or updater.per_epoch:
        return
    steps, of = (epoch, "an epoch") if epoch is not None and epoch <= total else (total, "this run")
    more = epoch is not None and epoch < total
    if found := hurried(updater.optimizer, updater.scheduler, steps, of, more):
        warn(found)


def warn_if_edited(*stages: LoadedStage) -> None:
    """Warn about files that were edited since they were emitted."""
    for stage in stages:
        if stage.edited:
            warn(f"{stage.path} was edited since it was compiled; running it as it is")

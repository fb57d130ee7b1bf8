"""What a run reports: warnings before it begins, and at its end what `run.json` has of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec import UNSET

from fxpipe.codecs import accuracy_warnings
from fxpipe.errors import FxpipeError
from fxpipe.messages import warn
from fxpipe.observe.out_folder import AVERAGED_WEIGHTS, BEST_NOTE, BEST_WEIGHTS, FINAL_WEIGHTS
from fxpipe.observe.rates import samples_of
from fxpipe.observe.record import Record
from fxpipe.observe.run_json import RunJson, WorkerJson
from fxpipe.observe.time_losses import time_losses
from fxpipe.observe.trace import OF_TRAINING, Kind
from fxpipe.optimizer.hurried_scheduler import hurried
from fxpipe.plan.plan import Plan
from fxpipe.planner.costs_file import read_costs
from fxpipe.planner.device import read_throttle
from fxpipe.policy.accuracy_warnings import warning
from fxpipe.policy.recipe import Recipe
from fxpipe.runtime.options import SHOWN, RunOptions
from fxpipe.runtime.process.resume import Resumed, say_resumed
from fxpipe.runtime.worker.averages import Averages
from fxpipe.runtime.worker.executor import Executor
from fxpipe.runtime.worker.final_weights import warn_of_little_room
from fxpipe.runtime.worker.loss_scaler import LossScaler, Scale
from fxpipe.runtime.worker.not_finite import NotFinite
from fxpipe.runtime.worker.staleness import StalenessLog
from fxpipe.settings import read
from fxpipe.simulator.memory import peak_bytes
from fxpipe.simulator.of_build import expect
from fxpipe.stages.loaded import LoadedStage
from fxpipe.task.several_optimizers import parts_of
from fxpipe.threads import cores

_OWN: tuple[Kind, ...] = tuple(kind for kind in OF_TRAINING if kind != "wait")
_COMPUTE: tuple[Kind, ...] = tuple(kind for kind in _OWN if kind != "receive")
_PLANNED: dict[str, tuple[Kind, ...]] = {"F": ("F",), "B": ("B", "W"), "update": ("update",)}


@dataclass(frozen=True)
class WorkerResult:
    """What a worker, or one of its replicas, reports after training. The scale is that of the next minibatch."""

    row: WorkerJson
    not_finite: NotFinite
    loss_scale: Scale | None

    @staticmethod
    def of(executor: Executor, rank: int, processes: int, more: Mapping[str, Any]) -> WorkerResult:
        """Of a worker here; this host has so many processes of the run. `more` is what its row has of this process."""
        watch, log = executor.watch, executor.store.part(StalenessLog)
        forward = watch.seconds(*_OWN, within="F")
        backward = sum(watch.seconds(*_OWN, within=whole) for whole in ("B", "W", "update"))
        row = WorkerJson(
            worker=executor.worker,
            rank=rank,
            replica=executor.replica,
            engines=list(executor.stages[0].engines),
            busy=watch.busy / max(watch.training, 1e-9),
            forward_ms=1000 * forward / max(watch.count("F"), 1),
            backward_ms=1000 * backward / max(watch.count("B"), 1),
            wait_ms=1000 * watch.seconds("wait") / max(watch.count("B"), 1),
            seconds=watch.training,
            evaluate=watch.seconds("evaluate"),
            spent=watch.spent,
            took={
                name: sum(watch.seconds(*_COMPUTE, within=whole) for whole in wholes)
                for name, wholes in _PLANNED.items()
            },
            waits=watch.waits,
            fill=watch.fill,
            host={
                "processes": processes,
                "threads": torch.get_num_threads(),
                "cores": cores(),
                "cpu_seconds": watch.cpu if executor.device.type == "cpu" else None,
            },
            sent=UNSET if executor.setting.collective is None else dict(executor.setting.collective.sent),
            staleness=UNSET if log is None else log.summary(),
            **more,
        )
        scaler = executor.store.part(LossScaler)
        return WorkerResult(row, NotFinite.of(executor), None if scaler is None else scaler.scale)


def watch_peak(device: torch.device) -> None:
    """Training begins: from now on, a worker on CUDA that has this process to itself measures its peak memory."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_row(device: torch.device) -> dict[str, int]:
    """On CUDA, what `WorkerJson` has of a process since `watch_peak`, and of its device now."""
    if device.type != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info(device)
    peak, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    return {"peak_bytes": peak, "reserved_bytes": reserved, "free_bytes": free, "device_bytes": total}


def take_place(options: RunOptions, record: Record | None, averages: bool, results: Sequence[WorkerResult]) -> None:
    """The weights of a run are written: replace an earlier run's logs by this run's. The record is in worker 0's
    process; the results of all workers name their profiles."""
    if record is not None:
        best = {BEST_WEIGHTS, BEST_NOTE} if options.save_best is None and options.resume is not None else set[str]()
        averaged = {AVERAGED_WEIGHTS} if averages else set[str]()
        profiles = {str(result.row.profile) for result in results if result.row.profile is not UNSET}
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
        "arguments": list(plan.model_file.given_arguments if options.arguments is None else options.arguments),
        "throttle": options.throttle,
        "device": plan.device,
    }


def summarize_run(
    record: Record,
    options: RunOptions,
    plan: Plan,
    recipe: Recipe,
    results: Sequence[WorkerResult],
    transport: str,
    threads: int,
) -> RunJson:
    """What `run.json` has of a run when its weights are written, before they are evaluated. The results are of all
    workers, in their order."""
    together = transport != "local"
    first = [result for result in results if not result.row.replica]
    rows, scale = [result.row for result in first], first[0].loss_scale
    seconds = max(row.seconds for row in rows)
    forecast = _forecast(options.build, plan, recipe, options.throttle) if together else None
    share_ranks(rows)
    for row, planned in zip(rows, _planned(forecast, plan), strict=True):
        row.busy, row.planned = row.busy * row.seconds / max(seconds, 1e-9), planned
    pace, counts = record.pace, (record.pace.steps, plan.own_microbatches)
    settings = settings_of(options, plan, recipe)
    shown = {name: settings.pop(name) for name in SHOWN}
    run = RunJson(
        build={"folder": options.build, "digest": plan.digest},
        options=shown,
        **settings,
        threads=threads,
        transport=transport,
        steps=pace.first + pace.steps,
        resumed_after=pace.first,
        samples=samples_of(plan),
        tokens=plan.step.tokens * plan.microbatches or None,
        flops=sum(plan.step.flops.values()) * plan.microbatches or None,
        seconds=pace.seconds,
        evaluation_seconds=pace.evaluation_seconds,
        bubble=1 - sum(row.busy for row in rows) / len({row.rank for row in rows}) if together else None,
        forecast=forecast,
        efficiency=pace.steady / forecast["samples_per_second"] if forecast and pace.steady is not None else None,
        time_losses=time_losses(rows, forecast, seconds, *counts) if together else [],
        workers=rows,
        replicas=[result.row for result in results if result.row.replica],
        out=None if options.out is None else str(Path(options.out)),
        evaluations=list(record.evaluations),
        not_finite={
            "losses": sum(not math.isfinite(loss) for loss in record.losses),
            "weights": sum(len(result.not_finite.weights) for result in first),
        },
        log_problems=record.problems,
        losses=record.losses.tolist(),
        last_metrics=record.metrics or UNSET,
        loss_scaling=UNSET if scale is None else {"scale": scale.value, "skipped_steps": scale.skipped},
        evaluation=record.evaluations[-1]["metrics"] if record.evaluations else UNSET,
    )
    return msgspec.structs.replace(run, **pace.rates)


def share_ranks(rows: Sequence[WorkerJson]) -> None:
    """Separate the time in which a worker's rank ran its other workers from unexplained time.

    `spent` gets an entry `others` where a rank has several workers; its entries still add up to `seconds`.
    """
    busy = [sum(row.spent.values()) - row.spent["other"] for row in rows]
    for row in rows:
        others = [busy[i] for i, each in enumerate(rows) if each.rank == row.rank and each is not row]
        if others:
            unexplained = row.spent["other"]
            elsewhere = min(sum(others), unexplained)
            row.spent = {**row.spent, "others": elsewhere, "other": unexplained - elsewhere}


def _planned(forecast: dict[str, Any] | None, plan: Plan) -> list[dict[str, float] | None]:
    """For each worker, what its row measures as the forecast has it; None without a forecast.

    A worker waits while its rank has nothing to do.
    """
    if forecast is None:
        return [None] * plan.workers
    count, idle = plan.own_microbatches, [forecast["milliseconds"]] * plan.ranks
    for worker, row in enumerate(forecast["workers"]):
        busy = count * (row["forward_ms"] + row["backward_ms"]) + row["update_ms"] + row["copy_ms"]
        idle[plan.rank_of(worker)] -= busy
    return [
        {
            "forward_ms": row["forward_ms"],
            "backward_ms": row["backward_ms"] + row["update_ms"] / count,
            "wait_ms": max(idle[plan.rank_of(worker)], 0.0) / count,
        }
        for worker, row in enumerate(forecast["workers"])
    ]


def _forecast(folder: str, plan: Plan, recipe: Recipe, throttle: str | None = None) -> dict[str, Any] | None:
    """See `RunJson.forecast`; None if the simulator cannot."""
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
    """Print where the run goes on, and warn of what may go wrong; called in worker 0's process. The executor is worker
    0's."""
    if resumed is not None:
        say_resumed(resumed)
    else:
        _warn_of_hurry(executor, total, epoch)
    _warn_of_staleness(recipe, executor)
    # Of codecs with which the accuracy was lower by more than a standard deviation.
    if text := accuracy_warnings.warning(accuracy_warnings.used_by(plan)):
        warn(text)
    warn_of_little_room(out, plan, executor.store.part(Averages) is not None)


def _warn_of_staleness(recipe: Recipe, executor: Executor) -> None:
    """Warn about a policy that failed with this worker's optimizer in the accuracy study."""
    optimizer = executor.store.updater.optimizer
    if recipe.schedule.synchronous or optimizer is None:
        return
    behind = recipe.demand.versions.lag("F", 0, 0)
    kinds = dict.fromkeys(type(part).__name__ for part in parts_of(optimizer))
    for text in (warning(str(recipe.policy), kind, behind) for kind in kinds):
        if text:
            warn(text)


def _warn_of_hurry(executor: Executor, total: int, epoch: int | None) -> None:
    """Warn about a scheduler that makes a step after every update and seems to be meant for epochs."""
    updater = executor.store.updater
    if updater.optimizer is None or updater.scheduler.user is None or updater.scheduler.per_epoch:
        return
    steps, of = (epoch, "an epoch") if epoch is not None and epoch <= total else (total, "this run")
    more = epoch is not None and epoch < total
    if text := hurried(updater.optimizer, updater.scheduler.user, steps, of, more):
        warn(text)


def warn_if_edited(*stages: LoadedStage) -> None:
    """Warn about files that were edited since they were emitted."""
    for stage in stages:
        if stage.edited:
            warn(f"{stage.path} was edited since it was compiled; running it as it is")

"""`run.json`, which a run writes at its end: its settings, its results and where its time went. Needs no torch.

A field without a value (`UNSET`) is not in the file. Other defaults are those of fields that an earlier fxpipe did not
write: readers check each field that is there against its type here (`fxpipe/observe/run_folder.py`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NotRequired, Required, TypedDict

from msgspec import UNSET, Struct, UnsetType, convert, to_builtins

from fxpipe.files import replaced
from fxpipe.messages import warn
from fxpipe.typed_json import dumps

RUN = "run.json"
FORMAT = 1
EVALUATIONS = ("eval", "averaged")
"""The keys of those lines of `metrics.jsonl` that do not belong to a step."""

Metrics = dict[str, float]


class Evaluation(TypedDict):
    """The metrics after a step, and those of the averaged weights if they were evaluated."""

    step: int
    metrics: Metrics
    averaged: NotRequired[Metrics]


def add_evaluation(row: Mapping[str, Any], evaluations: list[Evaluation], number: Callable[[Any], Any]) -> bool:
    """Add a line of `metrics.jsonl` to the evaluations before it, if it is of one; returns whether it is. `number`
    reads a value, which is null if it was not finite."""
    for kind in EVALUATIONS:
        if isinstance(row.get(kind), dict):
            metrics = {name: number(value) for name, value in row[kind].items()}
            if kind == "eval":
                evaluations.append({"step": row["step"], "metrics": metrics})
            elif evaluations:
                evaluations[-1]["averaged"] = metrics
            return True
    return False


WaitJson = TypedDict("WaitJson", {"what": str, "from": int, "seconds": float}, total=False)


class LostTime(TypedDict, total=False):
    """A row of `fxpipe.observe.time_losses.time_losses`."""

    worker: int | None
    share: float
    cause: str
    text: Required[str]


class MoveJson(TypedDict, total=False):
    """A move of units to other workers, after a step.

    It says why, with the links that are other than at the compile; the `speeds` by rank, as shares of what the build's
    costs promise, empty if a worker was lost; the units of each worker; the share of a step's time that the forecast
    saves; and for how long nothing was trained.
    """

    step: int
    because: str
    speeds: list[float]
    before: str
    after: str
    gain: float | None
    seconds: float | None


class WorkedTime(Struct, kw_only=True):
    """Where the time of a worker went."""

    # its share of the time of the whole run, because a worker that ends first waits for the others; of another replica
    # than the first, of its own time
    busy: float = 0.0
    # forward_ms, backward_ms: means over microbatches, without waits; the latter with weight gradients and updates
    forward_ms: float = 0.0
    backward_ms: float = 0.0
    wait_ms: float = 0.0  # its mean wait in a microbatch
    seconds: float = 0.0  # the time of its training; the entries of `spent` add up to it
    evaluate: float = 0.0  # the time of evaluations during training, in addition
    # its seconds by kind; `others` is the time in which its rank ran its other workers, if it has some
    spent: dict[str, float] = {}
    # the time of its forwards, of its backwards and weight gradients without updates, and of its updates, each without
    # waits and receives, as the plan has it (see `fxpipe.plan.cost_records.StageTime`)
    took: dict[str, float] = {}
    waits: list[WaitJson] = []  # what it waited for, and from which worker
    fill: float = 0.0  # how much of that came before the first backward that no flush followed
    # of a first replica, its times in a microbatch, None without a forecast
    planned: dict[str, float] | UnsetType | None = UNSET


class WorkerJson(WorkedTime, kw_only=True):
    """The row of a worker, or of one of its replicas."""

    rank: int
    worker: int = 0
    replica: int = 0
    engines: list[str] = []  # those of its forward and its backward
    # what shares the cores of its host: the run's `processes` there, the `threads` of its own, the `cores`, and for how
    # many `cpu_seconds` its thread ran on one during training, None on CUDA
    host: dict[str, Any] = {}
    # if it has replicas, the bytes that its process sent to them, by what was exchanged
    sent: dict[str, int] | UnsetType = UNSET
    # if it was logged, the rows of `fxpipe.observe.staleness.StalenessLog.summary`
    staleness: list[dict[str, int | float]] | UnsetType = UNSET
    profile: str | UnsetType = UNSET  # the file of its process, with `--profile`
    # peak_bytes, reserved_bytes: of a worker with a process to itself on CUDA, the peak of tensors, and of what torch's
    # allocator had taken for them
    peak_bytes: int | UnsetType = UNSET
    reserved_bytes: int | UnsetType = UNSET
    # free_bytes, device_bytes: of its device at the end: contexts, NCCL, other processes and so on have the others
    free_bytes: int | UnsetType = UNSET
    device_bytes: int | UnsetType = UNSET


class RunSettings(Struct, kw_only=True):
    """What was run, and how."""

    format: int = FORMAT
    build: dict[str, str] = {}
    schedule: str = ""
    policy: str = ""
    microbatches: int = 0
    dp: int = 1
    # those that summaries show (`fxpipe.runtime.options.SHOWN`); in the file each has a key of its own
    options: dict[str, Any] = {}
    settings: dict[str, bool | int | float | str | None] = {}
    arguments: list[str] = []
    throttle: str | None = None
    device: str | None = None
    threads: int = 0  # CPU threads of a worker
    transport: str = ""  # how messages travelled: 'gloo', 'shared memory', both, 'nccl', or 'local'
    out: str | None = None  # the folder


class RunTimes(RunSettings, kw_only=True):
    """How fast it was. `seconds`, and all that is computed from times, is of training."""

    steps: int = 0
    resumed_after: int = 0  # the step after which it went on; 0 if it began anew
    # samples, tokens, flops: of a minibatch of the build's first shape, the latter of forward and backward; None where
    # they are not known
    samples: int = 0
    tokens: int | None = None
    flops: float | None = None
    seconds: float = 0.0
    evaluation_seconds: float = 0.0  # the time of evaluations before the last step, on worker 0
    # samples_per_second, tokens_per_second, tflops_per_device, mfu: the rates that are known
    # (`fxpipe/observe/rates.py`), means of the whole run
    samples_per_second: float | UnsetType = UNSET
    tokens_per_second: float | UnsetType = UNSET
    tflops_per_device: float | UnsetType = UNSET
    mfu: float | UnsetType = UNSET
    # the share in which the ranks are not busy. With `local` the workers take turns, and it is None
    bubble: float | None = None
    # what the simulator says of such a run from the build's costs; None if it cannot. `milliseconds` is the time of a
    # minibatch between the filling and the emptying of the pipeline. For each worker, `forward_ms` and `backward_ms`
    # are of a microbatch, `update_ms` and `copy_ms` (copying messages) of a minibatch, `peak_bytes` is its memory at
    # its fullest. `measured` says whether the stages were timed; else their costs were computed
    forecast: dict[str, Any] | None = None
    # the throughput between the filling and the emptying of the pipeline, divided by the forecast's; None if too few
    # steps are between them, or with `local`
    efficiency: float | None = None
    time_losses: list[LostTime] = []


class RunJson(RunTimes, kw_only=True):
    """A run, without its trace and its steps."""

    # workers, replicas: the rows of all workers' first replicas, and those of the others
    workers: list[WorkerJson] = []
    replicas: list[WorkerJson] = []
    restarts: list[dict[str, Any]] = []  # `{"cause", "where", "step"}` each: see `fxpipe.runtime.process.launch`
    moves: list[MoveJson] = []
    trace: str | None = None  # the file of the trace, if there is one; `run.json` has the path from its own folder
    evaluations: list[Evaluation] = []  # all, in their order
    # counts the `losses`, and in the end the trained `weights`, that were not finite: 0 without `keep_going`
    not_finite: dict[str, int] = {}
    # `{"file", "lost"}` for each log with lines that could not be written: how many
    log_problems: list[dict[str, Any]] = []
    losses: list[float] = []  # of all steps; not in the file
    last_metrics: Metrics | UnsetType = UNSET  # of the last step, if the loss comes with metrics
    # if the loss was scaled, the `scale` of the next step, and how many `skipped_steps` made no update because
    # gradients overflowed
    loss_scaling: dict[str, int | float] | UnsetType = UNSET
    # evaluation, averaged_evaluation: the metrics of the newest one, and of the averaged weights at the end
    evaluation: Metrics | UnsetType = UNSET
    averaged_evaluation: Metrics | UnsetType = UNSET
    # with `save_best`, or if the run ended early, why it did: `patience`, or the callback; else None
    stopped: str | UnsetType | None = UNSET
    # with `save_best`, the `metric`, `step` and `value` of the best evaluation; `kept` is false if its weights could
    # not be written
    best: dict[str, Any] | UnsetType | None = UNSET

    @staticmethod
    def of(body: Mapping[str, Any]) -> RunJson:
        """What `to_json` gives, which another process has sent or a caller has."""
        fields = {name: value for name, value in body.items() if name in RunJson.__struct_fields__}
        run = convert(fields, RunJson)
        run.options = {name: value for name, value in body.items() if name not in fields}
        return run

    def to_json(self) -> dict[str, Any]:
        """The run as one object of plain JSON, with its losses: what users get of it."""
        body: dict[str, Any] = to_builtins(self)
        return body | body.pop("options")

    def write(self) -> None:
        """Write `run.json` into the run's folder, if it has one; if that fails, print a warning."""
        if self.out is None:
            return
        out, body = Path(self.out), self.to_json()
        del body["losses"]
        if self.trace is not None:
            body["trace"] = os.path.relpath(self.trace, out)
        try:
            out.mkdir(parents=True, exist_ok=True)
            with replaced(out / RUN) as file:
                file.write((dumps(body, indent=1) + "\n").encode())
        except OSError as error:
            warn(f"{out / RUN} cannot be written: {error.strerror or error}")

    def evaluated(self, metrics: Metrics) -> None:
        """The trained weights were evaluated: write that, too."""
        # The run may have gone on from an earlier run's end, which was evaluated.
        if self.evaluations and self.evaluations[-1]["step"] == self.steps:
            self.evaluations.pop()
        self.evaluations.append({"step": self.steps, "metrics": metrics})
        self.evaluation = metrics
        self.write()

    def averages_evaluated(self, metrics: Metrics) -> None:
        """The averages of these weights were evaluated, too."""
        self.averaged_evaluation = self.evaluations[-1]["averaged"] = metrics
        self.write()

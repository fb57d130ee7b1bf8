"""Reads what a run left in its folder: all that exists, with a sentence for what is missing. Needs no torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NotRequired, Required, TypedDict

from fxpipe.errors import RunError
from fxpipe.observe.rates import RATES
from fxpipe.observe.trace.nesting import flatten
from fxpipe.observe.trace.reader import read_trace
from fxpipe.typed_json import Malformed, convert, finite, parse

RUN, METRICS = "run.json", "metrics.jsonl"
FORMAT = 1

SPANS = 6000
"""The measured timeline is cut to its first minibatches, so that it has at most this many spans."""

_METRICS = ("step", "loss", "lr", "grad_norm", "loss_scale", "seconds", *RATES)

_EVALUATIONS = {"eval", "averaged"}
"""The keys of lines that do not belong to a step."""

_WaitJson = TypedDict("_WaitJson", {"what": str, "from": int | None, "seconds": float | None}, total=False)


class _WorkerJson(TypedDict, total=False):
    worker: int
    rank: Required[int]
    busy: Required[float | None]
    engines: list[str]
    forward_ms: float | None
    backward_ms: float | None
    wait_ms: float | None
    evaluate: float | None
    seconds: float | None
    spent: dict[str, float] | None
    took: dict[str, float] | None
    waits: list[_WaitJson]
    fill: float | None
    staleness: list[dict[str, float | None]]


class _BuildJson(TypedDict, total=False):
    folder: str | None
    digest: str | None


class _LossJson(TypedDict, total=False):
    worker: int | None
    share: float
    text: Required[str]


class _MoveJson(TypedDict, total=False):
    step: int
    because: str
    speeds: list[float]
    before: str
    after: str
    gain: float | None
    seconds: float | None


class _Evaluation(TypedDict):
    step: int
    metrics: dict[str, float | None]
    averaged: NotRequired[dict[str, float | None]]


class _LossScaling(TypedDict):
    scale: float
    skipped_steps: int


class _Run(TypedDict, total=False):
    """The values of `run.json` that code computes with; each may be null."""

    build: _BuildJson
    forecast: dict[str, Any]
    workers: list[_WorkerJson]
    time_losses: list[_LossJson]
    moves: list[_MoveJson]
    last_metrics: dict[str, float | None]
    evaluation: dict[str, float | None]
    evaluations: list[_Evaluation]
    settings: dict[str, bool | int | float | str | None]
    arguments: list[str]
    schedule: str
    policy: str
    trace: str
    steps: int
    resumed_after: int
    samples: int
    microbatches: int
    seconds: float
    samples_per_second: float
    tokens_per_second: float
    tflops_per_device: float
    mfu: float
    peak: float
    bubble: float
    efficiency: float
    threads: int
    loss_scaling: _LossScaling


def read_run(folder: str | Path, digest: str | None = None) -> dict[str, Any]:
    """All of a run in one dict of plain JSON.

    It has the keys of `run.json`, if they can be read, and

        folder      as it was given
        problems    what is missing or wrong, a sentence each
        metrics     columns of one length: step, loss, lr, grad_norm, loss_scale, seconds and the rates
                    (`fxpipe/observe/rates.py`); null where absent
        step_metrics  the same for each metric that the losses came with, by its name
        evaluations {step, metrics: {name: number or null}} each, perhaps with `averaged`, likewise: of
                    run.json, or of metrics.jsonl as far as that goes
        timeline    {seconds, minibatches, of, spans: [[worker, kind, minibatch, microbatch, start, end]]} or null:
                    of the first minibatches, at least of one; spans of a worker do not overlap, times are seconds

    Args:
        digest: that of the plan whose run it must be.

    Raises:
        RunError: the folder is not a run, or the run is of another build.
    """
    folder = Path(folder)
    if not (folder / RUN).is_file() and not (folder / METRICS).is_file():
        what = "it does not exist" if not folder.exists() else f"it has neither {RUN} nor {METRICS}"
        raise RunError(f"{folder} is not a run: {what}", hint="give the --out folder of `fxpipe run`")
    problems: list[str] = []
    run = _summary(folder, problems)
    if digest is not None:
        _check_build(folder, run, digest, problems)
    metrics, named, evaluations = _metrics(folder, run, problems)
    evaluations = run.get("evaluations") or evaluations
    timeline = _timeline(folder, run, problems)
    found = {"metrics": metrics, "step_metrics": named, "evaluations": evaluations, "timeline": timeline}
    return {**run, "folder": str(folder), "problems": problems, **found}


def _summary(folder: Path, problems: list[str]) -> dict[str, Any]:
    path = folder / RUN
    if not path.is_file():
        problems.append(f"{RUN} is missing: the run did not end, its settings and its timeline are unknown")
        return {}
    try:
        run = finite(convert(parse(path, finite=False), dict[str, Any]))
    except Malformed as problem:
        problems.append(
            f"{RUN}{problem.place} cannot be read ({problem.what}): settings, summary and timeline are unknown"
        )
        return {}
    if run.get("format") != FORMAT:
        found = str(run.get("format"))[:40]
        problems.append(f"{RUN} is of format {found}, this fxpipe reads {FORMAT}: parts may be missing")
    for key in _Run.__annotations__.keys() & run.keys():
        try:
            if run[key] is not None:
                convert({key: run[key]}, _Run, extra=True)
        except Malformed as problem:
            problems.append(f"{RUN}{problem.place}: {problem.what}: '{key}' is left out")
            del run[key]
    for row in run.get("workers") or ():
        row.setdefault("worker", row["rank"])  # an earlier fxpipe had one worker on each rank
    return run


def _check_build(folder: Path, run: dict[str, Any], digest: str, problems: list[str]) -> None:
    build = run.get("build") or {}
    found = build.get("digest")
    if found is None:
        problems.append(f"{RUN} does not say which build it ran: it may not be this one")
    elif found != digest:
        hint = f"give the build it ran, {build['folder']}, as it was then" if build.get("folder") else None
        raise RunError(
            f"{folder} is a run of another build: that one's digest is {str(found)[:12]}, this one's {digest[:12]}",
            where=str(folder / RUN),
            hint=hint or "run this build, or give the build that was run",
        )


def _metrics(
    folder: Path, run: dict[str, Any], problems: list[str]
) -> tuple[dict[str, list[Any]], dict[str, list[Any]], list[dict[str, Any]]]:
    """The steps by column, the metrics that their losses came with, and the evaluations between them."""
    columns: dict[str, list[Any]] = {name: [] for name in _METRICS}
    named: dict[str, list[Any]] = {}
    evaluations: list[dict[str, Any]] = []
    for row in _rows(folder / METRICS, problems):
        if (kind := next((kind for kind in _EVALUATIONS if isinstance(row.get(kind), dict)), None)) is not None:
            values = {name: _number(value) for name, value in row[kind].items()}
            if kind == "eval":
                evaluations.append({"step": row["step"], "metrics": values})
            elif evaluations:
                evaluations[-1]["averaged"] = values
            continue
        for name, value in row["metrics"].items() if isinstance(row.get("metrics"), dict) else ():
            missing = len(columns["step"]) - len(named.setdefault(name, []))
            named[name] += [*[None] * missing, _number(value)]
        for name, column in columns.items():
            column.append(_number(row.get(name)))
    shown, steps = len(columns["step"]), run.get("steps")
    if steps is not None and steps > shown and (folder / METRICS).is_file():
        problems.append(f"{METRICS} holds {shown} of the run's {steps} steps")
    for column in named.values():
        column += [None] * (shown - len(column))
    return columns, named, evaluations


def _rows(path: Path, problems: list[str]) -> Iterator[dict[str, Any]]:
    """The lines of `metrics.jsonl` that are objects with a step; says which are not."""
    lost = "loss and throughput over time are missing"
    wrong: list[int] = []
    number = shown = 0
    whole = True
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for number, line in enumerate(file, start=1):
                whole = line.endswith("\n")
                row = _object(line)
                if row is not None and _number(row.get("step")) is not None:
                    shown += not _EVALUATIONS & row.keys()
                    yield row
                elif line.strip():
                    wrong.append(number)
    except FileNotFoundError:
        problems.append(f"{path.name} is missing: {lost}")
        return
    except OSError as error:
        problems.append(f"{path.name} cannot be read ({error.strerror}): {lost}")
        return
    if wrong and wrong[-1] == number and not whole:
        plural = " is" if shown == 1 else "s are"
        problems.append(f"{path.name} ends in the middle of line {wrong.pop()}: {shown} step{plural} shown")
    elif not shown and not wrong:
        problems.append(f"{path.name} holds no step yet")
    if wrong:
        more = f", nor are {len(wrong) - 1} more" if len(wrong) > 2 else ", nor is one more" if len(wrong) > 1 else ""
        problems.append(f"{path.name}: line {wrong[0]} is not a step{more}: left out")


def _object(line: str) -> dict[str, Any] | None:
    try:
        row = parse(line, finite=False)
    except Malformed:
        return None
    return row if isinstance(row, dict) else None


def _number(value: Any) -> int | float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value


def _timeline(folder: Path, run: dict[str, Any], problems: list[str]) -> dict[str, Any] | None:
    if run.get("trace") is None:
        return None
    path = folder / run["trace"]
    name = path.name
    try:
        if not path.is_file():  # a pipe would be waited for
            raise FileNotFoundError
        # So many spans a minibatch has at least: forwards and backwards.
        least = 2 * max(len(run.get("workers") or ()), 1) * max(run.get("microbatches") or 1, 1)
        trace = read_trace(path, max(SPANS // least, 1))
    except FileNotFoundError:
        problems.append(f"{name} is missing where {RUN} says it is ({run['trace']}): there is no timeline")
        return None
    except (OSError, ValueError) as error:  # the latter for a name that no file has
        reason = error.strerror if isinstance(error, OSError) else error
        problems.append(f"{name} cannot be read ({reason}): there is no timeline")
        return None
    digest, steps = (run.get("build") or {}).get("digest"), run.get("steps")
    if digest is not None and trace.other.get("build", digest) != digest:
        problems.append(f"a run of another build has overwritten {name}: there is no timeline")
        return None
    if steps is not None and trace.minibatches != steps:
        problems.append(f"{name} is of {trace.minibatches} steps, the run of {steps}: it was written by another run")
        return None
    spans = flatten(trace.events)
    if not spans:
        return None
    silent = sorted({row["worker"] for row in run.get("workers") or ()} - {span.worker for span in spans})
    if silent:
        named = f"worker{'s' if len(silent) > 1 else ''} {', '.join(map(str, silent))}"
        problems.append(f"{name} holds nothing of {named} in what is shown")
    shown = _first(Counter(span.minibatch for span in spans))
    kept = [span for span in spans if span.minibatch < shown]
    return {
        "seconds": max(span.end for span in kept) / 1e9,
        "minibatches": shown,
        "of": max(trace.minibatches, steps or 0),
        "spans": [[s.worker, s.kind, s.minibatch, s.microbatch, s.begin / 1e9, s.end / 1e9] for s in kept],
    }


def _first(counts: Counter[int]) -> int:
    """How many of the first minibatches have at most `SPANS` spans together; at least one with spans."""
    shown = total = 0
    for minibatch in sorted(counts):
        total += counts[minibatch]
        if shown and total > SPANS:
            break
        shown = minibatch + 1
    return shown

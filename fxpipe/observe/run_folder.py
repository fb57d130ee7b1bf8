"""Reads what a run left in its folder: all that exists, with a sentence for what is missing. Needs no torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msgspec.structs import fields

from fxpipe.errors import RunError
from fxpipe.observe.out_folder import METRICS
from fxpipe.observe.rates import RATES
from fxpipe.observe.run_json import EVALUATIONS, FORMAT, RUN, Evaluation, RunJson, add_evaluation
from fxpipe.observe.trace.reader import flatten, read_trace
from fxpipe.typed_json import Malformed, convert, finite, parse

SPANS = 6000
"""The measured timeline is cut to its first minibatches, so that it has at most this many spans."""

_METRICS = ("step", "loss", "lr", "grad_norm", "loss_scale", "seconds", *RATES)


def read_run(folder: str | Path, digest: str | None = None) -> dict[str, Any]:
    """All of a run, which must be of the plan with this digest, in one dict of plain JSON.

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
    for field in fields(RunJson):
        if (value := _without_nulls(run.get(field.name))) is None:
            continue
        try:
            convert(value, field.type, extra=True)
        except Malformed as problem:
            place = f"$.{field.name}{problem.place.removeprefix(', $')}"
            problems.append(f"{RUN}, {place}: {problem.what}: '{field.name}' is left out")
            del run[field.name]
    for row in run.get("workers") or ():
        row.setdefault("worker", row["rank"])  # an earlier fxpipe had one worker on each rank
    return run


def _without_nulls(value: Any) -> Any:
    """A value of `run.json` without the null that its numbers have if they were not finite."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


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
) -> tuple[dict[str, list[Any]], dict[str, list[Any]], list[Evaluation]]:
    """The steps by column, the metrics that their losses came with, and the evaluations between them."""
    columns: dict[str, list[Any]] = {name: [] for name in _METRICS}
    named: dict[str, list[Any]] = {}
    evaluations: list[Evaluation] = []
    for row in _rows(folder / METRICS, problems):
        if add_evaluation(row, evaluations, _number):
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
                    shown += row.keys().isdisjoint(EVALUATIONS)
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

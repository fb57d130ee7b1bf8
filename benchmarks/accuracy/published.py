"""The runs of a published result.json: a study goes on from them where the journal is another machine's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from codec_rows import runs_of
from eager import EagerCheck
from prediction import PredictionError
from study import Job, Study
from training import Run

Result = dict[str, Any]
Row = dict[str, Any]


def published(path: Path, study: Study) -> Iterator[tuple[Job, Result]]:
    """Every job of the study that is part of this summary, with its result.

    A summary of these is this one again. Not all of a job's own result is known: of the seeds of a condition only the
    mean curve, which stands for the curve of each; of prediction errors their root mean square, likewise. Final values
    have five digits.
    """
    summary = json.loads(path.read_text())
    yield from runs_of(summary["codecs"])  # first: some of them are conditions' runs, too, and these have curves
    for row in summary["conditions"]:
        yield from _runs(row)
    checked = {(row["workload"], row["optimizer"], row["steps"]): row for row in summary["eager"]}
    errors = {(row["workload"], row["optimizer"], row["rate"]): row for row in summary["prediction_errors"]}
    for job in study.once():
        if isinstance(job, EagerCheck):
            found = checked.get((job.workload, job.optimizer, job.steps))
            if found:
                yield job, {name: found[name] for name in ("difference", "greatest", "equal")}
        elif isinstance(job, PredictionError):
            found = errors.get((job.workload, job.optimizer, job.rate))
            if found and job.seed < found["n"]:
                yield job, {what: found[what] for what in ("stale", "predicted")}


def _runs(row: Row) -> Iterator[tuple[Job, Result]]:
    """The runs of one condition. Seeds that diverged count as the last ones: the first chose the rate."""
    for at in row["grid"]:
        for seed in range(at["n"]):
            run = Run(
                row["workload"],
                row["optimizer"],
                row["method"],
                row["workers"],
                row["microbatches"],
                at["rate"],
                seed,
                row["steps"],
                points=20,
            )
            if seed < len(at["finals"]):
                curve = row["curve"] if at["rate"] == row["rate"] else []
                yield run, {"final": at["finals"][seed], "curve": curve, "seconds": 0.0}
            else:
                yield run, {"diverged": 0, "curve": [], "seconds": 0.0}

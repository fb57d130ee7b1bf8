"""Several runs as one table: the settings that differ, and the results; over several seeds, mean and deviation."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, stdev
from typing import Any

from fxpipe.inspection.run_comparison import outcome, settings_that_differ

Json = dict[str, Any]


def run_table(runs: Sequence[Json], *, seeds: bool = False) -> Json:
    """Runs, as `fxpipe.observe.run_folder.read_run` reads them, in one dict of plain JSON.

    settings  the names of those that differ
    outcomes  the names of the results: loss (the mean of the last steps), samples_per_second, seconds, and metrics of
              the last evaluation, as `held out accuracy`
    rows      {runs: folders, seeds, settings: {name: value}, outcomes: {name: [mean, deviation]}}: the standard
              deviation of a sample, None for one run; both are None where a run has no finite value
    problems  of each run

    Args:
        seeds: runs that differ only in the seed share a row.
    """
    differ = settings_that_differ(runs)
    if any(name.startswith("setting ") for name in differ):
        differ.pop("learning_rate", None)  # it follows from these settings
    if seeds:
        differ.pop("seed", None)
    groups: dict[str, list[int]] = {}
    for number in range(len(runs)):
        key = repr([values[number] for values in differ.values()]) if seeds else str(number)
        groups.setdefault(key, []).append(number)
    found = [outcome(run) for run in runs]
    outcomes = list(dict.fromkeys(name for own in found for name in own))
    return {
        "settings": list(differ),
        "outcomes": outcomes,
        "rows": [
            {
                "runs": [runs[number]["folder"] for number in group],
                "seeds": [runs[number].get("seed") for number in group],
                "settings": {name: values[group[0]] for name, values in differ.items()},
                "outcomes": {name: _spread([found[number].get(name) for number in group]) for name in outcomes},
            }
            for group in groups.values()
        ],
        "problems": [run["problems"] for run in runs],
    }


def _spread(values: Sequence[float | None]) -> list[float | None]:
    """The mean and the deviation."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return [None, None]
    return [mean(known), stdev(known) if len(known) > 1 else None]

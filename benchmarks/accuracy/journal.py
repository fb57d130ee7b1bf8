"""The results that there are, one line a job, so that an interrupted study goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from study import Job, key

Result = dict[str, Any]


class Journal:
    """Results by job, in a file of JSON lines to which every finished job is added at once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._results: dict[str, Result] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        lines = path.read_text().splitlines(keepends=True)
        if lines and not lines[-1].endswith("\n"):  # cut short while it was written
            path.write_text("".join(lines[:-1]))
        for line in path.read_text().splitlines():
            row = json.loads(line)
            self._results[json.dumps(row["job"], sort_keys=True)] = row["result"]

    def __contains__(self, job: Job) -> bool:
        return key(job) in self._results

    def __getitem__(self, job: Job) -> Result:
        return self._results[key(job)]

    def add(self, job: Job, result: Result) -> None:
        """Remember a result, here and in the file."""
        self._results[key(job)] = result
        with self.path.open("a") as file:
            file.write(json.dumps({"job": json.loads(key(job)), "result": result}) + "\n")

    def begin_with(self, known: Iterable[tuple[Job, Result]]) -> None:
        """Add what is known from elsewhere to a journal that has no line yet."""
        if not self._results:
            for job, result in known:
                self.add(job, result)

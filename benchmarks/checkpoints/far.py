"""How long a run takes to go on after its millionth step.

Nobody waits for a million steps here: a run makes a few, and its checkpoint and its metrics are written again as those
of a later step, the manifest signed anew. The weights are not those of a million steps; every size is.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any

from commands import run_fxpipe
from far_model import train_data

from fxpipe.checkpoint.manifest import MANIFEST, FileEntry, read_manifest
from fxpipe.checkpoint.shelf import Shelf
from fxpipe.observe.record import Record
from fxpipe.observe.run_folder import METRICS
from fxpipe.runtime.worker.feed import Feed

STEPS, MORE = 8, 8


def measure(model: Path, folder: Path, step: int, rounds: int) -> dict[str, Any]:
    """Seconds of whole runs of 8 more steps: after step 8, and after `step` with data that tell where they stand, and
    with data that are skipped. In addition, what grows with the step, by itself."""
    build, first = folder / "build", folder / "first"
    run_fxpipe("compile", model, "-n", 2, "-o", build, "--threads", 1)
    run_fxpipe("run", build, "--threads", 1, "--steps", STEPS, "--checkpoint-every", STEPS, "--out", first, "--json")
    (first / "run.json").unlink()
    late = folder / "late"
    moved(first, late, step)
    begin = perf_counter()
    for _ in itertools.islice(train_data(), step):
        pass
    data = perf_counter() - begin
    begin = perf_counter()
    Feed(SimpleNamespace(train_data=train_data, path=None), 0).go_on(step, None)  # type: ignore[arg-type]
    skip = perf_counter() - begin
    alone = folder / "metrics"
    alone.mkdir()
    shutil.copy(late / METRICS, alone)
    begin = perf_counter()
    Record(alone, 1, step + MORE, continue_after=step).close()
    metrics = perf_counter() - begin

    def resumed(out: Path, after: int) -> float:
        shutil.rmtree(folder / "again", ignore_errors=True)
        shutil.copytree(out, folder / "again")
        begin = perf_counter()
        run_fxpipe(
            "run", build, "--threads", 1, "--steps", after + MORE, "--resume", "--out", folder / "again", "--json"
        )
        seconds = perf_counter() - begin
        with (folder / "again" / METRICS).open() as file:
            steps = [json.loads(line)["step"] for line in file]
        assert steps == list(range(1, after + MORE + 1)), "the metrics have a gap, or a line twice"
        return seconds

    rows: dict[str, list[float]] = {"near": [], "told": []}
    for _ in range(rounds):
        rows["near"].append(resumed(first, STEPS))
        rows["told"].append(resumed(late, step))
    forget_data(Shelf.of(late).path(step))
    return {
        "step": step,
        "metrics_bytes": (late / METRICS).stat().st_size,
        "runs": rows | {"skipped": [resumed(late, step)]},
        "data": data,
        "skip": skip,
        "metrics": metrics,
    }


def moved(first: Path, late: Path, step: int) -> None:
    """The folder of a run whose checkpoint is of a later step, with a line of metrics for each."""
    path = Shelf.of(late).path(step)
    shutil.copytree(Shelf.of(first).path(STEPS), path)

    def later(body: dict[str, Any]) -> None:
        for row in body["past"]:
            row["version"] += step - STEPS

    rewrite(path, later)
    manifest = dataclasses.replace(read_manifest(path), step=step)
    (path / MANIFEST).write_text(manifest.to_json())
    row = json.loads((first / METRICS).read_text().splitlines()[-1])
    with (late / METRICS).open("w") as file:
        for number in range(1, step + 1):
            file.write(json.dumps(row | {"step": number, "seconds": round(0.0123 * number, 6)}) + "\n")


def forget_data(path: Path) -> None:
    """Take away where the data stood: whoever goes on must skip them."""
    rewrite(path, lambda body: body.update(data=None))


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change what the workers' JSON files hold, and sign the manifest anew."""
    manifest = read_manifest(path)
    files = dict(manifest.files)
    for file in path.glob("worker-*.json"):
        body = json.loads(file.read_text())
        change(body)
        data = json.dumps(body).encode()
        file.write_bytes(data)
        files[file.name] = FileEntry(hashlib.sha256(data).hexdigest(), len(data))
    (path / MANIFEST).write_text(dataclasses.replace(manifest, files=files).to_json())

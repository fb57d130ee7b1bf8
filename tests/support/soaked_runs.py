"""A long run on two workers: once undisturbed, while its memory is looked at, and once killed again and again."""

from __future__ import annotations

import random
import time
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from killed_runs import (
    BEFORE,
    FAILURES,
    MODEL,
    OPTIMIZERS,
    SCHEDULERS,
    Case,
    Kill,
    Played,
    built,
    differences,
    disturbed,
    drawn_kill,
)
from started_runs import StartedRun, started_command

from fxpipe.observe.pulse import PULSES, SIZE, Signs

WORKERS = 2
LOOK = 0.1
"""Seconds between two looks at the memory."""

WARM = 0.25
"""The part of the steps in which memory may grow: caches fill, allocators find their size."""

PAGE = 4096


@dataclass
class Soaked:
    """What a soak found.

    Attributes:
        differences: between the two runs, and what else went wrong.
        story: the kills that hit, and where the run went on.
        growth: of the undisturbed run, bytes of resident memory a step after it was warm, by process.
        held: bytes of resident memory at its end, by process.
    """

    differences: list[str] = field(default_factory=list)
    story: list[str] = field(default_factory=list)
    met: Counter[str] = field(default_factory=Counter)
    growth: dict[str, float] = field(default_factory=dict)
    held: dict[str, int] = field(default_factory=dict)


def soaked(folder: Path, steps: int, every: int, saved: int, seed: int = 0) -> Soaked:
    """Train in an empty folder.

    Args:
        every: steps between two kills, about.
        saved: steps between two checkpoints.
    """
    case = soak_case(steps, every, saved, seed)
    found = Soaked()
    try:
        build = built(case, folder)
        samples = list(_undisturbed(case, build, folder))
        warm = [(step, held) for step, held in samples if step >= WARM * steps]
        for name in warm[-1][1]:
            found.growth[name] = slope([(step, held[name]) for step, held in warm])
        found.held = warm[-1][1]
        played = Played(found.differences, found.story, found.met)
        found.differences += differences(folder / "whole", disturbed(case, build, folder, played))
    except FAILURES as error:
        found.differences.append(str(error))
    return found


def soak_case(steps: int, every: int, saved: int, seed: int) -> Case:
    """What keeps and writes most: two optimizers' state, averages, predictions, norms, staleness, evaluations."""
    draw = random.Random(seed)
    model = MODEL.format(
        width=16,
        depth=4,
        dropout=0.1,
        activation="tanh",
        epoch=50,
        data="Shuffled()",
        optimizer=OPTIMIZERS["several"],
        scheduler=SCHEDULERS["cosine"],
    )
    compile = ["-n", str(WORKERS), "--microbatches", "2", "--cuts", "bidirectional"]
    run = ["--checkpoint-every", str(saved), "--keep", "3", "--policy", "pipeoptim", "--clip-norm", "0.5"]
    run += ["--ema", "0.99", "--log-staleness", "--eval-every", str(saved)]
    kills = list(_drawn_kills(draw, steps, every))
    return Case(seed, model, WORKERS, compile, run, kills, restarts=1, steps=steps, limit=120 + 0.2 * steps)


def _drawn_kills(draw: random.Random, steps: int, every: int) -> Iterator[Kill]:
    """One about every so many steps, and sometimes another one while the run starts again."""
    for step in range(every, steps - every // 2, every):
        moment = draw.choice(["training", "training", "writing", "evaluating"])
        yield replace(drawn_kill(draw, WORKERS, moment), step=step + draw.randint(-every // 5, every // 5))
        if draw.random() < 0.2:
            yield drawn_kill(draw, WORKERS, draw.choice(BEFORE))


def _undisturbed(case: Case, build: Path, folder: Path) -> Iterator[tuple[int, dict[str, int]]]:
    """Train, and tell now and then how many steps have begun, and what each process holds."""
    command = ["-m", "fxpipe", "run", str(build), *case.options, "--out", str(folder / "whole")]
    with started_command(command, folder / "tmp") as run:
        deadline = time.monotonic() + case.limit
        processes: dict[str, int] = {}
        while run.launcher.poll() is None:
            assert time.monotonic() < deadline, "the undisturbed run does not end"
            if step := _step(run):
                processes = processes or {
                    "launcher": run.launcher.pid,
                    **{f"worker {rank}": process for rank, process in sorted(run.workers().items())},
                }
                held = {name: resident(process) for name, process in processes.items()}
                if step < case.steps and all(held.values()):
                    yield step, held
            time.sleep(LOOK)
        code, err = run.ends(20)
        assert code == 0, f"undisturbed: {err}"


def _step(run: StartedRun) -> int:
    """The step that worker 0 has begun; 0 if it does not train."""
    for path in run.temporary.glob(f"fxpipe_run_*/{PULSES}"):
        try:
            signs = Signs.of(array("q", path.read_bytes()[: SIZE * 8]))
        except (OSError, IndexError):
            return 0
        return signs.step if signs.phase in ("training", "evaluating") else 0
    return 0


def resident(process: int) -> int:
    """Bytes of memory that a process holds; 0 if it is not there."""
    try:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * PAGE
    except (OSError, IndexError):
        return 0


def slope(points: list[tuple[int, int]]) -> float:
    """Of the straight line nearest to points, by least squares; 0 of fewer than three."""
    return float(np.polyfit(*zip(*points, strict=True), 1)[0]) if len(points) > 2 else 0.0

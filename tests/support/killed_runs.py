"""Runs that are killed and go on: a case drawn from a seed, played, and compared with the run that nobody disturbed.

A kill is chosen by how far the run is, as its workers' pulses, its folder and its processor time say, not by a clock:
so on any machine kills hit imports, training, the writing of a checkpoint, an evaluation, the writing of results, the
last step and every kind of start. Seeds take turns with what they hit for sure.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import time
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from commands import QUICK, fxpipe
from started_runs import StartedRun, started_command

from fxpipe.observe.pulse import PULSES, SIZE, Signs
from fxpipe.observe.rates import RATES

STEPS = 40
LIMIT = 180.0

GLANCE = 0.001
FAILURES = (AssertionError, TimeoutError, subprocess.TimeoutExpired)
TIMES = ("seconds", *RATES)

MODEL = '''
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(6, {width})
        self.norm = nn.BatchNorm1d({width})
        self.layers = nn.ModuleList(nn.Linear({width}, {width}) for _ in range({depth}))
        self.drop = nn.Dropout({dropout})
        self.last = nn.BatchNorm1d({width})
        self.leave = nn.Linear({width}, 3)

    def forward(self, x):
        x = self.norm(self.enter(x))
        for layer in self.layers:
            x = torch.{activation}(self.drop(layer(x))) + x
        return self.leave(self.last(x))

def model():
    return Net()

def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])

def drawn(count, seed):
    draw = torch.Generator().manual_seed(seed)
    sizes = [{sizes}[k % len({sizes})] for k in range(count)]
    return [(torch.randn(n, 6, generator=draw), torch.randint(0, 3, (n,), generator=draw)) for n in sizes]

class Shuffled:
    """In a new order every time round."""
    def __init__(self):
        self.batches = drawn({epoch}, 1)
    def __len__(self):
        return len(self.batches)
    def __iter__(self):
        return iter([self.batches[k] for k in torch.randperm(len(self.batches)).tolist()])

def train_data():
    return {data}

def eval_data():
    return drawn(3, 2)

def metrics(model, batch):
    return {{"correct": (model(batch[0]).argmax(1) == batch[1]).float().mean()}}

class Wandering(torch.optim.Optimizer):
    """Draws, and keeps a count and a tensor of its own."""
    def __init__(self, parameters, lr):
        super().__init__(parameters, {{"lr": lr}})
        self.made, self.mean = 0, torch.zeros(())

    @torch.no_grad()
    def step(self, closure=None):
        self.made += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    held = self.state[p]
                    held["mean"] = held.get("mean", torch.zeros_like(p)) * 0.9 + p.grad
                    self.mean = 0.9 * self.mean + p.grad.abs().mean()
                    noise = 0.001 * torch.randn_like(p)
                    p.sub_(held["mean"] + noise, alpha=group["lr"] / (1 + 0.01 * self.made))
                    p.sub_(self.mean * 0.001)

def optimizer(named):
    named = list(named)
    every = [p for _, p in named]
    matrices, vectors = [p for p in every if p.ndim > 1], [p for p in every if p.ndim == 1]
    return {optimizer}

def lr_scheduler(optimizer):
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
'''

OPTIMIZERS = {
    "groups": "torch.optim.AdamW([{'params': matrices}, {'params': vectors, 'lr': 0.02}], lr=0.01)",
    "several": "[torch.optim.SGD(matrices, lr=0.05, momentum=0.9), torch.optim.NAdam(vectors, lr=0.01)]",
    "own": "Wandering(every, lr=0.02)",
}


MOMENTS = (
    "launching", "importing", "loading", "training", "writing", "evaluating", "writing results", "last step",
)  # fmt: skip
BEFORE = MOMENTS[:3]
"""What comes before the first step of a run, and of its going on."""

THEMES = (*MOMENTS, "resuming", "restarting", "by itself", "int", "int twice")
"""What a seed is for sure about, in turn; everything else is drawn."""

HIGH = {"launching": 25, "importing": 120, "loading": 5}
"""Hundredths of a second of processor time that each of these takes at least."""

SIGNALS = {
    "kill": [signal.SIGKILL],
    "stop and kill": [signal.SIGSTOP, signal.SIGKILL],
    "term": [signal.SIGTERM],
    "int": [signal.SIGINT],
    "term and kill": [signal.SIGTERM, signal.SIGKILL],
    "term twice": [signal.SIGTERM, signal.SIGTERM],
    "int twice": [signal.SIGINT, signal.SIGINT],
}
OF_WORKER = ("kill", "kill", "stop and kill", "term")
LAUNCHING = ("kill", "stop and kill", "term")
"""What comes before fxpipe heeds Ctrl-C is Python's."""


@dataclass(frozen=True)
class Kill:
    """Of a worker, or of the launcher if `rank` is None, at a moment, in a way.

    Attributes:
        moment: a phase of a pulse; `launching`, before any worker is there; `writing`: a folder of a checkpoint that is
            written or taken away is there; or `last step`, in training.
        step: where a step has begun, the moment is not before this one.
        work: before the first step, hundredths of a second of processor time that the victim has spent in the phase.
        files: in `writing`, how many there are in the folder, at least.
        wait: seconds between the moment and the kill, and `gap` between two signals.
        start: `first`, `resumed` or `restarted`: which start of the workers it waits for; `any` takes each.
    """

    moment: str
    step: int
    rank: int | None
    way: str
    work: int = 0
    files: int = 0
    wait: float = 0.0
    gap: float = 0.05
    start: str = "any"

    def __str__(self) -> str:
        whom = "launcher" if self.rank is None else f"worker {self.rank}"
        step = f" from step {self.step}" if self.moment in ("training", "writing", "evaluating") else ""
        return f"{self.way} of {whom}, {self.moment}{step}"


@dataclass
class Case:
    """What a seed stands for.

    Attributes:
        limit: seconds after which a run that has not ended hangs.
    """

    seed: int
    model: str = ""
    workers: int = 1
    compile: list[str] = field(default_factory=list)
    run: list[str] = field(default_factory=list)
    kills: list[Kill] = field(default_factory=list)
    restarts: int = 0
    anew_in_place: bool = False
    steps: int = STEPS
    limit: float = LIMIT

    @property
    def options(self) -> list[str]:
        """Of every run."""
        return ["--steps", str(self.steps), "--threads", "1", *self.run]


def drawn_case(seed: int) -> Case:
    """The case of a seed: the same for ever."""
    draw = random.Random(seed)
    workers, microbatches = draw.randint(1, 4), draw.choice([1, 1, 2, 4])
    model = MODEL.format(
        width=draw.choice([8, 12, 16]),
        depth=draw.randint(4, 7),
        dropout=draw.choice([0.0, 0.1, 0.4]),
        activation=draw.choice(["relu", "tanh", "sigmoid"]),
        epoch=draw.choice([7, 15, STEPS]),
        sizes=draw.choice(["(8,)", "(16, 8)"]),
        data=draw.choice(["Shuffled()", f"drawn({draw.choice([9, STEPS])}, 1)"]),
        optimizer=OPTIMIZERS[draw.choice(list(OPTIMIZERS))],
    )
    schedule = draw.choice(["async", "async", "async", "1f1b", "gpipe"])
    cuts = draw.choice(["auto", "same", "bidirectional", "three-way"])
    compile = ["-n", str(workers), "--microbatches", str(microbatches), "--cuts", cuts, "--schedule", schedule]
    run = ["--checkpoint-every", str(draw.randint(2, 7)), "--keep", str(draw.randint(1, 4))]
    if schedule == "async":
        run += ["--policy", draw.choice(["latest", "stash", "vertical", "pipeoptim+keep", "spectrain"])]
    run += draw.choice([[], ["--clip-norm", "0.5"]])
    run += draw.choice([[], ["--ema", "0.9"]])
    run += draw.choice([[], ["--eval-every", str(draw.randint(3, 9))]])
    theme = THEMES[seed % len(THEMES)]
    if theme == "evaluating" and "--eval-every" not in run:
        run += ["--eval-every", str(draw.randint(3, 9))]
    kills, restarts = _drawn_kills(draw, theme, workers)
    return Case(seed, model, workers, compile, run, kills, restarts, draw.random() < 0.5)


def _drawn_kills(draw: random.Random, theme: str, workers: int) -> tuple[list[Kill], int]:
    """What a theme asks for, and perhaps more after it; and how often the run may start its workers again."""
    restarts = draw.choice([0, 0, 1, 2])
    late = replace(drawn_kill(draw, workers, "training"), step=draw.randint(20, 36))
    if theme == "resuming":
        restarts = 0
        kills = [late, replace(drawn_kill(draw, workers, draw.choice(BEFORE)), start="resumed")]
    elif theme in ("restarting", "by itself"):
        restarts = draw.choice([1, 2])
        kills = [replace(late, rank=draw.randrange(workers), way=draw.choice(["kill", "stop and kill"]))]
        if theme == "restarting":
            kills.append(replace(drawn_kill(draw, workers, draw.choice(BEFORE[1:])), start="restarted"))
    elif theme in SIGNALS:
        moment = draw.choice(["loading", "training", "training", "writing", "evaluating"])
        kills = [replace(drawn_kill(draw, workers, moment), rank=None, way=theme)]
    else:
        kills = [drawn_kill(draw, workers, theme)]
    more = [drawn_kill(draw, workers, draw.choice(MOMENTS)) for _ in range(draw.choice([0, 0, 1, 2]))]
    return kills + more, restarts


def drawn_kill(draw: random.Random, workers: int, moment: str) -> Kill:
    """Some kill at a moment."""
    whom = draw.randrange(workers) if moment != "launching" and draw.random() < 0.5 else None
    ways = LAUNCHING if moment == "launching" else tuple(SIGNALS) if whom is None else OF_WORKER
    return Kill(
        moment,
        STEPS if moment == "last step" else draw.randint(1, STEPS - 5),
        whom,
        draw.choice(ways),
        work=draw.randint(0, HIGH.get(moment, 0)),
        files=draw.randint(0, 3 * workers + 2),
        wait=0.0 if moment == "last step" else draw.choice([0.0, 0.0, draw.random() * 0.01]),
        gap=draw.choice([0.0, 0.05, 0.2]),
    )


@dataclass
class Played:
    """What happened to a case.

    Attributes:
        differences: of its results from those of the undisturbed run; what else went wrong.
        story: the kills that hit, and where the run went on.
        met: how often each moment, way and start was hit.
    """

    differences: list[str]
    story: list[str] = field(default_factory=list)
    met: Counter[str] = field(default_factory=Counter)


def played(case: Case, folder: Path) -> Played:
    """Play a case in an empty folder."""
    found = Played([])
    try:
        build, whole = built(case, folder), folder / "whole"
        always = ["--checkpoint-every", "1", "--keep", str(case.steps)]  # at whatever step the other is saved
        result = fxpipe("run", build, "--local", *case.options, *always, "--out", whole)  # cheaper, and the same
        assert result.code == 0, f"undisturbed: {result.err}"
        found.differences += differences(whole, disturbed(case, build, folder, found))
    except FAILURES as error:
        found.differences.append(str(error))
    return found


def built(case: Case, folder: Path) -> Path:
    """The build of a case's model."""
    (folder / "model.py").write_text(case.model)
    asked = [*case.compile, "--accept-optimizer-per-worker", *QUICK]
    result = fxpipe("compile", folder / "model.py", *asked, "-o", folder / "build")
    assert result.code == 0, f"compile: {result.err}"
    return folder / "build"


def disturbed(case: Case, build: Path, folder: Path, played: Played) -> Path:
    """Run, kill, go on, until it has ended; returns the output folder."""
    out, kills, tries = folder / "out-0", list(case.kills), 0
    run = ["run", str(build), *case.options, "--max-restarts", str(case.restarts)]
    while True:
        resume = ["--resume"] if any(out.glob("checkpoints/step-*/checkpoint.json")) else []
        if tries and not resume and not case.anew_in_place:
            out = folder / f"out-{tries}"
        tries += 1
        before = len(kills)
        with started_command(["-m", "fxpipe", *run, "--out", str(out), *resume], folder / "tmp") as started:
            launch = _Launch(started, case.workers, out, bool(resume))
            launch.kill_at_moments(kills, played, case.limit)
            code, err = started.ends(20)
            started.is_gone(10)
        restarts = len(json.loads((out / "run.json").read_text()).get("restarts", [])) if code == 0 else 0
        played.met["by itself"] += bool(restarts)
        which = " of a resumed run" if resume else ""
        played.story.append(f"exit {code}{which}" + (f", after {restarts} restarts" if restarts else ""))
        if code == 0:
            return out
        assert len(kills) < before, f"nobody disturbed it, and it failed: exit {code}\n{err}"
        assert "Traceback" not in err, err


@dataclass
class _Launch:
    """A run that was started, and how far it is: looked at, until the moment of a kill has come.

    Attributes:
        hit: the starts of its workers, each by its file of pulses, that were disturbed: once each.
    """

    run: StartedRun
    workers: int
    out: Path
    resumed: bool
    hit: set[Path] = field(default_factory=set)
    _processes: dict[Path, dict[int, int]] = field(default_factory=dict)
    _before: dict[tuple[int, str], int] = field(default_factory=dict)

    def kill_at_moments(self, kills: list[Kill], played: Played, limit: float) -> None:
        """Until the launcher ends, wait for the next kill's moment and kill."""
        deadline = time.monotonic() + limit
        while self.run.launcher.poll() is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"it does not end; processes {self.run.all()}; {played.story}")
            if kills and (begun := self._begun(kills[0])):
                start = self._start
                time.sleep(kills[0].wait)
                if self._kill(kills[0], begun):
                    self.hit.add(begun)
                    kill = kills.pop(0)
                    played.story.append(f"{kill}" + (f", {start}" if start != "first" else ""))
                    played.met.update([kill.moment, kill.way])
                    if kill.moment in BEFORE and start != "first":
                        played.met["resuming" if start == "resumed" else "restarting"] += 1
            time.sleep(GLANCE)

    @property
    def _start(self) -> str:
        return "restarted" if self.hit - {self.run.temporary} else "resumed" if self.resumed else "first"

    def _begun(self, kill: Kill) -> Path | None:
        """What has reached a kill's moment and was not disturbed before: a start of the workers, or the launcher."""
        starts = list(self.run.temporary.glob(f"fxpipe_run_*/{PULSES}"))
        if kill.start not in ("any", self._start):
            return None
        if kill.moment == "launching":
            early = not self.hit and not starts and self._has_worked(self.run.launcher.pid, kill)
            return self.run.temporary if early else None
        for path in starts:
            with contextlib.suppress(OSError):
                numbers = array("q", path.read_bytes())
                if path not in self.hit and len(numbers) == SIZE * self.workers:
                    signs = [Signs.of(numbers[k * SIZE : (k + 1) * SIZE]) for k in range(self.workers)]
                    if self._holds(kill, path, signs):
                        return path
        return None

    def _holds(self, kill: Kill, path: Path, signs: list[Signs]) -> bool:
        """Whether the moment of a kill has come."""
        if kill.moment == "writing":
            folders = self.out.glob("checkpoints/.step-*")
            late = (p for p in folders if int(p.name.split("-")[1].split(".")[0]) >= kill.step)
            return any(len(list(p.iterdir())) >= kill.files for p in late)
        phase = "training" if kill.moment == "last step" else kill.moment
        step = kill.step if phase in ("training", "evaluating") else 0
        ranks = range(self.workers) if kill.rank is None else [kill.rank]
        there = [k for k in ranks if signs[k].phase == phase and signs[k].step >= step]
        if kill.moment in BEFORE:
            processes = self._of(path)
            return any(k in processes and self._has_worked(processes[k], kill) for k in there)
        return bool(there)

    def _has_worked(self, process: int, kill: Kill) -> bool:
        """Whether a process has worked long enough since it was first seen in a kill's moment."""
        now = processor_time(process)
        return now >= kill.work + self._before.setdefault((process, kill.moment), now)

    def _of(self, path: Path) -> dict[int, int]:
        """The processes of a start: looked for until each has its own, as that takes longer than a step."""
        if len(set(self._processes.get(path, {}).values())) < self.workers:
            self._processes[path] = self.run.workers()
        return self._processes[path]

    def _kill(self, kill: Kill, path: Path) -> bool:
        """Kill; False if the victim is not there."""
        launcher = self.run.launcher
        victim = launcher.pid if kill.rank is None else self._of(path).get(kill.rank)
        if victim is None:
            return False
        try:
            for k, number in enumerate(SIGNALS[kill.way]):
                time.sleep(kill.gap * (k > 0))
                if victim != launcher.pid or launcher.poll() is None:
                    os.kill(victim, number)
        except ProcessLookupError:
            return False
        return True


def processor_time(process: int) -> int:
    """Hundredths of a second that a process has worked; 0 if it is not there."""
    try:
        words = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return (int(words[11]) + int(words[12])) * 100 // os.sysconf("SC_CLK_TCK")


def differences(whole: Path, out: Path) -> list[str]:
    """What two runs left that is not the same: weights, averages, logs, and every checkpoint that both have."""
    found = []
    for name in sorted({path.name for path in [*whole.iterdir(), *out.iterdir()]} - {"run.json", "checkpoints"}):
        one, other = whole / name, out / name
        same = _lines if name == "metrics.jsonl" else _content
        if not (one.exists() and other.exists()):
            found.append(f"{name}: only in {one if one.exists() else other}")
        elif same(one) != same(other):
            found.append(f"{name} differs")
    saved = sorted((out / "checkpoints").iterdir())
    found += [f"{path.name} was left" for path in saved if path.name.startswith(".")]
    steps = [path for path in saved if not path.name.startswith(".")]
    if not steps:
        found.append("no checkpoint")
    for path in steps:
        twin = whole / "checkpoints" / path.name
        names = {p.name for p in path.iterdir()} | {p.name for p in twin.iterdir()}
        found += [f"{path.name}/{n} differs" for n in sorted(names) if _content(path / n) != _content(twin / n)]
    return found


def _lines(path: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in TIMES} for line in lines]


def _content(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def played_in(folder: Path, seed: int, case_of: Callable[[int], Case] = drawn_case) -> Played:
    """Play a seed's case; its folder stays where it went wrong."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    result = played(case_of(seed), folder)
    if not result.differences:
        shutil.rmtree(folder)
    return result

"""Runs that are killed and go on: a case drawn from a seed, played, and compared with the run that nobody disturbed.

A kill is chosen by how far the run is, as its workers' pulses and its folder say, not by a clock: so on any machine
kills hit imports, training, the writing of a checkpoint, an evaluation, the writing of results and restarts.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from commands import QUICK, fxpipe
from started_runs import StartedRun, started_command

from fxpipe.observe.pulse import PULSES, SIZE, Signs

STEPS = 40
LIMIT = 180.0
"""Seconds after which a run that has not ended hangs."""

GLANCE = 0.001
TIMES = ("seconds", "samples_per_second")

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
    return [(torch.randn(8, 6, generator=draw), torch.randint(0, 3, (8,), generator=draw)) for _ in range(count)]

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
    return {scheduler}
'''

OPTIMIZERS = {
    "sgd": "torch.optim.SGD(every, lr=0.05, momentum=0.9)",
    "plain sgd": "torch.optim.SGD(every, lr=0.05)",
    "adamw": "torch.optim.AdamW(every, lr=0.01)",
    "nadam": "torch.optim.NAdam(every, lr=0.01)",
    "adadelta": "torch.optim.Adadelta(every, lr=0.5)",
    "groups": "torch.optim.AdamW([{'params': matrices}, {'params': vectors, 'lr': 0.02}], lr=0.01)",
    "several": "[torch.optim.SGD(matrices, lr=0.05, momentum=0.9), torch.optim.AdamW(vectors, lr=0.01)]",
    "own": "Wandering(every, lr=0.02)",
}
SCHEDULERS = {
    "none": "torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)",
    "cosine": "torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)",
    "lambda": "torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))",
    "steps": "torch.optim.lr_scheduler.MultiStepLR(optimizer, [5, 9, 23])",
    "cycle": "torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=60, cycle_momentum=False)",
}
POLICIES = [
    "latest", "latest+ef", "stash", "stash+sc", "stash+ef", "vertical", "2bw", "2bw+predict", "2bw+ef", "lwp",
    "pipeoptim", "pipeoptim+keep", "spectrain", "spectrain+sc", "spectrain+decay", "spectrain+ef", "xpipe",
]  # fmt: skip


@dataclass(frozen=True)
class Kill:
    """Of a worker, or of the launcher if `rank` is None, at a moment, in a way.

    Attributes:
        moment: a phase of a pulse; or `writing`: a folder of a checkpoint that is written or taken away is there.
        step: the moment is not before this step; in `training` and `evaluating`, as the pulses say it.
        wait: seconds between the moment and the kill.
    """

    moment: str
    step: int
    rank: int | None
    way: str
    wait: float

    def __str__(self) -> str:
        whom = "launcher" if self.rank is None else f"worker {self.rank}"
        return f"{self.way} of {whom}, {self.moment} from step {self.step}"


@dataclass
class Case:
    """What a seed stands for."""

    seed: int
    model: str = ""
    workers: int = 1
    compile: list[str] = field(default_factory=list)
    run: list[str] = field(default_factory=list)
    kills: list[Kill] = field(default_factory=list)
    restarts: int = 0
    anew_in_place: bool = False


def drawn_case(seed: int) -> Case:
    """The case of a seed: the same for ever."""
    draw = random.Random(seed)
    workers, microbatches = draw.randint(1, 4), draw.choice([1, 1, 2, 4])
    optimizer = draw.choice(list(OPTIMIZERS))
    model = MODEL.format(
        width=draw.choice([8, 12, 16]),
        depth=draw.randint(4, 7),
        dropout=draw.choice([0.0, 0.1, 0.4]),
        activation=draw.choice(["relu", "tanh", "sigmoid"]),
        epoch=draw.choice([7, 15, STEPS]),
        data=draw.choice(["Shuffled()", f"drawn({draw.choice([9, STEPS])}, 1)"]),
        optimizer=OPTIMIZERS[optimizer],
        scheduler=SCHEDULERS[draw.choice(list(SCHEDULERS))],
    )
    schedule = draw.choice(["async", "async", "async", "1f1b", "gpipe"])
    cuts = draw.choice(["auto", "same", "bidirectional", "three-way"])
    compile = ["-n", str(workers), "--microbatches", str(microbatches), "--cuts", cuts, "--schedule", schedule]
    run = ["--checkpoint-every", str(draw.randint(2, 7)), "--keep", str(draw.randint(1, 4))]
    if schedule == "async":
        run += ["--policy", _allowed(draw.choice(POLICIES), optimizer, workers - 1 <= microbatches)]
        run += draw.choice([[], [], [], ["--sync-steps", "9"], ["--rate-discount", "18"]])
    run += draw.choice([[], ["--clip-norm", "0.5"]])
    run += draw.choice([[], ["--ema", "0.9"]])
    run += draw.choice([[], [], ["--log-staleness"]])
    run += draw.choice([[], ["--eval-every", str(draw.randint(3, 9))]])
    kills = [_drawn_kill(draw, workers, "--eval-every" in run) for _ in range(draw.randint(1, 3))]
    restarts = draw.choice([0, 0, 1, 2])
    return Case(seed, model, workers, compile, run, kills, restarts, draw.random() < 0.5)


def _allowed(policy: str, optimizer: str, accumulates: bool) -> str:
    """The policy without a switch that refuses the optimizer; 2bw only where there are microbatches enough."""
    policy = policy if accumulates else policy.replace("2bw", "vertical")
    base, _, switch = policy.partition("+")
    takes = {"ef": ("sgd", "adamw", "nadam", "groups"), "sc": ("sgd",)}
    return policy if optimizer in takes.get(switch, (optimizer,)) else base


def _drawn_kill(draw: random.Random, workers: int, evaluates: bool) -> Kill:
    moments = ["training"] * 4 + ["writing"] * 4 + ["evaluating"] * 2 * evaluates
    moment = draw.choice([*moments, "importing", "loading", "writing results"])
    way = draw.choice(["kill", "kill", "stop and kill", "kill", "term", "int", "term and kill"])
    whom = draw.randrange(workers) if way == "stop and kill" else None
    if way == "kill" and draw.random() < 0.6:
        whom = draw.randrange(workers)
    return Kill(moment, draw.randint(1, STEPS), whom, way, draw.choice([0.0, 0.0, draw.random() * 0.01]))


@dataclass
class Played:
    """What happened to a case.

    Attributes:
        differences: of its results from those of the undisturbed run; what else went wrong.
        story: the kills that hit, and where the run went on.
    """

    differences: list[str]
    story: list[str]


def played(case: Case, folder: Path) -> Played:
    """Play a case in an empty folder."""
    story: list[str] = []
    (folder / "model.py").write_text(case.model)
    build, whole = folder / "build", folder / "whole"
    asked = [*case.compile, "--accept-optimizer-per-worker", *QUICK]
    result = fxpipe("compile", folder / "model.py", *asked, "-o", build)
    if result.code:
        return Played([f"compile: {result.err}"], story)
    run = ["--steps", str(STEPS), "--threads", "1", *case.run]
    always = ["--checkpoint-every", "1", "--keep", str(STEPS)]  # whatever step the other is saved at, this one is, too
    # A local run is cheaper; but only one in processes knows its end, and begins no sample of staleness beyond it.
    local = [] if "--log-staleness" in case.run else ["--local"]
    result = fxpipe("run", build, *local, *run, *always, "--out", whole)
    if result.code:
        return Played([f"undisturbed: {result.err}"], story)
    try:
        out = _disturbed(case, ["run", str(build), *run, "--max-restarts", str(case.restarts)], folder, story)
    except (AssertionError, TimeoutError) as error:
        return Played([str(error)], story)
    return Played(differences(whole, out), story)


def _disturbed(case: Case, run: list[str], folder: Path, story: list[str]) -> Path:
    """Run, kill, go on, until it has ended; returns the output folder."""
    out, kills, tries = folder / "out-0", list(case.kills), 0
    while True:
        resume = ["--resume"] if any(out.glob("checkpoints/step-*/checkpoint.json")) else []
        if tries and not resume and not case.anew_in_place:
            out = folder / f"out-{tries}"
        tries += 1
        before = len(kills)
        with started_command(["-m", "fxpipe", *run, "--out", str(out), *resume], folder / "tmp") as started:
            _kill_at_moments(started, case.workers, kills, out, story)
            code, err = started.ends(20)
            started.is_gone(10)
        story.append(f"exit {code}" + (" of a resumed run" if resume else ""))
        if code == 0:
            return out
        assert len(kills) < before, f"nobody disturbed it, and it failed: exit {code}\n{err}"
        assert "Traceback" not in err, err


def _kill_at_moments(run: StartedRun, workers: int, kills: list[Kill], out: Path, story: list[str]) -> None:
    """Until the launcher ends, wait for the next kill's moment and kill."""
    deadline = time.monotonic() + LIMIT
    hit: set[Path] = set()
    while run.launcher.poll() is None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"it does not end; processes {run.all()}; {story}")
        if kills and (begun := _begun(run, workers, hit, kills[0], out)):
            time.sleep(kills[0].wait)
            if _kill(run, kills[0]):
                hit.add(begun)
                story.append(str(kills.pop(0)))
        time.sleep(GLANCE)


def _begun(run: StartedRun, workers: int, hit: set[Path], kill: Kill, out: Path) -> Path | None:
    """The folder of the start of the workers that has reached a kill's moment, once each."""
    for path in run.temporary.glob(f"fxpipe_run_*/{PULSES}"):
        with contextlib.suppress(OSError):
            numbers = array("q", path.read_bytes())
            if path not in hit and len(numbers) == SIZE * workers:
                signs = [Signs.of(numbers[k * SIZE : (k + 1) * SIZE]) for k in range(workers)]
                if _holds(kill, signs if kill.rank is None else [signs[kill.rank]], out):
                    return path
    return None


def _holds(kill: Kill, signs: list[Signs], out: Path) -> bool:
    """Whether the moment of a kill has come."""
    if kill.moment == "writing":
        return any(int(p.name.split("-")[1].split(".")[0]) >= kill.step for p in out.glob("checkpoints/.step-*"))
    late = kill.step if kill.moment in ("training", "evaluating") else 0
    return any(each.phase == kill.moment and each.step >= late for each in signs)


def _kill(run: StartedRun, kill: Kill) -> bool:
    """Kill; False if the victim is not there."""
    victim = run.launcher.pid if kill.rank is None else run.workers().get(kill.rank)
    signals = {"term": [signal.SIGTERM], "int": [signal.SIGINT], "kill": [signal.SIGKILL]}
    signals |= {"stop and kill": [signal.SIGSTOP, signal.SIGKILL], "term and kill": [signal.SIGTERM, signal.SIGKILL]}
    try:
        for k, number in enumerate(signals[kill.way]):
            time.sleep(0.05 * k)
            if victim is not None and (victim != run.launcher.pid or run.launcher.poll() is None):
                os.kill(victim, number)
    except ProcessLookupError:
        return False
    return victim is not None


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

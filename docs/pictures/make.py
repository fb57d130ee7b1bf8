"""Draws the pictures of docs/concepts from what fxpipe says: python docs/pictures/make.py [FOLDER]

Cuts, edges and weights come from a compiled program and its plan, timelines from the simulator, versions from the
schedules and policies; what a command prints is the command's. A test holds the files up to date.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.text import Text
from svg import LETTER, WORKERS, Picture

import fxpipe
from fxpipe.ir.program import Program, info
from fxpipe.ir.wire import is_recv
from fxpipe.plan.cost_records import StageTime
from fxpipe.plan.plan import Plan
from fxpipe.plan.spec import Phase
from fxpipe.policy import make as make_policy
from fxpipe.policy.base import sight
from fxpipe.policy.demand import Demand
from fxpipe.schedule import Versions
from fxpipe.schedule import make as make_schedule
from fxpipe.schedule.check import held
from fxpipe.schedule.order import play, read
from fxpipe.simulator.scenario import Scenario
from fxpipe.simulator.simulate import Simulation, simulate

HERE = Path(__file__).parent
CONSOLE = Console()
TIMELINES = {"gpipe": (4, 3), "1f1b": (4, 3), "async": (1, 20), "nf1b": (4, 5), "zb-h1": (4, 3), "zb-h2": (8, 2)}
"""By schedule: of how many microbatches and minibatches a run is drawn."""
sys.path.insert(0, str(HERE.parent / "concepts"))

import tiny  # noqa: E402  (docs/concepts/tiny.py: the line above says where it lies)


def pictures() -> Iterator[tuple[str, Picture]]:
    """Every picture with its file's name."""
    example = compiled()
    yield "cuts.svg", cuts(example)
    yield "edges.svg", edges(example)
    for schedule in TIMELINES:
        yield f"timeline-{schedule}.svg", timeline(schedule)
    for policy in ("latest", "stash", "spectrain"):
        yield f"versions-{policy}.svg", versions(policy)
    yield "inspect.svg", inspected(example)


@dataclass(frozen=True)
class Crossing:
    """A value that crosses workers: from the unit and phase that make it to those that first read it."""

    kind: str
    name: str
    bytes: int
    src: tuple[int, Phase]
    dst: tuple[int, Phase]


@dataclass(frozen=True)
class Example:
    """`tiny.py`, cut for two workers."""

    build: fxpipe.Build
    crossings: tuple[Crossing, ...]

    @property
    def plan(self) -> Plan:
        return self.build.plan


def compiled() -> Example:
    """`fxpipe compile docs/concepts/tiny.py -n 2 --fp-cut c --bp-cut b`, as far as the pictures need it."""
    torch.manual_seed(0)
    programs: list[Program] = []
    build = fxpipe.lower(
        fxpipe.capture(tiny.model(), tiny.loss, tiny.train_data()[0]),
        workers=2, forward_at=["c"], backward_at=["b"], cost="analytic",
        observers=[lambda applied: programs.append(applied.program)],
    )  # fmt: skip
    wired = programs[-1]
    found = []
    for node in wired:
        if is_recv(node):
            edge = wired.wires[node.name]
            (sent,) = node.all_input_nodes
            (made,) = sent.all_input_nodes
            src = info(made).unit if made.op == "call_function" else -1  # of the batch
            found.append(
                Crossing(
                    edge.kind, edge.name, edge.tensor.bytes, (src, edge.src_phase), (info(node).unit, edge.dst_phase)
                )
            )
    return Example(build, tuple(found))


def cuts(example: Example) -> Picture:
    """The units in two lanes, forward above backward, in the colours of their workers, and what crosses."""
    plan, column, left, box = example.plan, 132, 84, 74
    assert [path or "-" for path in plan.step.units] == ["a", "-", "b", "-", "c", "-"]
    names = ("a", "tanh", "b", "tanh", "c", "loss")
    picture = Picture(
        left + column * len(names) - 16, 300, "Forward and backward cut apart", "Two lanes of units: forward is cut "
        "before c, backward before b; what crosses workers is drawn as an arrow.",
    )  # fmt: skip
    top = {"F": 72.0, "B": 212.0}
    bounds = {
        "F": [stage.forward_units for stage in plan.stages],
        "B": [stage.backward_units for stage in plan.stages],
    }

    def worker(unit: int, phase: str) -> int:
        return next(k for k, (first, end) in enumerate(bounds[phase]) if first <= unit < end)

    def middle(unit: int) -> float:
        return left + column * unit + box / 2

    mismatch = [u for u in range(len(names)) if worker(u, "F") != worker(u, "B")]
    first, last = mismatch[0], mismatch[-1]
    start = left + column * first - 14
    picture.box(start, 34, column * (last - first) + box + 28, 240, "plain", 8)
    for line, text in enumerate(("mismatch:", "forward here,", "backward there")):
        picture.text(middle(last), 146 + 16 * line, text, 12, "middle", "soft")
    for unit, name in enumerate(names):
        picture.text(middle(unit), 24, f"u{unit}", 12, "middle", "soft")
        for phase, y in top.items():
            rank = worker(unit, phase)
            picture.worker(rank, left + column * unit, y, box, 38, f"{phase} {name}", phase == "B")
            picture.text(middle(unit), y - 8 if phase == "F" else y + 54, f"worker {rank}", 11, "middle", "soft")
    for unit in range(len(names) - 1):
        for phase, y in top.items():
            if worker(unit, phase) == worker(unit + 1, phase):
                x = left + column * unit
                ends = [(x + box + 4, y + 19), (x + column - 4, y + 19)]
                picture.line(ends if phase == "F" else ends[::-1], arrow=True)
    for label, phase in (("FP cut", "F"), ("BP cut", "B")):
        x = left + column * bounds[phase][1][0] - (column - box) / 2
        y = top[phase]
        picture.line([(x, y - 22), (x, y + 60)], dashed=True)
        picture.text(x, y - 28 if phase == "F" else y + 74, label, 12, "middle", "ink", bold=True)
    for crossing in example.crossings:
        (src, from_phase), (dst, to_phase) = crossing.src, crossing.dst
        text = f"{crossing.kind} {crossing.name}"
        if crossing.kind == "input":
            y = top["F"] + 19
            picture.text(left - 12, y + 4, "batch", 12, "end")
            picture.line([(left - 10, y), (left - 2, y)], arrow=True)
        elif from_phase == to_phase:
            y = top[from_phase] + 19
            ends = [(left + column * src + box + 4, y), (left + column * dst - 4, y)]
            if src > dst:
                ends = [(left + column * src - 4, y), (left + column * dst + box + 4, y)]
            picture.line(ends, arrow=True)
            x = (ends[0][0] + ends[1][0]) / 2
            place = (x + 8, y + 40, text, 11, "start") if from_phase == "F" else (x - 8, y - 34, text, 11, "end")
            picture.text(*place)
        else:
            picture.line([(middle(src), top["F"] + 40), (middle(dst) - 10, top["B"] - 2)], arrow=True)
            picture.text((middle(src) + middle(dst)) / 2 - 14, 168, text, 11, "end")
    return picture


def edges(example: Example) -> Picture:
    """What two workers exchange for a microbatch, and the weights after an update."""
    plan = example.plan
    schedule = make_schedule("async", workers=2)
    demand = Demand(plan, schedule, make_policy("spectrain"))
    picture = Picture(
        820, 330, "The edges of a cut", "Two workers, each with its forward, its backward and its update; arrows are "
        "what crosses between them.",
    )  # fmt: skip
    columns, rows, width = (30, 650), {"F": (40, 110), "B": (172, 84), "update": (276, 38)}, 140
    for rank, x in enumerate(columns):
        for name, (y, height) in rows.items():
            text = {"F": "forward", "B": "backward"}.get(name, name)
            picture.worker(rank, x, y, width, height, text, name != "F")
        picture.text(x + width / 2, 26, f"worker {rank}", 13, "middle", bold=True)
    places = {"F": 62.0, "B": 214.0, "saved": 130.0}
    for edge in plan.edges:
        key = "saved" if edge.src_phase != edge.dst_phase else edge.src_phase
        y = places[key]
        places[key] += 32
        end = y if edge.src_phase == edge.dst_phase else 190.0
        xs = (columns[0] + width + 4, columns[1] - 4)
        points = [(xs[edge.src], y), (xs[edge.dst], end)]
        picture.line(points, arrow=True)
        text = f"{edge.kind} {edge.name} · {edge.tensor.bytes:,} B"
        picture.text((xs[0] + xs[1]) / 2, y - 6 if y == end else (y + end) / 2 - 20, text, 12, "middle")
    for owner in range(plan.workers):
        for reader in demand.readers(owner):
            for message in demand.messages(owner, reader, 9, 0, None):
                size = sum(p.tensor.bytes for p in plan.parameters if p.name in message.names)
                ahead = f", predicted {message.ahead} ahead" if message.ahead else ""
                xs = (columns[1] - 4, 620, 200, 200, columns[0] + width + 4)
                picture.line(list(zip(xs, (296, 296, 296, 146, 146), strict=True)), dashed=True, arrow=True)
                text = f"weights {', '.join(message.names)} · {size:,} B{ahead}"
                picture.text(410, 288, text, 12, "middle")
                picture.text(410, 312, "once after every update, for the next forwards", 11, "middle", "soft")
    return picture


def timeline(name: str) -> Picture:
    """A schedule on three workers in time: a backward takes two forwards, half for weights, an update a quarter."""
    end = simulated("gpipe").finished[1]  # two minibatches of four: all pictures show this long
    simulation = simulated(name)
    workers, microbatches = len(simulation.spans), TIMELINES[name][0]
    left, scale, row = 84.0, 780 / end, 40
    bottom = 20 + row * workers
    picture = Picture(
        left + 780 + 110, bottom + 58, f"{name}: who works when", "One row a worker; full boxes are forwards, "
        "faint ones backwards, dashed ones weight gradients, narrow ones updates; the bare ground is waiting.",
    )  # fmt: skip
    schedule = make_schedule(name, workers=workers, microbatches=microbatches)
    most = held(schedule)
    for worker, spans in enumerate(simulation.spans):
        y = 18 + row * worker
        picture.text(12, y + 20, f"worker {worker}", 12)
        picture.box(left, y, 780, row - 8, "idle", 0)
        for span in spans:
            if span.start < end:
                x, width = left + scale * span.start, scale * (min(span.end, end) - span.start)
                number = span.action.minibatch * microbatches + span.action.microbatch
                if span.kind == "update":
                    picture.box(x, y, width, row - 8, "soft", 0)
                else:
                    text = f"{span.kind}{number}" if span.end <= end else ""
                    picture.worker(worker, x, y, width, row - 8, text, span.kind != "F", span.kind == "W")
        picture.text(left + 788, y + 20, f"holds {most[worker]}", 12, kind="soft")
    done = sum(span.kind == schedule.last_phase and span.end <= end + 1e-9 for span in simulation.spans[0])
    busy = sum(min(span.end, end) - span.start for spans in simulation.spans for span in spans if span.start < end) / (
        end * workers
    )
    bubble = f"bubble {simulation.bubble:.0%} in the steady state, {1 - busy:.0%} in the time shown"
    legend = f"{bubble} · microbatches done: {done}"
    picture.text(left, bottom + 24, legend, 12)
    apart = " · W and dashed: weight gradients" if schedule.weights_apart else ""
    picture.text(
        left,
        bottom + 42,
        f"F and full: forward · B and faint: backward{apart} · bar: update · bare ground: waits",
        11,
        kind="soft",
    )
    return picture


def simulated(name: str) -> Simulation:
    """The schedule on three equal workers whose messages cost nothing."""
    microbatches, minibatches = TIMELINES[name]
    schedule = make_schedule(name, workers=3, microbatches=microbatches)
    whole, apart = StageTime(1.0, 2.0, update=0.25), StageTime(1.0, 1.0, update=0.25, weight=1.0)
    return simulate(schedule, Scenario((apart if schedule.weights_apart else whole,) * 3), minibatches)


def versions(name: str) -> Picture:
    """The version of its own weights that every action on three workers sees, `async`."""
    schedule, policy = make_schedule("async", workers=3), make_policy(name)
    counted = Versions(schedule)
    width, height, left = 62, 54, 84
    steps = [step for step in play(schedule, read(schedule, 6)) if step.time < 13]
    picture = Picture(
        left + width * 13 + 12, 20 + height * 3 + 46, f"{name}: which weights every pass sees", "One row a worker; in "
        "each box the action, below it the version that it sees.",
    )  # fmt: skip
    for worker in range(3):
        picture.text(12, 20 + height * worker + 26, f"worker {worker}", 12)
    for step in steps:
        x, y = left + width * step.time, 18 + height * step.worker
        version, ahead = sight(policy, counted, step.action, step.worker)
        behind = step.action.minibatch - version
        picture.worker(step.worker, x, y, width - 6, 22, str(step.action), step.action.phase == "B")
        text, kind = f"v{version}", "plain"
        if ahead:
            text, kind = f"v{version} +{ahead}", "ahead"
        elif behind:
            text, kind = f"v{version} −{behind}", "stale"
        picture.box(x, y + 23, width - 6, 22, kind)
        picture.text(x + width / 2 - 3, y + 38, text, 12, "middle")
    legend = (
        ("plain", "v2", "the weights after 2 updates: right for minibatch 2"),
        ("stale", "v1 −1", "1 update is missing"),
        ("ahead", "v1 +1", "v1, predicted 1 update ahead"),
    )
    x = left
    for kind, sample, text in legend:
        shown = kind == "plain" or any(e for e in picture.elements if f'class="{kind}"' in e)
        if shown:
            picture.box(x, 20 + height * 3 + 10, 56, 20, kind)
            picture.text(x + 28, 20 + height * 3 + 24, sample, 12, "middle")
            picture.text(x + 64, 20 + height * 3 + 24, text, 11, kind="soft")
            x += 80 + 6.8 * len(text)
    return picture


def inspected(example: Example) -> Picture:
    """`fxpipe inspect build` of the example, on a terminal of 80 columns."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(Path(tiny.__file__), folder)
        example.build.save(Path(folder, "build"), model_file=Path(folder, "tiny.py"))
        lines = printed(folder, "inspect", "build").rstrip().split("\n")
    return terminal("fxpipe inspect build", lines)


def printed(folder: str, *arguments: str) -> str:
    """What a command prints, in colour."""
    environment = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FXPIPE_DUMP")}
    environment |= {"COLUMNS": "80", "FORCE_COLOR": "1", "COLORTERM": "truecolor", "TERM": "xterm-256color"}
    command = [sys.executable, "-m", "fxpipe", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, encoding="utf-8", check=True)
    return done.stdout


def terminal(command: str, lines: list[str]) -> Picture:
    """What a command prints, as a picture: a worker's colour lies behind its number, so that both are legible."""
    size, height = 13.0, 19.0
    column = LETTER * size
    picture = Picture(
        80 * column + 32, height * (len(lines) + 2) + 20, command, f"What {command} prints on a terminal."
    )
    picture.text(16, 28, f"$ {command}", size, kind="soft")
    for number, line in enumerate(lines):
        text, y = Text.from_ansi(line), 28 + height * (number + 1.5)
        styles = [text.get_style_at_offset(CONSOLE, place) for place in range(len(text.plain))]
        for found in re.finditer(r"\S+(?: \S+)*", text.plain):
            start = found.start()
            for place in range(found.start() + 1, found.end() + 1):  # a run of one style
                if place == found.end() or styles[place] != styles[start]:
                    run = text.plain[start:place]
                    word, x = run.strip(), 16 + column * (start + len(run) - len(run.lstrip()))
                    colour = styles[start].color.get_truecolor().hex.upper() if styles[start].color else ""
                    if set(word) == {"─"}:
                        picture.line([(x, y - 4), (x + column * len(word), y - 4)])
                    elif word:
                        if colour in WORKERS:
                            picture.worker(WORKERS.index(colour), x, y - 13, column * len(word), 17, "", True)
                        look = "soft" if styles[start].dim else "ink"
                        length = column * len(word)
                        picture.text(x, y, word, size, kind=look, bold=bool(styles[start].bold), length=length)
                    start = place
    return picture


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    for file, drawn in pictures():
        (folder / file).write_text(drawn.render(), encoding="utf-8")

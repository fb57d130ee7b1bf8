"""fxpipe and its peers on one machine, trained for real on two workers; see README.md beside this file.

What trains and times them is that of benchmarks/links, with nothing slow between the workers.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "links"))
import tables
from contenders import ASYNC, DDP, Contender
from hosts import LOOPBACK, Link, hosts_of
from measurement import Builds, Effort, say, timed, trained

HERE = Path(__file__).resolve().parent
MODELS = ("gpt", "lstm", "vgg")
LOSS_OF = {"gpt": 300}
SYNCHRONOUS = ("fxpipe 1f1b", "fxpipe synchronous")
WHOLE = "one process, 2 threads"
PIPELINES = {
    "torch 1F1B": ("1f1b", 1),
    "torch interleaved 1F1B": ("interleaved", 2),
    "torch ZB1P": ("zero-bubble", 1),
    "torch interleaved ZB": ("zero-bubble", 2),
    "torch ZBV": ("zbv", 2),
}
"""The schedule, and the stages of a worker. torch's interleaved zero bubble takes one as well, and is then ZB1P."""

COMPILED = ", compiled"
QUICK = {"microbatches": (4,), "rounds": 1, "seconds": 0.3, "loss_of": {"vgg": 8}, "smoothed": 4}


def main() -> None:
    """Measure, print the tables and keep the numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--compiled", action="store_true", help="with torch.compile and --backend inductor as well")
    parser.add_argument("--quick", action="store_true", help="one model, 1 round, kept nowhere: to see that it runs")
    parser.add_argument("--out", type=Path, help="default: result.json here, or nowhere with --quick")
    options = parser.parse_args()
    more: dict[str, Any] = QUICK if options.quick else {"rounds": options.rounds, "loss_of": LOSS_OF}
    effort = Effort({name: (LOOPBACK,) for name in (("vgg",) if options.quick else options.models)}, **more)
    with tempfile.TemporaryDirectory(prefix="fxpipe_peers_") as folder:
        result = measure(effort, contenders(effort.microbatches, options.compiled), Path(folder))
    told = text(result)
    print(told)
    out = options.out or (None if options.quick else HERE / "result.json")
    if out:
        out.write_text(json.dumps(result, indent=1) + "\n")
    if out == HERE / "result.json":
        tables.write_between_markers(told, HERE / "README.md")


def contenders(microbatches: Sequence[int], compiled: bool) -> list[Contender]:
    """All of them, in the order of the tables; `compiled` ones, if asked for, of those that can be."""
    flags = (("--schedule", "1f1b"), ("--schedule", "auto", "--synchronous"))
    sides = [
        ASYNC,
        *(Contender(n, "fxpipe", compile=f, like=DDP.name) for n, f in zip(SYNCHRONOUS, flags, strict=True)),
    ]
    for name, (schedule, stages) in PIPELINES.items():
        for count in microbatches:
            settings = {"schedule": schedule, "stages": stages, "microbatches": count}
            sides.append(Contender(f"{name}, {count}", "pipelining", settings, group=name, like=DDP.name))
    sides += [DDP, Contender(WHOLE, "whole", like=DDP.name)]
    return sides + [_compiled(side) for side in sides if compiled and side.settings.get("schedule", "1f1b") == "1f1b"]


def _compiled(side: Contender) -> Contender:
    """The same, compiled: fxpipe by its engine, torch's by torch.compile, which zero bubble refuses."""
    return Contender(
        side.name + COMPILED,
        side.kind,
        {**side.settings, "compiled": True},
        compile=(*side.compile, "--backend", "inductor"),
        group=side.group and side.group + COMPILED,
        like=side.like,
    )


def measure(effort: Effort, sides: list[Contender], folder: Path) -> dict[str, Any]:
    """All models: a row for each, with the seconds of all rounds, and the minibatches to the loss."""
    found: dict[str, Any] = {"device": device(), "reason": None, "losses": {}, "rows": []}
    begin, builds, link = time.monotonic(), Builds(folder), Link.of(LOOPBACK)
    for name in effort.links:
        for side in (side for side in sides if side.kind == "fxpipe"):
            say(begin, f"{name}: compile {side.name}")
            builds.of(name, side.compile, link)
        say(begin, f"{name}: train for the losses")
        losses = found["losses"][name] = trained(name, sides, builds, effort, real=False)
        say(begin, f"{name}: {effort.rounds} rounds of {len(sides)} contenders")
        with hosts_of(link, real=False) as hosts:
            row = timed(name, sides, builds, effort, hosts, link, losses, real=False)
        print(tables.row_text(row), flush=True)
        plans = {s.name: Path(builds.of(name, s.compile, link)) / "plan.json" for s in sides if s.kind == "fxpipe"}
        taken = {side: json.loads(plan.read_text()) for side, plan in plans.items()}
        ours = {
            side: {key: plan[key] for key in ("schedule", "policy", "microbatches")} for side, plan in taken.items()
        }
        found["rows"].append({**row, "link": {"text": LOOPBACK}, "taken": ours})
    say(begin, "done")
    return found


def device() -> str:
    """What this was measured on, in words."""
    names = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return f"{names[0] if names else platform.machine()}, {len(names)} cores; torch {torch.__version__}"


def text(result: dict[str, Any]) -> str:
    """How fast fxpipe is over each peer; then all contenders, model by model."""
    rows, three = result["rows"], ("async", "to the loss", "synchronous")
    columns = [f"{row['model']}: {what}" for row in rows for what in three]
    lines = [
        f"{result['device']}. How many times as fast as each peer: samples/s of fxpipe async, its seconds to the same "
        "loss, and samples/s of fxpipe's fastest synchronous training. **Bold**: the peer is faster.",
        "",
        f"| peer | {' | '.join(columns)} |",
        f"|{'---|' * (1 + len(columns))}",
    ]
    for peer in (name for name in rows[0]["seconds"] if not name.startswith("fxpipe")):
        lines.append(f"| {peer} | {' | '.join(_cell(times) for row in rows for times in ratios(row, peer))} |")
    parts = ["\n".join(lines)]
    for row in rows:
        taken = (
            f"{n} took {t['schedule']}, {t['policy']}, {t['microbatches']} microbatches"
            for n, t in row["taken"].items()
        )
        parts.append(f"{tables.model_text(row['model'], result)}\n\n{'; '.join(taken)}.")
    return "\n\n".join([*parts, verdict(rows)]) + "\n"


def ratios(row: dict[str, Any], peer: str) -> tuple[float, float | None, float]:
    """Async over the peer; the same to the loss; the fastest synchronous over it: compiled ones if the peer is."""
    more = COMPILED if peer.endswith(COMPILED) else ""
    medians = {name: statistics.median(seconds) for name, seconds in row["seconds"].items()}
    ours, theirs = (tables.seconds_to_loss(row, name) for name in (ASYNC.name + more, peer))
    synchronous = min(medians[name + more] for name in SYNCHRONOUS)
    soon = theirs / ours if ours and theirs else None
    return medians[peer] / medians[ASYNC.name + more], soon, medians[peer] / synchronous


def verdict(rows: Sequence[dict[str, Any]]) -> str:
    """Which peers are faster than fxpipe, and where."""
    peers = [name for name in rows[0]["seconds"] if not name.startswith("fxpipe")]
    async_, synchronous = (
        [f"{peer} on {row['model']}" for row in rows for peer in peers if ratios(row, peer)[k] < 1] for k in (0, 2)
    )
    told = (("async", async_), ("synchronous", synchronous))
    return "; ".join(f"fxpipe {what} is slower than: {', '.join(names) or 'none of them'}" for what, names in told)


def _cell(times: float | None) -> str:
    return "–" if times is None else f"{times:.2f}" if times >= 1 else f"**{times:.2f}**"


if __name__ == "__main__":
    main()

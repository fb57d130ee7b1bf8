"""Replicas against torch's DistributedDataParallel, trained for real in two processes; see README.md.

Each round runs every contender one after the other. What counts is each round's ratio to the faster of torch's, the
median over the rounds. What leaves a process for the other is counted, and compared with the least that must.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from commands import minibatch_seconds, run_fxpipe

HERE = Path(__file__).resolve().parent
MODEL, TINY = HERE / "gpt.py", HERE / "gpt_tiny.py"
REPLICAS = 2
TORCH = {"torch DDP": "copies", "torch DDP, gradients as views": "views"}
FXPIPE = "fxpipe --dp 2"
AS_FAST = 1.00
"""The goal: how many times as fast as the faster of torch's."""
AGREE = 1e-4
"""How far the losses of two contenders may be apart, relative: all train alike, in other code."""
NOT_GRADIENTS = ("loss", "batch")
"""What replicas exchange besides gradients: a number each."""


def main() -> None:
    """Measure, print the table and keep the numbers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--quick", action="store_true", help="1 round of 4 steps of a tiny model: to see that it runs")
    options = parser.parse_args()
    model = MODEL
    if options.quick:
        options.rounds, options.steps, model = 1, 4, TINY
    with tempfile.TemporaryDirectory(prefix="fxpipe_replicas_") as scratch:
        build = Path(scratch) / "build"
        asked = ("-n", 1, "--dp", REPLICAS, "--schedule", "1f1b", "--microbatches", 1, "--threads", 1)
        compiled = json.loads(run_fxpipe("compile", model, *asked, "-o", build, "--json"))
        rounds, runs = [], []
        for number in range(options.rounds):
            row = {name: torch_run(model, how, options.steps) for name, how in TORCH.items()}
            row[FXPIPE] = fxpipe_run(build, options.steps)
            check_losses(row)
            runs.append(row[FXPIPE])
            rounds.append({name: found["seconds"] for name, found in row.items()})
            print(
                f"round {number + 1}  " + "  ".join(f"{n} {1e3 * s:.0f} ms" for n, s in rounds[-1].items()), flush=True
            )
    rows = table(rounds, compiled["forecast"]["milliseconds"] / 1e3)
    wire = on_the_wire(runs[-1]["run"], options.steps, next(iter(row.values()))["bytes"])
    waiting = statistics.median(waits(found["run"], options.steps) for found in runs)
    print(f"the worker waits for sums for {1e3 * waiting:.1f} ms of a minibatch (median)")
    missed = verdict(rows, wire)
    result = {"rows": rows, "rounds": rounds, "wire": wire, "waiting": waiting, "missed": missed}
    if not options.quick:
        (HERE / "result.json").write_text(json.dumps(result, indent=1) + "\n")


def fxpipe_run(build: Path, steps: int) -> dict[str, Any]:
    """Seconds of a minibatch in a run of the build, its losses, and its `run.json`."""
    out = build.parent / "out"
    run_fxpipe("run", build, "--steps", steps, "--threads", 1, "--json", "--out", out)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    found = {"seconds": minibatch_seconds(out), "losses": [line["loss"] for line in lines if "eval" not in line]}
    return found | {"run": json.loads((out / "run.json").read_text())}


def torch_run(model: Path, how: str, steps: int) -> dict[str, Any]:
    """The same of DistributedDataParallel, and the bytes of the weights."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = os.environ | {
        "WORLD_SIZE": str(REPLICAS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, str(HERE / "ddp_side.py"), str(model), how, str(steps)]
    started = [
        subprocess.Popen(
            command, env=common | {"RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(REPLICAS)
    ]
    said = [process.communicate() for process in started]
    for process, (_, errors) in zip(started, said, strict=True):
        if process.returncode:
            raise SystemExit(f"torch's DDP failed\n{errors}")
    found: dict[str, Any] = json.loads(said[0][0].splitlines()[-1])
    return found


def check_losses(row: dict[str, dict[str, Any]]) -> None:
    """All contenders train the same model on the same batches: their losses agree."""
    first = next(iter(row.values()))["losses"]
    for name, found in row.items():
        apart = max(abs(a - b) / abs(b) for a, b in zip(found["losses"], first, strict=True))
        if not apart < AGREE:
            raise SystemExit(f"{name} does not train as the others do: its losses are {apart:.1e} away from theirs")


def table(rounds: list[dict[str, float]], expected: float) -> list[dict[str, Any]]:
    """A row for each contender, printed: medians, ratios to the faster of torch's in the same round, the forecast."""
    rows = []
    print(f"\n{'two replicas':<32}{'ms a minibatch':>15}{'of torch best':>15}{'forecast':>10}")
    for name in rounds[0]:
        measured = statistics.median(r[name] for r in rounds)
        ratio = statistics.median(min(r[other] for other in TORCH) / r[name] for r in rounds)
        said = f"{1e3 * expected:>10.0f}" if name == FXPIPE else ""
        print(f"{name:<32}{1e3 * measured:>15.0f}{ratio:>15.3f}{said}")
        rows.append({"name": name, "seconds": measured, "of_torch": ratio})
    return rows


def on_the_wire(run: dict[str, Any], steps: int, size: int) -> dict[str, float]:
    """What left a process for the other in a minibatch, of gradients, and the least that must: 2(R − 1)/R of them."""
    counted = [row["sent"] for row in (*run["workers"], *run["replicas"])]
    buckets = [name for name in counted[0] if name not in NOT_GRADIENTS]
    sent = max(sum(of[name] for name in buckets) for of in counted) / steps
    bound = 2 * (REPLICAS - 1) / REPLICAS * size
    print(
        f"\n{size:,} bytes of weights, {len(buckets)} buckets: {sent:,.0f} bytes of gradients leave each process, "
        f"{sent - bound:,.0f} more than 2(R - 1)/R of the weights"
    )
    return {"weights": size, "buckets": len(buckets), "sent": sent, "bound": bound}


def waits(run: dict[str, Any], steps: int) -> float:
    """Seconds of a minibatch for which the slower replica waits for sums."""
    rows = [*run["workers"], *run["replicas"]]
    found: float = max(sum(w["seconds"] for w in row["waits"] if w["what"] == "sum") for row in rows)
    return found / steps


def verdict(rows: list[dict[str, Any]], wire: dict[str, float]) -> list[str]:
    """Which goals were missed, printed."""
    missed, own = [], next(row for row in rows if row["name"] == FXPIPE)
    if own["of_torch"] < AS_FAST:
        missed.append(f"replicas are {own['of_torch']:.3f} times as fast as DDP, not {AS_FAST:.2f}")
    if wire["sent"] != wire["bound"]:
        missed.append(f"{wire['sent']:,.0f} bytes leave a process, not {wire['bound']:,.0f}")
    print("\n" + ("missed: " + "; ".join(missed) if missed else "all goals are met"))
    return missed


if __name__ == "__main__":
    main()

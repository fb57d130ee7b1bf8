"""Replicas against torch's DistributedDataParallel, trained for real in the same two processes; see README.md.

After every step of fxpipe's, the two of torch's make one. A round is a run in processes of its own. What counts is the
ratio of a step's times, the slower process's, the median over the steps and then over the rounds. What leaves a process
for the other is counted, and compared with the least that must.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from commands import run_fxpipe
from in_turn import COPIES, FOLDER, FXPIPE, STEPS, VIEWS

HERE = Path(__file__).resolve().parent
MODEL, TINY = HERE / "gpt.py", HERE / "gpt_tiny.py"
REPLICAS = 2
NAMES = {COPIES: "torch DDP", VIEWS: "torch DDP, gradients as views", FXPIPE: "fxpipe --dp 2"}
AS_FAST = 0.95
"""The goal: how many times as fast as torch's."""
AGREE = 1e-4
"""How far the losses of two contenders may be apart, relative: all train alike, in other code."""
NOT_GRADIENTS = ("loss", "batch")
"""What replicas exchange besides gradients: a number each."""


def main() -> None:
    """Measure, print the table and keep the numbers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=50)
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
            found = one_round(build, Path(scratch) / f"round_{number}", options.steps)
            check_losses(found["losses"])
            rounds.append(found["seconds"] | {"ratios": found["ratios"]})
            runs.append(found)
            said = "  ".join(f"{NAMES[n]} {1e3 * s:.0f} ms" for n, s in found["seconds"].items())
            print(f"round {number + 1}  {said}", flush=True)
    rows = table(runs, compiled["forecast"]["milliseconds"] / 1e3)
    wire = on_the_wire(runs[-1]["run"], options.steps, runs[-1]["bytes"])
    waiting = statistics.median(waits(found["run"], options.steps) for found in runs)
    print(f"the worker waits for sums, and adds them up, for {1e3 * waiting:.1f} ms of a minibatch (median)")
    missed = verdict(rows, wire)
    result = {"rows": rows, "rounds": rounds, "wire": wire, "waiting": waiting, "missed": missed}
    if not options.quick:
        (HERE / "result.json").write_text(json.dumps(result, indent=1) + "\n")


def one_round(build: Path, folder: Path, steps: int) -> dict[str, Any]:
    """Medians of a run's steps without the first fifth of them, for each contender: seconds, and fxpipe's ratios to
    them; the losses of all steps; `run.json`."""
    folder.mkdir()
    os.environ |= {FOLDER: str(folder), STEPS: str(steps)}
    run_fxpipe("run", build, "--steps", steps, "--threads", 1, "--json", "--out", folder / "out")
    told = [json.loads((folder / f"{process}.json").read_text()) for process in range(REPLICAS)]
    together = zip(*(process["rows"] for process in told), strict=True)
    rows = [{name: max(row[name] for row in step) for name in NAMES} for step in together][max(1, steps // 5) :]
    losses = {
        name: [statistics.fmean(each) for each in zip(*(process["losses"][name] for process in told), strict=True)]
        for name in NAMES
    }
    return {
        "seconds": {name: statistics.median(row[name] for row in rows) for name in NAMES},
        "ratios": {name: statistics.median(row[name] / row[FXPIPE] for row in rows) for name in NAMES},
        "losses": losses,
        "bytes": told[0]["bytes"],
        "run": json.loads((folder / "out" / "run.json").read_text()),
    }


def check_losses(losses: dict[str, list[float]]) -> None:
    """All contenders train the same model on the same batches: their losses agree."""
    for name, found in losses.items():
        apart = max(abs(a - b) / abs(b) for a, b in zip(found, losses[COPIES], strict=True))
        if not apart < AGREE:
            raise SystemExit(f"{name} does not train as the others do: its losses are {apart:.1e} away from theirs")


def table(runs: list[dict[str, Any]], expected: float) -> list[dict[str, Any]]:
    """A row for each contender, printed: medians over the rounds, how many times as fast fxpipe is, the forecast."""
    rows = []
    print(f"\n{'two replicas':<32}{'ms a minibatch':>15}{'fxpipe is':>12}{'forecast':>10}")
    for name, said in NAMES.items():
        measured = statistics.median(found["seconds"][name] for found in runs)
        ratio = statistics.median(found["ratios"][name] for found in runs)
        more = f"{1e3 * expected:>22.0f}" if name == FXPIPE else f"{ratio:>12.3f}"
        print(f"{said:<32}{1e3 * measured:>15.0f}{more}")
        rows.append({"name": said, "seconds": measured, "fxpipe_is": ratio})
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
    slow = [row for row in rows if row["fxpipe_is"] < AS_FAST]
    missed = [f"replicas are {row['fxpipe_is']:.3f} times as fast as {row['name']}, not {AS_FAST:.2f}" for row in slow]
    if wire["sent"] != wire["bound"]:
        missed.append(f"{wire['sent']:,.0f} bytes leave a process, not {wire['bound']:,.0f}")
    print("\n" + ("missed: " + "; ".join(missed) if missed else "all goals are met"))
    return missed


if __name__ == "__main__":
    main()

"""What `fxpipe run --trace` costs. See README.md beside this file.

Both sides run in turn, with and without a trace; what counts is the median over the rounds of the ratio of their times
of a minibatch. A second, direct look: how long a span takes to record, times the spans that a minibatch has.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

from fxpipe.observe.trace.reader import read_trace
from fxpipe.observe.watch import Cause, Watch
from fxpipe.schedule import Action

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from commands import minibatch_seconds, run_fxpipe
from traces import busy

HERE = Path(__file__).resolve().parent
MODELS = {"large": HERE.parent / "efficiency" / "model.py", "small": HERE / "small.py"}
STEPS = {"large": 30, "small": 1500}
SLOWER = 0.02
APART = 0.01
"""Seconds of a run's busy time by its trace and by its summary may differ by this share."""


def main() -> int:
    """Measure, print the table and keep the numbers; 1 where a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=11, help="of both sides, in turn")
    parser.add_argument("--quick", action="store_true", help="1 round of few steps: only to see that it runs")
    parser.add_argument("--out", type=Path, help="default: result.json here, or nowhere with --quick")
    options = parser.parse_args()
    rounds = 1 if options.quick else options.rounds
    result: dict[str, Any] = {"span_us": 1e6 * span_seconds()}
    with tempfile.TemporaryDirectory(prefix="fxpipe_trace_") as scratch:
        for name, model in MODELS.items():
            build = Path(scratch) / name
            run_fxpipe("compile", model, "-n", 2, "-o", build, "--threads", 1)
            result[name] = compare(name, build, rounds, STEPS[name] // (10 if options.quick else 1))
    result["missed"] = [
        f"{name}: {text}"
        for name in MODELS
        for text, wrong in (
            (f"{100 * result[name]['slower']:.1f} % slower", result[name]["slower"] > SLOWER),
            (f"busy times {100 * result[name]['apart']:.2f} % apart", result[name]["apart"] > APART),
        )
        if wrong
    ]
    report(result)
    if out := options.out or (None if options.quick else HERE / "result.json"):
        out.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if result["missed"] and not options.quick else 0


def compare(name: str, build: Path, rounds: int, steps: int) -> dict[str, Any]:
    """Times of a minibatch with a trace over those without, round by round."""
    ratios, plain, apart = [], [], []
    size = spans = 0
    for i in range(rounds):
        seconds = {}
        for traced in (False, True) if i % 2 == 0 else (True, False):
            print(f"{name}, round {i + 1} of {rounds}: {'with' if traced else 'without'} a trace", file=sys.stderr)
            out, trace = build.parent / "out", build.parent / "trace.json"
            more = ("--trace", trace) if traced else ()
            run_fxpipe("run", build, "--steps", steps, "--threads", 1, "--out", out, "--json", *more)
            seconds[traced] = minibatch_seconds(out)
            if traced:
                found = read_trace(trace)
                size, spans = trace.stat().st_size, len(found.events)
                apart.append(difference(busy(found), json.loads((out / "run.json").read_text())))
        plain.append(seconds[False])
        ratios.append(seconds[True] / seconds[False])
    low, _, high = statistics.quantiles(ratios, n=4) if rounds > 1 else [ratios[0]] * 3
    return {
        "slower": statistics.median(ratios) - 1,
        "range": [low - 1, high - 1],
        "rounds": [round(ratio - 1, 4) for ratio in ratios],
        "minibatch_ms": 1e3 * statistics.median(plain),
        "spans_per_minibatch": spans / steps,
        "bytes_per_minibatch": size / steps,
        "recording": span_seconds() * spans / steps / 2 / statistics.median(plain),
        "apart": max(apart),
    }


def difference(traced: dict[int, dict[str, float]], summary: dict[str, Any]) -> float:
    """The greatest relative difference between what trace and summary say a worker was busy."""
    found = []
    for row in summary["workers"]:
        mine = sum(s for kind, s in traced[row["worker"]].items() if kind not in ("wait", "data"))
        said = row["seconds"] - sum(row["spent"][kind] for kind in ("wait", "data", "other"))
        found.append(abs(mine / said - 1))
    return max(found)


def span_seconds(count: int = 100_000) -> float:
    """What a recorded span takes beyond one that is only summed."""
    return max(_spans(True, count) - _spans(False, count), 0.0)


def _spans(recorded: bool, count: int) -> float:
    watch = Watch()
    if recorded:
        watch.record()
    watch.at(Action("F", 0))
    cause = Cause("activation", "x", 0)
    begin = perf_counter()
    for _ in range(count):
        watch.open("wait", cause)
        watch.close()
    return (perf_counter() - begin) / count


def report(result: dict[str, Any]) -> None:
    """The table."""
    for name in MODELS:
        row = result[name]
        print(
            f"{name}: {row['minibatch_ms']:.1f} ms a minibatch, {row['spans_per_minibatch']:.0f} spans, "
            f"{row['bytes_per_minibatch'] / 1e3:.1f} kB; with a trace {100 * row['slower']:+.1f} % "
            f"({100 * row['range'][0]:+.1f} to {100 * row['range'][1]:+.1f}); recording alone "
            f"{100 * row['recording']:.3f} %; busy times {100 * row['apart']:.3f} % apart"
        )
    print(f"a recorded span: {result['span_us']:.2f} µs more than one that is summed")
    for text in result["missed"]:
        print(f"missed: {text}")


if __name__ == "__main__":
    sys.exit(main())

"""Two workers of one thread each next to one process, for the trainings of people with two cards; see README.md."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from commands import minibatch_seconds, run_fxpipe  # noqa: E402

MODELS = ("qlora", "diffusion")
SMALL = {"qlora": ("layers=2", "width=64"), "diffusion": ("layers=1", "heads=1", "side=4")}
ROWS = 8
HALVES, WHOLE, OURS = "halves in turn", "one process, 2 threads", "fxpipe, 2 workers"
"""With `device_map`, one card works while the other waits: in all that one worker does with its one thread."""

FASTER, SMALLER = 1.6, 0.6
"""The goals: how many times as fast as the halves in turn, and the share of one process's memory on each worker."""


def main() -> None:
    """Measure, print the table and keep the numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--quick", action="store_true", help="small models, 1 round, kept nowhere: to see that it runs")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.steps = 1, 6
    with tempfile.TemporaryDirectory(prefix="fxpipe_cards_") as folder:
        rows = [row for name in MODELS for row in measured(name, options, Path(folder))]
    if not options.quick:
        (HERE / "result.json").write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))
    missed = [f"{r['model']}: {what}" for r in rows if r["side"] == OURS for what in missed_by(r)]
    print(
        f"missed: {', '.join(missed)}" if missed else f"goals are met: {FASTER} times as fast, {SMALLER} of the memory"
    )


def measured(name: str, options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """The sides in turn, round by round: medians of the seconds of a minibatch, and the peaks of their processes."""
    settings = SMALL[name] if options.quick else ()
    build = folder / name
    flags = [flag for text in settings for flag in ("--set", text)]
    run_fxpipe("compile", HERE / f"{name}.py", "-n", 2, "--microbatches", 2, *flags, "-o", build)
    seconds: dict[str, list[float]] = {HALVES: [], WHOLE: [], OURS: []}
    peaks: dict[str, list[int]] = {}
    for turn in range(options.rounds):
        for side, threads in ((HALVES, 1), (WHOLE, 2), (OURS, 1)):
            out = folder / f"{name}-{turn}-{threads}-{side[:3]}"
            out.mkdir()
            if side == OURS:
                run = ("run", build, "--steps", options.steps, "--threads", threads, "--out", out / "run")
                run_fxpipe(*run, folder=out)
                seconds[side].append(minibatch_seconds(out / "run"))
            else:
                command = [sys.executable, HERE / "eager.py", name, str(threads), str(options.steps), *settings]
                done = subprocess.run(command, cwd=out, capture_output=True, text=True)
                if done.returncode:
                    raise SystemExit(done.stderr)
                steps = json.loads(done.stdout.splitlines()[-1])
                seconds[side].append(statistics.median(steps[max(1, len(steps) // 5) :]))
            peaks[side] = [int(file.read_text()) for file in sorted(out.glob("peak_*"))]
            print(f"{name}, round {turn + 1}: {side} {ROWS / seconds[side][-1]:.2f} samples/s", flush=True)
    halves, whole = seconds[HALVES], peaks[WHOLE][0]
    return [
        {
            "model": name,
            "side": side,
            "samples_per_second": ROWS / statistics.median(found),
            "faster": statistics.median(a / b for a, b in zip(halves, found, strict=True)),
            "peaks": peaks[side],
            "memory": max(peaks[side]) / whole,
        }
        for side, found in seconds.items()
    ]


def table(rows: list[dict[str, Any]]) -> str:
    """A row for each model and side."""
    lines = ["| model | side | samples/s | times the halves in turn | peak of each process, MB | of one process |"]
    lines.append("|---|---|---|---|---|---|")
    for row in rows:
        peaks = ", ".join(f"{peak / 1e6:.0f}" for peak in row["peaks"])
        lines.append(
            f"| {row['model']} | {row['side']} | {row['samples_per_second']:.2f} | {row['faster']:.2f} | {peaks} | "
            f"{row['memory']:.2f} |"
        )
    return "\n".join(lines)


def missed_by(row: dict[str, Any]) -> list[str]:
    """The goals that a row of fxpipe misses."""
    missed = [f"{row['faster']:.2f} times as fast, not {FASTER}"] if row["faster"] < FASTER else []
    return missed + ([f"{row['memory']:.2f} of the memory, not {SMALLER}"] if row["memory"] > SMALLER else [])


if __name__ == "__main__":
    main()

"""What saving a run costs, and how long it takes to save and to go on. See README.md beside this file.

Three parts. Training: a GPT with a checkpoint at every 100 steps and without any, in turn. States: 100 MB and 2 GB are
saved and loaded as a checkpoint, with `torch.save` and with DCP, in turn. Far: a run goes on after its millionth step.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import far
import states
import tables
from commands import minibatch_seconds, run_fxpipe

HERE = Path(__file__).resolve().parent
RESULT = HERE / "result.json"
EVERY = 100
WAITS = 0.01
"""Training may wait for its checkpoints for this share of its time."""


def main() -> int:
    """Measure, write the tables and keep the numbers; 1 where a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--rounds", type=int, default=6, help="of training, both sides in turn; half as many of the rest"
    )
    parser.add_argument("--quick", action="store_true", help="1 round of everything, small: only to see that it runs")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: that of temporary files")
    parser.add_argument("--report", action="store_true", help="run nothing: the tables of what is in result.json")
    parser.add_argument("--state", help=argparse.SUPPRESS)
    options = parser.parse_args()
    rounds = 1 if options.quick else options.rounds
    if options.state:
        print(json.dumps(states.measure(options.state, rounds, options.folder)))
        return 0
    if not options.report:
        with tempfile.TemporaryDirectory(prefix="fxpipe_checkpoints_", dir=options.folder) as scratch:
            result = measure(Path(scratch), rounds, options.quick)
    else:
        result = json.loads(RESULT.read_text())
    text = tables.text(result)
    print(text)
    if not options.quick:
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
        tables.write_between_markers(text, HERE / "README.md")
    return 1 if result["missed"] and not options.quick else 0


def measure(scratch: Path, rounds: int, quick: bool) -> dict[str, Any]:
    """All numbers, and which goals are missed."""
    sizes = ["10 MB"] if quick else ["100 MB", "2 GB"]
    free = shutil.disk_usage(scratch).free
    if free < (needed := 12e9 if "2 GB" in sizes else 1e9):
        raise SystemExit(f"{scratch} has {free / 1e9:.0f} GB of free disk, and {needed / 1e9:.0f} are needed")
    result: dict[str, Any] = {"disk": disk(scratch), "cores": os.cpu_count()}
    steps = 2 * EVERY + EVERY // 2
    result["training"] = training(scratch / "training", rounds, steps // 10 if quick else steps, quick)
    result["states"] = {size: state(size, (rounds + 1) // 2, scratch / "state") for size in sizes}
    step = 10_000 if quick else 1_000_000
    print(f"a run goes on after step {step}", file=sys.stderr)
    result["far"] = far.measure(HERE / "far_model.py", scratch / "far", step, (rounds + 1) // 2)
    result["missed"] = missed(result)
    return result


def training(folder: Path, rounds: int, steps: int, quick: bool) -> dict[str, Any]:
    """Times of a minibatch with checkpoints over those without, and how long workers wait for one."""
    every = EVERY // 10 if quick else EVERY
    build, out = folder / "build", folder / "out"
    run_fxpipe("compile", HERE / "gpt.py", "-n", 2, "-o", build, "--threads", 1)
    ratios, plain, waits = [], [], []
    size = 0
    for number in range(rounds):
        seconds = {}
        for saves in (False, True) if number % 2 == 0 else (True, False):
            print(f"round {number + 1} of {rounds}: {'with' if saves else 'without'} checkpoints", file=sys.stderr)
            shutil.rmtree(out, ignore_errors=True)
            more = ("--checkpoint-every", every, "--keep", 1) if saves else ()
            run_fxpipe("run", build, "--steps", steps, "--threads", 1, "--out", out, "--json", *more)
            seconds[saves] = minibatch_seconds(out)
            if saves:
                row = json.loads((out / "run.json").read_text())
                waits.append(max(worker["spent"]["save"] for worker in row["workers"]) / (steps // every))
                size = sum(file.stat().st_size for file in (out / "checkpoints").rglob("*") if file.is_file())
        plain.append(seconds[False])
        ratios.append(seconds[True] / seconds[False])
    return {
        "every": every,
        "bytes": size,
        "minibatch": plain,
        "waits": waits,
        "share": statistics.median(waits) / (every * statistics.median(plain)),
        "slower": [ratio - 1 for ratio in ratios],
    }


def state(size: str, rounds: int, folder: Path) -> dict[str, Any]:
    """In a process of its own, so that no memory of another size is left."""
    print(f"{size} of state", file=sys.stderr)
    folder.mkdir()
    command = [sys.executable, __file__, "--state", size, "--rounds", str(rounds), "--folder", str(folder)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    shutil.rmtree(folder)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def missed(result: dict[str, Any]) -> list[str]:
    """The goals that are not met, in words."""
    found = []
    if (share := result["training"]["share"]) > WAITS:
        found.append(f"training waits {100 * share:.2f} % of its time for checkpoints")
    runs = {name: statistics.median(seconds) for name, seconds in result["far"]["runs"].items()}
    if (grows := runs["told"] - runs["near"]) > result["far"]["data"]:
        found.append(f"to go on after step {result['far']['step']} takes {grows:.1f} s more, without any data")
    return found


def disk(folder: Path) -> str:
    """The file system that a folder is on."""
    rows = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    real = folder.resolve()
    return max((row for row in rows if real.is_relative_to(row[0])), key=lambda row: len(row[0]))[1]


if __name__ == "__main__":
    sys.exit(main())

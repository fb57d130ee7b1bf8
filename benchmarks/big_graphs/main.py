"""How long compiling large graphs takes, and how much memory. See README.md beside this file.

Every model has a process of its own. What counts: passes with codegen against capture alone, the whole in seconds, with
the measuring of costs, which runs the model's own step some times, and that four times the nodes take no more than four
times the time, but for noise.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

HERE = Path(__file__).resolve().parent
TIMES_CAPTURE = 3.0
"""Capture, passes and codegen together may take so many times as long as capture alone."""
SECONDS = 60.0
GROWTH = 1.3
"""The larger of two models may take so many times the smaller one's time for each node."""


def main() -> int:
    """Measure, print the table and keep the numbers; 1 where a goal is missed."""
    from models import MODELS, QUICK, SCALED

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--one", metavar="MODEL", help="measure it in this process and print its row as JSON")
    parser.add_argument("--only", metavar="TEXT", default="", help="models with this in their name")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--quick", action="store_true", help="the smallest models alone: only to see that it runs")
    parser.add_argument("--out", type=Path, default=HERE / "result.json")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one, options.workers)))
        return 0
    rows: dict[str, dict[str, Any]] = {}
    for name in (n for n in (QUICK if options.quick else MODELS) if options.only in n):
        print(name, file=sys.stderr)
        command = [sys.executable, __file__, "--one", name, "--workers", str(options.workers)]
        rows[name] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    missed = [text for name, row in rows.items() for text in misses(name, row)]
    for small, large in SCALED:
        if small in rows and large in rows:
            each = [(rows[n]["capture"] + rows[n]["lower"]) / rows[n]["nodes"] for n in (small, large)]
            if each[1] > GROWTH * each[0]:
                missed.append(f"{large}: {each[1] / each[0]:.2f} times the time of {small} for each node")
    report(rows, missed)
    if not (options.only or options.quick):
        options.out.write_text(json.dumps({"rows": rows, "missed": missed}, indent=1) + "\n")
    return 1 if missed and not options.quick else 0


def measure(name: str, workers: int) -> dict[str, Any]:
    """One model's row: seconds, and MiB of memory that capture and passes added at their peak."""
    import torch
    from models import MODELS

    import fxpipe

    declare_torchvision_ops()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, loss, batch = MODELS[name]()
    loss(model, batch).backward()  # what training this model takes in any case, and the libraries' own memory
    model.zero_grad()
    fxpipe.compile(torch.nn.Linear(2, 1), lambda m, b: m(b).sum(), torch.randn(2, 2), workers=1, cost="analytic")
    before, begin = peak(), perf_counter()
    program = fxpipe.capture(model, loss, batch)
    captured, nodes = perf_counter(), len(program.graph.nodes)
    held = peak()
    build = fxpipe.lower(program, workers=workers, cost="analytic", threads=1)
    lowered, used = perf_counter(), peak()
    fxpipe.lower(program, workers=workers, cost="measured", threads=1)
    lower = lowered - captured
    costing = max(perf_counter() - lowered - lower, 0.0)
    full = fxpipe.lower(program, workers=workers, cost="analytic", threads=1, outline=False)
    return {
        "nodes": nodes,
        "units": len(build.plan.step.units),
        "capture": captured - begin,
        "lower": lower,
        "costing": costing,
        "text_kb": sum(map(len, build.files.values())) / 1e3,
        "full_kb": sum(map(len, full.files.values())) / 1e3,
        "model_mib": sum(t.numel() * t.element_size() for t in model.state_dict().values()) / 2**20,
        "capture_mib": held - before,
        "lower_mib": used - held,
    }


def peak() -> float:
    """The process's greatest memory so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def declare_torchvision_ops() -> None:
    """What `import timm` looks up by way of torchvision, whose compiled part may be for another build of torch."""
    import torch

    sys.path.append(str(Path(sys.prefix) / "zoo"))  # where `make venv` puts both
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def misses(name: str, row: dict[str, Any]) -> list[str]:
    """The goals that a model misses."""
    total = row["capture"] + row["lower"]
    found = []
    if total > TIMES_CAPTURE * row["capture"]:
        found.append(f"{name}: {total / row['capture']:.2f} times capture")
    if total + row["costing"] > SECONDS:
        found.append(f"{name}: {total + row['costing']:.0f} s")
    return found


def report(rows: dict[str, dict[str, Any]], missed: list[str]) -> None:
    """The table of the README."""
    headings = ("model", "nodes", "units", "capture", "passes and codegen", "times capture", "measuring costs", "model")
    print(f"| {' | '.join((*headings, 'memory: capture', 'passes', 'text', 'in full'))} |")
    print("|---|---|---|---|---|---|---|---|---|---|---|---|")
    for name, r in rows.items():
        seconds = [f"{r['capture']:.1f} s", f"{r['lower']:.1f} s", f"{1 + r['lower'] / r['capture']:.2f}"]
        memory = [f"{r[key]:.0f} MiB" for key in ("model_mib", "capture_mib", "lower_mib")]
        cells = [name, f"{r['nodes']:,}", f"{r['units']:,}", *seconds, f"{r['costing']:.1f} s", *memory]
        cells += [f"{r[key]:,.0f} KB" for key in ("text_kb", "full_kb")]
        print(f"| {' | '.join(cells)} |")
    print("\nmissed: " + "; ".join(missed) if missed else "\nall goals are met")


if __name__ == "__main__":
    sys.exit(main())

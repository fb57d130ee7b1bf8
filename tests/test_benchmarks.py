"""Every benchmark still runs: its `--quick` form ends in its normal report, and keeps nothing."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from two_hosts import missing

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
VERDICT = r"goals (are )?met|missed: "  # which of them depends on the machine
REPORTS = {
    "accuracy": (r"spectrain N=4 M=4 .* int4: ", r"1f1b N=4 M=4 .* int8: ", "written: "),
    "backends": ("gpt-tiny ", "pipeline of two workers", VERDICT),
    "balance": ("heavy_head", "three-way"),
    "big_graphs": (r"\| GPT, 24 blocks", VERDICT),
    "branches": (r"\| 4 \| 1f1b \| 1 \| 37\.3 \| 20\.3 \| 1\.84 ", r"\| real: 2 \| 1f1b \| 2 \|", VERDICT),
    "cards": (r"\| qlora \| fxpipe, 2 workers \| \d", r"\| diffusion \| halves in turn \| \d", VERDICT),
    "checkpoints": (r"\*\*Training\*\*", r"\| 10 MB \| DCP", r"after step 10,000", VERDICT),
    "codecs": (r"\| int8 \| 0\.2578", r"\| 1024 \| lowrank:4", VERDICT),
    "efficiency": ("efficiency ", "worker 1", "executor "),
    "gpu": (r"\| GPT block \| 1 \| emitted stages \| \d", r"\| LSTM \| 1 \| eager PyTorch \| \d", r"\| 3 \("),
    "links": (r"\| snn \| 300Mbit", r"\| torch 1F1B", r"\| DDP, PowerSGD", VERDICT),
    "peers": (r"\| torch ZBV \|", r"\| one process, 2 threads \| \d+ \|", "took zb|took 1f1b", "is slower than: "),
    "planner": ("made-up", "efficiency: ideal time over the slowest worker's"),
    "policies": ("4 workers, microbatches: 1", "2 workers, 2 processes", r"\| pipeoptim"),
    "replica_plans": (r"\| 24 \| 8 \|", "made-up, 4 GPUs", r"paper's 3-1: .*, found", "fxpipe three-way"),
    "replicas": ("torch DDP, gradients as views", "fxpipe --dp 2 ", "bytes of gradients leave each", VERDICT),
    "schedules": ("fxpipe zb-h1 ", r"fxpipe auto \(", "a worker; in half of that:", VERDICT),
    "shared_memory": (r"\| 2 \| all at once \| [\d,]+, [\d,]+, ", VERDICT),
    "trace": ("large: ", "small: ", "a recorded span: "),
}
"""What each report holds."""


def test_every_benchmark_is_here() -> None:
    assert set(REPORTS) == {path.parent.name for path in BENCHMARKS.glob("*/main.py")}


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.parametrize("name", REPORTS)
def test_a_quick_run_ends_in_its_report(name: str, tmp_path: Path) -> None:
    if name == "links" and (reason := missing(0.01)):
        pytest.skip(reason)
    kept = {path: path.read_bytes() for path in (BENCHMARKS / name).glob("result.json")}
    out = ["--out", tmp_path] if name == "accuracy" else []  # where it keeps the runs that it goes on from
    command = [sys.executable, BENCHMARKS / name / "main.py", "--quick", *out]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=600)
    assert done.returncode == 0, done.stderr
    for text in REPORTS[name]:
        assert re.search(text, done.stdout), done.stdout
    assert {path: path.read_bytes() for path in kept} == kept

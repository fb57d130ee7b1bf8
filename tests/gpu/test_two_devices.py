"""Runs on two devices: what one device that processes share cannot show."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from gpu_runs import CUT, MARKS, MICROBATCHES, NET, WIRES, compiled, run_here, run_over

DEVICES = 2
TWO = pytest.mark.skipif(torch.cuda.device_count() < DEVICES, reason="needs two CUDA devices")
pytestmark = MARKS
LARGE = "WIDTH, INSIDE, BATCH = 1024, 4096, 4096\n"
"""Messages of 16 MiB a microbatch."""
LONG = "WIDTH, INSIDE, BATCH = 4096, 4096, 16 * 4096\n"
"""Messages of 64 MiB a microbatch, and stages of some milliseconds."""


@pytest.mark.parametrize(
    ("devices", "connections"), [(1, 1), pytest.param(2, 1, marks=TWO), pytest.param(2, 32, marks=TWO)]
)
@pytest.mark.parametrize("wires", WIRES)
@pytest.mark.parametrize(
    ("ranks", "options", "more"),
    [
        pytest.param(2, (), "", id="small"),
        pytest.param(2, (), LARGE, id="large"),
        pytest.param(4, ("--dp", 2), LARGE, id="replicas"),
    ],
)
def test_trains_as_one_process(
    tmp_path: Path, ranks: int, options: tuple[object, ...], more: str, wires: str, devices: int, connections: int
) -> None:
    """Replicas sum over NCCL while messages go through peer memory; with one hardware queue, too, where each kernel
    waits for those before it: a run that stands still fails."""
    compiled(tmp_path, NET + more, "-n", 2, *options, *MICROBATCHES, *CUT)
    run = ("--steps", 6)
    expected = run_here(tmp_path, *run, "--out", tmp_path / "local")["losses"]
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": connections}
    found = run_over(wires, tmp_path, ranks, *run, "--out", tmp_path / "out", devices=devices, **environment)
    assert found["losses"] == pytest.approx(expected, rel=1e-5)


def spans(events: list[dict[str, Any]], kind: str) -> list[tuple[float, float, object]]:
    """Beginning, end and stream of what the device did, in the order of beginnings."""
    of_kind = [event for event in events if event.get("cat") == kind and event.get("dur")]
    return sorted((each["ts"], each["ts"] + each["dur"], each["args"].get("stream")) for each in of_kind)


def covered(span: tuple[float, float], others: list[tuple[float, float]]) -> float:
    """How much of a span the others, which do not overlap each other, take."""
    return sum(max(0.0, min(span[1], end) - max(span[0], begin)) for begin, end in others)


@TWO
@pytest.mark.parametrize("wires", WIRES)
def test_messages_hide_behind_kernels(tmp_path: Path, wires: str) -> None:
    """The device computes while it receives; its host is ahead of it; and a step is hardly longer than its stages."""
    compiled(tmp_path, NET + LONG, "--schedule", "1f1b", "--microbatches", 16, *CUT)
    run = ("--steps", 20, "--profile", 2, "--out", tmp_path / "out")
    summary = run_over(wires, tmp_path, 2, *run, devices=DEVICES)
    step = max(row["seconds"] for row in summary["workers"]) / summary["steps"]
    stage = max(row["took"]["F"] + row["took"]["B"] for row in summary["workers"]) / summary["steps"]
    for rank in range(2):
        events = json.loads((tmp_path / "out" / f"profile_{rank}.json").read_text())["traceEvents"]
        kernels = spans(events, "kernel")
        streams = [stream for _, _, stream in kernels]
        busiest = max(set(streams), key=streams.count)
        computing = [(begin, end) for begin, end, stream in kernels if stream == busiest]
        others = [each for each in kernels if "nccl" in wires and each[2] != busiest]
        copies = [(a, b) for a, b, stream in [*spans(events, "gpu_memcpy"), *others] if stream != busiest]
        large = [span for span in copies if span[1] - span[0] > 50]  # microseconds: no numbers of a loss
        assert large
        hidden = sum(covered(span, computing) for span in large) / sum(end - begin for begin, end in large)
        print(f"{wires}: rank {rank} hides {hidden:.0%} of its messages; a step takes {step / stage:.2f} of its stages")
        assert hidden > 0.8
        assert median(begin - end for (_, end), (begin, _) in pairwise(computing)) < 50
    assert step < 1.1 * stage * (1 + 1 / 16)  # one microbatch more, in which the pipeline fills

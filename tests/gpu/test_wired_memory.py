"""What messages, shapes and graphs take of a device; and settings of its allocator."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gpu_runs import CUT, MARKS, MICROBATCHES, NET, WIRES, compiled, results, run_here, run_over

pytestmark = MARKS
WIDE = "WIDTH, INSIDE, BATCH = 1024, 4096, 16 * 1024\n"
"""Messages of 16 MiB a microbatch."""
SIXTEEN = ("--schedule", "1f1b", "--microbatches", 16)
SMALL_WORKSPACE = {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}
MESSAGES = 6 * 16 << 20
"""Blocks of the sender, and what the receiver's host is ahead by."""
SIZES = """
def size(step):
    return BATCH - 256 * (step % 4)
"""
CROWDED = """
def on_step(step, loss, run):
    torch.cuda.empty_cache()
    room = torch.cuda.mem_get_info()[0] - (8 << 30)
    if rank() == "0" and room > 0:
        held = torch.empty(room, dtype=torch.uint8, device=DEVICE)
        torch.cuda.synchronize()
        del held
    torch.cuda.empty_cache()
"""


def near(rows: list[dict[str, Any]], forecast: dict[str, Any]) -> None:
    for row, expected in zip(rows, forecast["workers"], strict=True):
        assert 0.8 * expected["peak_bytes"] < row["reserved_bytes"] < 1.2 * expected["peak_bytes"] + MESSAGES


@pytest.mark.parametrize("wires", WIRES)
@pytest.mark.parametrize("options", [SIXTEEN, ("--schedule", "async", "--microbatches", 16)], ids=["1f1b", "async"])
def test_messages_are_in_the_forecast(tmp_path: Path, wires: str, options: tuple[object, ...]) -> None:
    compiled(tmp_path, NET + WIDE, *options, *CUT)
    summary = run_over(wires, tmp_path, 2, "--steps", 6, "--out", tmp_path / "out", **SMALL_WORKSPACE)
    near(summary["workers"], summary["forecast"])


def test_graphs_are_in_the_forecast(tmp_path: Path) -> None:
    compiled(tmp_path, NET + WIDE, *SIXTEEN, *CUT, "--backend", "cudagraph")
    summary = run_over("peer memory", tmp_path, 2, "--steps", 6, "--out", tmp_path / "out", **SMALL_WORKSPACE)
    near(summary["workers"], summary["forecast"])


@pytest.mark.parametrize("wires", WIRES)
def test_the_same_shapes_again_take_no_more(tmp_path: Path, wires: str) -> None:
    """Four sizes of batches: after two rounds, and after six."""
    compiled(tmp_path, NET + WIDE + SIZES, *MICROBATCHES, *CUT, "--scan", 4)
    rows = [
        run_over(wires, tmp_path, 2, "--steps", steps, "--out", tmp_path / f"out{steps}", **SMALL_WORKSPACE)["workers"]
        for steps in (8, 24)
    ]
    for after_two, after_six in zip(*rows, strict=True):
        assert after_six["reserved_bytes"] <= 1.02 * after_two["reserved_bytes"] + (4 << 20)


@pytest.mark.parametrize(
    ("setting", "transport", "cure"),
    [
        ("expandable_segments:True", "peer memory", ""),
        ("expandable_segments:True,max_split_size_mb:64", "peer memory", ""),
        ("backend:cudaMallocAsync", "nccl", "leave backend:cudaMallocAsync out of PYTORCH_ALLOC_CONF"),
    ],
)
def test_settings_of_the_allocator(tmp_path: Path, setting: str, transport: str, cure: str) -> None:
    """Where the devices share no memory, the first line says how they could."""
    build = compiled(tmp_path, NET, *MICROBATCHES, *CUT)
    expected = run_here(tmp_path, "--steps", 6, "--out", tmp_path / "local")["losses"]
    run = ("run", build, "--steps", 6, "--out", tmp_path / "out")
    first, *_ = results("peer memory", 2, "-m", "fxpipe", *run, PYTORCH_ALLOC_CONF=setting)
    line = next(line for line in first.err.splitlines() if line.startswith("messages: "))
    assert line.startswith(f"messages: all pairs: {transport}: ")
    assert cure in line
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines if "loss" in line] == pytest.approx(expected, rel=1e-6)


def test_a_full_device_and_an_emptied_cache(tmp_path: Path) -> None:
    """What another process has open is freed by no one."""
    compiled(tmp_path, NET + CROWDED, *MICROBATCHES, *CUT)
    run = ("--steps", 6)
    expected = run_here(tmp_path, *run, "--out", tmp_path / "local")["losses"]
    found = run_over("peer memory", tmp_path, 2, *run, "--out", tmp_path / "out")["losses"]
    assert found == pytest.approx(expected, rel=1e-6)

"""`--backend cudagraph` in processes that exchange messages."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpu_runs import CUT, MARKS, MICROBATCHES, NET, compiled, run_over

pytestmark = MARKS
COUNTED = """
from fxpipe.engines import cudagraph


def count(*given):
    with open(f"{__file__}.{rank()}", "a") as file:
        file.write("x")


before(cudagraph._Replayed, "_capture", count)
"""
LATE = """
before(torch.cuda.CUDAGraph, "replay", late)
before(cudagraph, "foreach_copy_", late)
"""
SGD = """
def optimizer(named_parameters):
    return torch.optim.SGD([p for _, p in named_parameters], lr=0.01, momentum=0.9)
"""
SIZES = """
def size(step):
    return BATCH // 2 if step % 4 == 3 else BATCH
"""


@pytest.mark.parametrize(
    ("options", "run", "more", "captures"),
    [
        pytest.param(MICROBATCHES, (), "", 2, id="1f1b"),
        pytest.param(MICROBATCHES, (), SGD + LATE, 2, id="1f1b-late"),
        pytest.param(("--schedule", "async"), (), "", 4, id="async"),
        pytest.param(("--schedule", "async"), (), SGD + LATE, 4, id="async-late"),
        pytest.param((*MICROBATCHES, "--scan", 1), ("--new-shapes", 1), SIZES, 4, id="new-shape"),
    ],
)
def test_trains_as_eager_in_processes(
    tmp_path: Path, options: tuple[object, ...], run: tuple[object, ...], more: str, captures: int
) -> None:
    """Through peer memory, so that a message is copied right after a replay. A forward and a backward each process,
    which capture again where weights move, and for each shape."""
    compiled(tmp_path, f"{NET}DROPOUT = 0.1\n{COUNTED}{more}", *options, *CUT)
    run = ("--steps", 10, *run)
    eager = run_over("peer memory", tmp_path, 2, *run, "--out", tmp_path / "eager")
    assert not list(tmp_path.glob("model.py.*"))
    graphs = run_over("peer memory", tmp_path, 2, *run, "--backend", "cudagraph", "--out", tmp_path / "graphs")
    assert graphs["losses"] == pytest.approx(eager["losses"], rel=1e-4)
    found = [len((tmp_path / f"model.py.{rank}").read_text()) for rank in (0, 1)]
    assert all(2 <= count <= captures for count in found), found

"""Runs over NCCL and peer memory that are stopped, and go on with the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpu_runs import CUT, MARKS, MICROBATCHES, NET, WIRES, compiled, run_over

pytestmark = MARKS


@pytest.mark.parametrize("wires", WIRES)
@pytest.mark.parametrize(
    "options", [("--schedule", "async", "--policy", "spectrain"), MICROBATCHES], ids=["async", "1f1b"]
)
def test_goes_on_with_the_same_bits(tmp_path: Path, wires: str, options: tuple[object, ...]) -> None:
    """A weight that two workers read, AdamW, dropout, batches from the device's generator."""
    compiled(tmp_path, f"{NET}TIED, DROPOUT = True, 0.1\n", *options, *CUT)

    def losses(out: str, *run: object) -> list[float]:
        return list(run_over(wires, tmp_path, 2, *run, "--out", tmp_path / out)["losses"])

    whole = losses("whole", "--steps", 6)
    assert losses("first", "--steps", 3, "--checkpoint-every", 3) == whole[:3]
    saved = tmp_path / "first" / "checkpoints" / "step-3"
    assert losses("second", "--steps", 6, "--resume", saved)[-3:] == whole[3:]

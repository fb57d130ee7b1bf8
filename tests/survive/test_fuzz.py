"""Damaged files and arguments give a value, or an error with its place and what to do: no traceback, and no hang."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SUPPORT = Path(__file__).parents[1] / "support"
MINUTES = 25
"""On a machine that is shared; alone it takes about two."""


def fuzz(folder: Path, seed: int, count: int) -> dict[str, Any]:
    """The cases in a process of their own: a defect may end it."""
    command = [sys.executable, "-X", "faulthandler", SUPPORT / "fuzzing.py", folder, seed, count]
    environment = {**os.environ, "PYTHONPATH": str(SUPPORT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        list(map(str, command)), env=environment, capture_output=True, text=True, timeout=60 * MINUTES, check=False
    )
    assert done.returncode == 0, done.stderr[-5000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def check(found: dict[str, Any], count: int) -> None:
    assert found["failures"] == []
    assert sum(found["counts"].values()) > 0.95 * count
    codes = {int(kind.rpartition(" ")[2]) for kind in found["counts"]}
    assert codes == {0, 1, 2}, "some cases are refused, some are wrong usage, some do no harm"


@pytest.mark.slow
@pytest.mark.multiproc
def test_many_cases(tmp_path: Path) -> None:
    check(fuzz(tmp_path, 1, 1200), 1200)

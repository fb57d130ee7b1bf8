"""examples/own_loop.py, as its docstring says to run it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fxpipe.checkpoint.manifest import read_manifest

EXAMPLE = Path(__file__).parents[1] / "examples" / "own_loop.py"


@pytest.mark.slow
@pytest.mark.multiproc
def test_it_trains_on_two_processes(tmp_path: Path) -> None:
    shutil.copy(EXAMPLE, tmp_path)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", EXAMPLE.name]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "EPOCHS": "6"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    accuracies = [float(found) for found in re.findall(r"accuracy ([\d.]+)\n", done.stdout)]
    assert len(accuracies) == 6
    best = re.search(r"best accuracy ([\d.]+), weights in (\S+)", done.stdout)
    assert best is not None
    assert float(best[1]) == max(accuracies) > 0.6
    assert read_manifest(tmp_path / best[2]).workers == 2

"""The own loop on the page, with replicas, checkpoints and a trace, as the page says to run it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fxpipe
from fxpipe.checkpoint.manifest import read_manifest
from fxpipe.observe.trace.reader import read_trace

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to" / "own-loop.md").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.multiproc
def test_the_loop_of_four_processes_does_what_one_does(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n([^`]*pipeline\.fed :[^`]*)```", PAGE)
    ((compiles, trains),) = re.findall(r"    fxpipe (compile .*)\n    torchrun (.* own\.py)\n", PAGE)
    (tmp_path / "tiny.py").write_text((ROOT / "docs" / "concepts" / "tiny.py").read_text())
    (tmp_path / "own.py").write_text(code)

    def ran(module: str, arguments: str) -> str:
        command = [sys.executable, "-m", module, *arguments.split()]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout

    ran("fxpipe", compiles)
    first = ran("torch.distributed.run", trains)
    with fxpipe.load(tmp_path / "build").local(trace=tmp_path / "alone.json") as pipeline:
        sys.path.insert(0, str(tmp_path))
        from tiny import train_data

        torch.manual_seed(0)
        losses = pipeline.run(train_data())
    said = sorted(re.findall(r"process (\d): (\d+) steps, loss ([\d.]+)", first))
    assert said == [(str(rank), str(len(losses)), f"{losses[-1]:.4f}") for rank in range(4)]
    there, alone = read_trace(tmp_path / "trace.json"), read_trace(tmp_path / "alone.json")
    assert there.other["workers"] == alone.other["workers"] == 2
    assert there.minibatches == alone.minibatches == len(losses)
    newest = max((tmp_path / "out-own" / "checkpoints").iterdir(), key=lambda path: int(path.name.split("-")[1]))
    assert read_manifest(newest).step == len(losses) // 30 * 30
    (tmp_path / "own.py").write_text(code.replace("options = {", 'options = {"resume": "newest", '))
    assert sorted(re.findall(r"loss ([\d.]+)", ran("torch.distributed.run", trains))) == [f"{losses[-1]:.4f}"] * 4

"""Every kind of run on one machine, next to another user who connects to whatever listens."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from case import of_text
from product import compiled, run_here, run_options

from fxpipe.runtime.options import RunOptions

ARENA = Path(__file__).parents[1] / "support" / "other_user.py"
RUN = """import sys
from fxpipe.plan.build_folder import read_plan
from fxpipe.runtime.options import RunOptions
from fxpipe.runtime.process.launch import launch
options = RunOptions.from_json(sys.argv[1])
plan = read_plan(options.build)
launch(options, plan.processes, plan.mesh)"""
STEPS = 40


def may_be_another() -> bool:
    """Whether this process may make a network, and a process of another user there."""
    if sys.platform != "linux" or os.geteuid() or not (shutil.which("unshare") and shutil.which("ip")):
        return False
    up = ["unshare", "--net", "ip", "link", "set", "lo", "up"]
    return subprocess.run(up, capture_output=True).returncode == 0


pytestmark = [
    pytest.mark.slow,
    pytest.mark.multiproc,
    pytest.mark.skipif(not may_be_another(), reason="needs root: an attacker as another user, in a network of its own"),
]


def among_others(moment: str, options: RunOptions) -> dict[str, Any]:
    """What came of a run, and of the other user's connections."""
    run = [sys.executable, "-c", RUN, options.to_json()]
    command = [sys.executable, ARENA, moment, str(options.out), *run]
    return dict(json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout))


@pytest.mark.parametrize(
    "kind",
    [
        "schedule=async evaluation=often shapes=new",
        "replicas=two evaluation=often",
        "replicas=2,1 shapes=last",
        "replicas=shard clip=True average=True",
        "replicas=outer schedule=async evaluation=often",
        "replicas=delayed shapes=new",
    ],
)
def test_nothing_listens_once_it_trains(kind: str, tmp_path: Path) -> None:
    case = of_text(kind)
    compiled(case, tmp_path)
    found = among_others("training", run_options(case, tmp_path, "out", steps=STEPS))
    assert (found["code"], found["sockets"], found["connections"]) == (0, 0, 0), found
    run_here(run_options(case, tmp_path, "alone", steps=STEPS))
    weights = [(tmp_path / out / "model.safetensors").read_bytes() for out in ("out", "alone")]
    assert weights[0] == weights[1]


def test_whoever_connects_at_the_start_does_not_get_in(tmp_path: Path) -> None:
    """The run trains as if alone, or it ends with an error; it does not wait."""
    case = of_text("replicas=two")
    compiled(case, tmp_path)
    found = among_others("start", run_options(case, tmp_path, "out", steps=STEPS))
    assert found["heard"] <= 1000
    if found["code"] == 0:
        run_here(run_options(case, tmp_path, "alone", steps=STEPS))
        weights = [(tmp_path / out / "model.safetensors").read_bytes() for out in ("out", "alone")]
        assert weights[0] == weights[1]
    else:
        assert "\nfxpipe.errors." in found["err"], found

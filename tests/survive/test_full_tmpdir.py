"""TMPDIR has no room, from the start or from the middle of a run: the run trains and saves as with room."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commands import QUICK, fxpipe
from model_files import write_model

SCRIPT = Path(__file__).parents[1] / "support" / "full_disk.py"
ALONE = ["unshare", "--user", "--map-root-user", "--mount"]


def may_mount(folder: str) -> bool:
    """Whether this process may have a disk of its own."""
    mounts = [*ALONE, "mount", "-t", "tmpfs", "tmpfs", folder]
    return bool(shutil.which("unshare")) and subprocess.run(mounts, capture_output=True).returncode == 0


pytestmark = [
    pytest.mark.slow,
    pytest.mark.multiproc,
    pytest.mark.skipif(not may_mount("/mnt"), reason="this system lets no process mount a small disk for itself"),
]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("full")
    compiled = fxpipe("compile", write_model(folder), "-n", 2, "--dp", 2, "-o", folder / "build", *QUICK)
    assert compiled.code == 0, compiled
    return folder / "build"


@pytest.mark.parametrize("moment", ["start", "training"])
def test_a_run_needs_room_in_its_output_folder_alone(moment: str, build: Path, tmp_path: Path) -> None:
    run = ["run", build, "--steps", 60, "--threads", 1, "--checkpoint-every", 5, "--stall-timeout", 5]
    assert fxpipe(*run, "--local", "--out", tmp_path / "alone").code == 0
    (tmp_path / "tmp").mkdir()
    place = [SCRIPT, moment, tmp_path / "tmp", tmp_path / "out"]
    command = [*ALONE, sys.executable, *place, sys.executable, "-m", "fxpipe", *run, "--out", tmp_path / "out"]
    found = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=200)
    assert found.returncode == 0, found.stderr
    assert "Traceback" not in found.stderr
    assert "still" not in found.stderr, found.stderr
    weights = [(tmp_path / out / "model.safetensors").read_bytes() for out in ("out", "alone")]
    assert weights[0] == weights[1]
    saved = [sorted(path.name for path in (tmp_path / out / "checkpoints").iterdir()) for out in ("out", "alone")]
    assert saved[0] == saved[1]
    assert not list((tmp_path / "out").glob(".fxpipe_run*"))

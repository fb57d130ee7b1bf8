"""TMPDIR has no room: a run does not begin, or waits until there is room and then trains and saves as with room."""

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


RUN = ["--steps", 60, "--threads", 1, "--checkpoint-every", 5]


def run_with_full(moment: str, build: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "tmp").mkdir()
    place = [SCRIPT, moment, folder / "tmp", folder / "out"]
    run = [sys.executable, "-m", "fxpipe", "run", build, *RUN, "--out", folder / "out"]
    command = [str(part) for part in (*ALONE, sys.executable, *place, *run)]
    return subprocess.run(command, capture_output=True, text=True, timeout=200)


def test_a_run_does_not_begin_without_room(build: Path, tmp_path: Path) -> None:
    result = run_with_full("start", build, tmp_path)
    assert result.returncode == 1, result.stderr
    assert f"{tmp_path / 'tmp'} cannot be written: No space left on device" in result.stderr
    assert "free 80 KiB, or set TMPDIR to a folder with room" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_run_waits_until_there_is_room(build: Path, tmp_path: Path) -> None:
    assert fxpipe("run", build, *RUN, "--local", "--out", tmp_path / "alone").code == 0
    result = run_with_full("training", build, tmp_path)
    assert result.returncode == 0, result.stderr
    assert "is full: the run waits until there is space" in result.stderr
    assert "Traceback" not in result.stderr
    weights = [(tmp_path / out / "model.safetensors").read_bytes() for out in ("out", "alone")]
    assert weights[0] == weights[1]
    saved = [sorted(path.name for path in (tmp_path / out / "checkpoints").iterdir()) for out in ("out", "alone")]
    assert saved[0] == saved[1]

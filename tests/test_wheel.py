"""The wheel holds the whole package, and its command line starts without torch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import click
import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # a copy: building leaves its traces in the source
    tracked = ("fxpipe", "passes", "cli", "docs/errors", "pyproject.toml", "README.md", "LICENSE")
    for name in tracked:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            source.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    return next(folder.glob("*.whl"))


def test_every_module_is_in_the_wheel(wheel: Path) -> None:
    packed = set(zipfile.ZipFile(wheel).namelist())
    for folder, package in (("fxpipe", "fxpipe"), ("passes", "fxpipe/passes"), ("cli", "fxpipe/cli")):
        for file in (ROOT / folder).rglob("*.py"):
            assert f"{package}/{file.relative_to(ROOT / folder).as_posix()}" in packed
    assert "fxpipe/py.typed" in packed
    for page in (ROOT / "docs" / "errors").glob("*.md"):
        assert f"fxpipe/pages/{page.name}" in packed


def test_help_works_in_a_bare_environment(wheel: Path, tmp_path: Path) -> None:
    """Only the wheel and click are there: no torch to import."""
    zipfile.ZipFile(wheel).extractall(tmp_path)
    shutil.copytree(Path(click.__file__).parent, tmp_path / "click")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    environment["PYTHONPATH"] = str(tmp_path)
    for arguments in (["--help"], ["compile", "--help"], ["run", "--help"], ["explain", "item"], ["--version"]):
        command = [sys.executable, "-S", "-m", "fxpipe", *arguments]
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "fxpipe" in done.stdout
    refused = subprocess.run(
        [sys.executable, "-S", "-c", "import torch"], env=environment, cwd=tmp_path, capture_output=True
    )
    assert refused.returncode != 0, "the environment is not bare"

"""docs/start/model-file.md: its file trains, and a misspelt function is reported as the page shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from commands import QUICK, fxpipe

PAGE = (Path(__file__).parents[2] / "docs" / "start" / "model-file.md").read_text(encoding="utf-8")


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The model file of the page; the test runs in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    (found,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    return str(found)


@pytest.mark.slow
def test_the_file_trains(file: str) -> None:
    Path("model.py").write_text(file)
    compiles, runs = re.findall(r"^    fxpipe (.*)$", PAGE, re.M)
    made = fxpipe(*compiles.split(), *QUICK)
    assert made.code == 0, made.err
    losses = fxpipe(*runs.split(), "--local", "--json").json["losses"]
    assert losses[-1] < losses[0] / 1.5


def test_a_misspelt_function_is_an_error(file: str) -> None:
    Path("bad.py").write_text(file.replace("def model()", "def modle()"))
    result = fxpipe("compile", "bad.py", "-n", "2", "-o", "build")
    assert result.code == 1
    (shown,) = re.findall(r"(?:^    .*(?:bad\.py|modle).*\n)+", PAGE, re.M)
    assert result.err == "".join(line[4:] + "\n" for line in shown.splitlines())

"""docs/start/model-file.md: its file trains and is evaluated; a misspelt function is reported as the page shows."""

from __future__ import annotations

import json
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


@pytest.mark.slow
def test_the_hooks_of_evaluations_evaluate_it(file: str) -> None:
    """docs/how-to/evaluate.md: a mean, F1 and metrics of training, and the commands."""
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "evaluate.md").read_text(encoding="utf-8")
    means, of_all, trained = re.findall(r"```python\n(.*?)```", page, re.S)
    held_out = "\nheld_out = torch.utils.data.TensorDataset(images, labels)\n"
    trains, keeps_best = re.findall(r"^    fxpipe (run .*)$", page, re.M)
    f1 = means.split("\n\n\n")[0] + "\n\n" + of_all
    for hooks, name, command in ((means, "accuracy", keeps_best), (f1, "f1", trains)):
        Path("model.py").write_text("\n".join((file, held_out, hooks, trained)))
        made = fxpipe("compile", "model.py", "-n", "2", "-o", "build", *QUICK)
        assert made.code == 0, made.err
        run = fxpipe(*command.split(), "--local", "--json")
        assert run.json["evaluation"][name] > 0.7
        assert Path("out/best.safetensors").is_file() == (command == keeps_best)
    lines = [json.loads(line) for line in Path("out/metrics.jsonl").read_text().splitlines()]
    assert all("accuracy" in line["metrics"] for line in lines if "loss" in line)

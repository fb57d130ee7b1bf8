"""docs/start/port.md: every model file in it compiles and trains, by the options that its section gives."""

from __future__ import annotations

import ast
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
from commands import QUICK, fxpipe
from families.entry import define_torchvision_ops

PAGE = (Path(__file__).parents[2] / "docs" / "start" / "port.md").read_text(encoding="utf-8")
NEEDS = {"Lightning": ("lightning",), "Hugging Face Trainer": ("transformers", "accelerate")}
SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.S | re.M))
del SECTIONS["Compare with your script"]  # which is for all of them
del SECTIONS["TRL"]  # whose file is examples/dpo.py, and `tests/test_examples.py` runs it


def file(section: str, name: str) -> str:
    (found,) = re.findall(rf"```python\n(# {name}\n.*?)```", SECTIONS[section], re.S)
    return str(found)


def commands(section: str, command: str) -> list[str]:
    (found,) = re.findall(rf"^    fxpipe {command} (.*)$", SECTIONS[section], re.M)
    return shlex.split(found)


@pytest.mark.parametrize("section", SECTIONS)
def test_a_section_has_a_script_a_file_and_what_changes(section: str) -> None:
    ast.parse(file(section, "train.py"))
    ast.parse(file(section, "model.py"))
    assert "| now |" in SECTIONS[section]
    assert f"- [{section}](#" in PAGE


@pytest.mark.slow
@pytest.mark.parametrize("section", SECTIONS)
def test_the_model_file_trains(section: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in NEEDS.get(section, ()):
        pytest.importorskip(package, reason=f"{package} is not installed; `make venv` installs it")
    define_torchvision_ops()
    for name in ("train.py", "model.py"):
        (tmp_path / name).write_text(file(section, name))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "train", raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))  # to which the folder of a model file is added
    made = fxpipe("compile", *commands(section, "compile"), *QUICK)
    assert made.code == 0, made.err
    run = fxpipe("run", *commands(section, "run"), "--local", "--json")
    assert run.json["losses"][-1] < run.json["losses"][0]
    if section == "Hugging Face Trainer":
        (line,) = re.findall(r"python -m (fxpipe\.\S+) (.*)", SECTIONS[section])
        monkeypatch.delitem(sys.modules, line[0], raising=False)
        monkeypatch.setattr(sys, "argv", [line[0], *shlex.split(line[1])])
        runpy.run_module(line[0], run_name="__main__")
        assert (tmp_path / "trained" / "model.safetensors").is_file()
        assert 0 <= run.json["evaluation"]["f1"] <= 1


def test_the_plain_script_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(file("A plain script", "train.py"), "train.py", "exec"), {})
    assert len(capsys.readouterr().out.splitlines()) == 3

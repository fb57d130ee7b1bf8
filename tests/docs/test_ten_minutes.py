"""docs/start/tutorial.md: its commands work in their order, and do what the page shows."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from commands import QUICK, fxpipe

PAGE = (Path(__file__).parents[2] / "docs" / "start" / "tutorial.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^    fxpipe (\w+) (.*)$", PAGE, re.M)
RUN = ("--local", "--threads", "1")
CUT = ("--fp-cut", "blocks.2")  # what the planner chose for the page: elsewhere, other times may lead to another cut


def shown(title: str) -> str:
    """What the page shows under a heading, printed or written."""
    section = PAGE.split(f"## {title}\n")[1].split("\n## ")[0]
    return section.split("```")[1]


def parts(text: str, beginning: str) -> list[str]:
    """What is between the `…` and the spaces of the lines that begin so."""
    lines = [line for line in text.splitlines() if line.startswith(beginning)]
    assert lines
    return [part for line in lines for part in re.split(r"…|  +", line) if part]


def losses(out: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_the_commands_do_what_the_page_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (model,) = re.findall(r"```python\n(import torch\n.*?)```", PAGE, re.S)
    (tmp_path / "model.py").write_text(model)
    monkeypatch.chdir(tmp_path)
    printed = {}
    for name, arguments in COMMANDS:
        more = {"compile": QUICK if "--fp-cut" in arguments else (*QUICK, *CUT), "run": RUN}
        result = fxpipe(name, *shlex.split(arguments), *more.get(name, ()))
        assert result.code == 0, (name, arguments, result.err)
        printed[f"{name} {arguments}"] = result.out + result.err
    assert [name for name, _ in COMMANDS] == ["compile", "run", "inspect", "compile", "diff", "run", "compare", "run"]

    stage = (tmp_path / "build" / "stage_0.py").read_text()
    code = [line for line in shown("Read a stage").splitlines()[1:] if line.strip() not in ("", "…")]
    assert len(code) == 4
    assert all(line in stage for line in code)
    for part in [*parts(shown("See what runs where"), "F0 → F1"), *parts(shown("See what runs where"), "B1 → B0")]:
        assert part in printed["inspect build"]
    for part in [*parts(shown("Move a cut"), "F0 → "), *parts(shown("Move a cut"), "update 1 → F0")]:
        assert part in printed["diff build by-hand"]
    assert "going on after step 100, from out/checkpoints/step-100" in printed[" ".join(COMMANDS[-1])]

    assert fxpipe("run", "build", "--epochs", 2, "--out", "whole", *RUN).code == 0
    assert losses(tmp_path / "out") == losses(tmp_path / "whole")
    (waited,) = re.findall(r"mean of last 20 +\S+ +(\S+)", shown("Wait for each update"))
    for out, first, mean in (
        ("out", *re.findall(r"loss (\S+) → (\S+)", shown("Stop and resume"))[0]),
        ("out-1f1b", "2.4873", waited),
    ):
        found = losses(tmp_path / out)
        assert found[0] == pytest.approx(float(first), rel=1e-3)
        assert sum(found[-20:]) / 20 == pytest.approx(float(mean), rel=1e-2)

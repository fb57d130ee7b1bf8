"""docs/reference/methods.md: its commands work, and what it says of policies and schedules is what fxpipe has."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest
from commands import QUICK, fxpipe

from fxpipe.cli.main import cli
from fxpipe.policy import POLICIES, make
from fxpipe.policy.repair import REPAIRS
from fxpipe.schedule import SCHEDULES
from fxpipe.schedule import make as make_schedule

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "methods.md").read_text(encoding="utf-8")
(FIRST,) = re.findall(r"^    fxpipe (.*)$", PAGE, re.M)
COMMANDS = list(dict.fromkeys(re.findall(r"`fxpipe ([^`]*)`", PAGE)))
MODEL = """\
import torch
from torch import nn
from torch.nn import functional as F

def model():
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(8)))

def loss(model, batch):
    return F.mse_loss(model(batch), batch)

def train_data():
    return list(torch.randn(4, 16, 16))

def optimizer(named):
    return torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9)
"""
STEPS = ("--steps", "4", "--local", "--threads", "1")


def prepared(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    (folder / "examples").mkdir()
    for name in ("model.py", "examples/soap.py"):
        (folder / name).write_text(MODEL)


def parsed(words: Sequence[str]) -> dict[str, object]:
    """The options of a command line, as the command itself reads them."""
    command = cli.commands[words[0]]
    return command.make_context(words[0], list(words[1:]), resilient_parsing=False).params


@pytest.mark.parametrize("line", [FIRST, *COMMANDS])
def test_a_command_is_one(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared(tmp_path, monkeypatch)
    (tmp_path / "build").mkdir()
    asked = parsed(shlex.split(line))
    if "run " in line:
        schedule = str(asked["schedule"] or "async")
        make(str(asked["policy"] or "latest")).check(make_schedule(schedule, 4, 4))


def test_every_policy_schedule_and_repair_is_there() -> None:
    words = set(re.findall(r"`\+?([^`\s]+)`", PAGE))
    assert {*POLICIES, *SCHEDULES, *REPAIRS} - words == set()


@pytest.mark.slow
def test_the_commands_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared(tmp_path, monkeypatch)
    for line in (FIRST, *COMMANDS):
        words = shlex.split(line)
        more = STEPS if words[0] == "run" else (*QUICK, *(() if "-o" in words else ("-o", "own")))
        done = fxpipe(*words, *more)
        assert done.code == 0, (line, done.err)
        if "own" in more:
            done = fxpipe("run", "own", *STEPS)
            assert done.code == 0, (line, done.err)

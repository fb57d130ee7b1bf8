"""Hyperparameters of a model file: `fxpipe.setting`, its own command line, and what a run may change of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import QUICK, Result, fxpipe, fxpipe_process
from safetensors.torch import load_file

import fxpipe as fxp
from fxpipe import settings
from fxpipe.checkpoint.manifest import Manifest
from fxpipe.errors import CheckpointError, TaskError
from fxpipe.plan.build_folder import read_plan

MODEL = """
import torch
from torch import nn
import fxpipe
{arguments}
WIDTH = {width}


def model():
    return nn.Sequential(nn.Linear(8, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 4))


def loss(model, batch):
    x, y = batch
    return nn.functional.cross_entropy(model(x), y)


def train_data():
    x = torch.randn(20, 8, 8, generator=torch.Generator().manual_seed(0))
    return list(zip(x, (x.sum(-1) > 0).long()))


def optimizer(named_parameters):
    return torch.optim.SGD([p for _, p in named_parameters], lr={rate}, momentum=0.9)
"""
SETTINGS = MODEL.format(arguments="", width="fxpipe.setting('width', 16)", rate="fxpipe.setting('lr', 0.1)")
PARSER = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=16)
parser.add_argument("--lr", type=float, default=0.1)
args = parser.parse_args()
"""
ARGUMENTS = MODEL.format(arguments=PARSER, width="args.width", rate="args.lr")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["pytest"])
    yield tmp_path
    settings.use({})


def compiled(text: str, *more: object) -> Result:
    Path("model.py").write_text(text)
    return fxpipe("compile", "model.py", *QUICK, "-o", "build", *more)


def run(*more: object, out: str = "out") -> Result:
    return fxpipe("run", "build", "--local", "--steps", 4, "--out", out, "--json", *more)


def losses(result: Result) -> list[float]:
    found: list[float] = result.json["losses"]
    return found


def edit(old: str, new: str) -> None:
    text = Path("model.py").read_text()
    assert old in text
    Path("model.py").write_text(text.replace(old, new))


def test_a_setting_has_the_type_of_its_default() -> None:
    settings.use({"rate": "1e-2", "steps": "3", "name": "adam", "on": "false"})
    found = (fxp.setting("rate", 1.0), fxp.setting("steps", 1), fxp.setting("name", "sgd"), fxp.setting("on", True))
    assert found == (0.01, 3, "adam", False)
    assert [type(value) for value in found] == [float, int, str, bool]
    assert fxp.setting("other", 0.5) == 0.5
    assert settings.read() == {"rate": 0.01, "steps": 3, "name": "adam", "on": False, "other": 0.5}
    with pytest.raises(TaskError, match="two defaults"):
        fxp.setting("rate", 2.0)


@pytest.mark.parametrize(("default", "text"), [(0.1, "x"), (1, "1.5"), (True, "maybe"), (0.1, "nan"), (1, "")])
def test_a_value_of_another_type(default: Any, text: str) -> None:
    settings.use({"a": text})
    with pytest.raises(TaskError, match=f"--set a={text}: this is not "):
        fxp.setting("a", default)


def test_a_run_changes_what_capture_did_not_read() -> None:
    assert compiled(SETTINGS).code == 0
    usual, other = losses(run()), losses(run("--set", "lr=0.5", out="other"))
    assert usual[0] == other[0]
    assert usual[-1] != other[-1]
    found = json.loads(Path("other/run.json").read_text())
    assert found["settings"] == {"width": 16, "lr": 0.5}
    compared = fxpipe("compare", "out", "other", "--json").json["settings"]
    assert compared["setting lr"] == [0.1, 0.5]
    assert compiled(SETTINGS, "--set", "lr=0.5").code == 0
    assert losses(run(out="compiled")) == other, "the build keeps what its compile was given"
    assert fxpipe("inspect", "build").out.splitlines()[4] == "settings lr 0.5, width 16 (captured)"
    assert "--set lr=0.5" in Path("build/stage_0.py").read_text()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("lrr=1", "the model file reads no setting 'lrr', did you mean 'lr'?"),
        ("lr", "--set lr: this is not NAME=VALUE"),
        ("lr=fast", "--set lr=fast: this is not a number, as its default 0.1 is"),
        ("width=32", "setting 'width' was 16 when model.py: WIDTH was captured"),
    ],
)
def test_what_a_run_refuses(given: str, says: str) -> None:
    assert compiled(SETTINGS).code == 0
    refused = run("--set", given)
    assert refused.code in (1, 2)
    assert says in refused.err
    assert not Path("out").exists()


def test_what_a_compile_refuses() -> None:
    assert "reads no setting 'widht', did you mean 'width'?" in compiled(SETTINGS, "--set", "widht=3").err
    assert "this is not a whole number" in compiled(SETTINGS, "--set", "width=3.5").err
    assert not Path("build").exists()
    assert fxpipe("plan", "model.py", "--set", "lrr=3", *QUICK).code == 1


def test_a_captured_setting_may_be_said_again() -> None:
    assert compiled(SETTINGS, "--set", "width=32").code == 0
    assert {p.tensor.shape for p in read_plan("build").parameters} >= {(32, 8)}
    assert run("--set", "width=32").code == 0
    assert run("--set", "width=16", out="other").code == 1


def test_arguments() -> None:
    assert compiled(ARGUMENTS, "--", "--width", 32).code == 0
    usual = run()
    assert json.loads(Path("out/run.json").read_text())["arguments"] == ["--width", "32"]
    other = run("--", "--lr", "0.5", "--width", 32, out="other")
    assert losses(usual)[0] == losses(other)[0]
    assert losses(usual)[-1] != losses(other)[-1]
    refused = run("--", "--lr", "0.5", out="refused")
    assert "args.width was 32 when the model was captured, but is 16 now" in refused.err
    wrong = run("--", "--lrr", "0.5", out="refused")
    assert "it ended with exit code 2 while it was imported" in wrong.err
    assert "its own arguments come last, after two dashes" in wrong.err
    assert "unexpected extra argument" in fxpipe("run", "build", "more").err


def test_an_edit_of_what_capture_did_not_read() -> None:
    assert compiled(SETTINGS).code == 0
    usual = losses(run())
    edit("momentum=0.9", "momentum=0.55")  # of another size: a module of the same second would be the cached one
    found = run(out="other")
    assert losses(found)[-1] != usual[-1]
    assert found.err.count("model.py changed since the compile, but nothing that capture read") == 1
    edit("nn.ReLU()", "nn.GELU()")
    stale = run(out="stale")
    assert "the build is stale: since it was compiled, model.py: model changed" in stale.err
    assert "--set" not in fxpipe("inspect", "build").err


def test_an_optimizer_that_cannot_be_divided_is_refused_when_it_is_new() -> None:
    assert compiled(SETTINGS).code == 0
    norm = "torch.nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g['params']], 0.1)"
    clips = (
        f"class Clips(torch.optim.SGD):\n    def step(self, closure=None):\n        {norm}\n        super().step()\n"
    )
    edit("def optimizer", f"{clips}\n\ndef optimizer")
    edit("torch.optim.SGD([", "Clips([")
    refused = run()
    assert refused.code == 1
    assert "Clips" in refused.err
    assert run("--accept-optimizer-per-worker", out="accepted").code == 0


def test_a_run_that_goes_on_with_other_settings_says_so() -> None:
    assert compiled(SETTINGS).code == 0
    saving = ("--checkpoint-every", 2)
    assert run("--set", "lr=0.5", *saving).code == 0
    whole = fxpipe("run", "build", "--local", "--steps", 6, "--set", "lr=0.5", "--out", "whole", "--json", *saving)
    same = fxpipe("run", "build", "--local", "--steps", 6, "--out", "out", "--json", "--resume", *saving)
    assert losses(same)[-2:] == losses(whole)[-2:]
    assert json.loads(Path("out/run.json").read_text())["settings"]["lr"] == 0.5
    assert "not 0.5" not in same.err
    other = fxpipe("run", "build", "--local", "--steps", 8, "--out", "out", "--resume", "--set", "lr=0.1", *saving)
    assert other.code == 0
    assert "going on after step 6, from out/checkpoints/step-6, with lr 0.1, not 0.5; " in other.err


@pytest.mark.parametrize("odd", [{"settings": 5}, {"settings": [5]}, {"arguments": "a"}, {"values": ["lr"]}])
def test_a_checkpoint_with_odd_settings_is_refused(odd: dict[str, Any]) -> None:
    run = {"schedule": "async", "policy": "latest", "settings": ["lr=0.5"], "arguments": None, "values": {"lr": 0.5}}
    Manifest(4, 0, 2, "", run, {}, {})
    with pytest.raises(CheckpointError, match=f"run has (malformed )?{next(iter(odd))}"):
        Manifest(4, 0, 2, "", run | odd, {}, {})


@pytest.mark.multiproc
@pytest.mark.slow
def test_workers_have_the_settings() -> None:
    assert compiled(SETTINGS).code == 0
    found = fxpipe_process("run", "build", "--steps", 4, "--set", "lr=0.5", "--threads", 1, "--out", "real", "--json")
    assert losses(found) == losses(run("--set", "lr=0.5"))
    ours, theirs = load_file("out/model.safetensors"), load_file("real/model.safetensors")
    assert all(ours[name].equal(theirs[name]) for name in ours)
    assert compiled(ARGUMENTS).code == 0
    found = fxpipe_process("run", "build", "--steps", 4, "--threads", 1, "--out", "args", "--json", "--", "--lr", "0.5")
    assert losses(found) == losses(run("--", "--lr", "0.5", out="again"))

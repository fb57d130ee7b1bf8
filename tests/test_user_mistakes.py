"""Mistakes that a first user made: none may lose data, train nothing in silence, or end in a traceback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from commands import QUICK, fxpipe
from safetensors.torch import load_file
from small_models import CASES

import fxpipe as api
from fxpipe.errors import CaptureError, TaskError

MODEL = """
import torch
from torch import nn

RATE = 0.1

def model():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))

def loss(model, batch):
    x, y = batch
    return nn.functional.cross_entropy(model(x), y)

def train_data():
    g = torch.Generator().manual_seed(0)
    return [(torch.randn(6, 4, generator=g), torch.randint(0, 3, (6,), generator=g)) for _ in range(4)]

def optimizer(named):
    return torch.optim.SGD([p for _, p in named], lr=RATE)
"""
SGD = "torch.optim.SGD([p for _, p in named], lr=RATE)"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    return path


def test_a_new_build_never_deletes_what_is_not_its_own(model: Path, tmp_path: Path) -> None:
    build = tmp_path / "build"
    assert fxpipe("compile", model, "-o", build, *QUICK).code == 0
    (build / "model.safetensors").write_text("precious")
    result = fxpipe("compile", model, "-o", build, *QUICK)
    assert result.code == 1
    assert "it holds model.safetensors as well" in result.err
    assert (build / "model.safetensors").read_text() == "precious"


def test_a_batch_that_eager_would_refuse_is_explained(model: Path, tmp_path: Path) -> None:
    model.write_text(MODEL.replace("torch.randint(0, 3", "torch.randint(7, 9"))
    result = fxpipe("compile", model, "-o", tmp_path / "build", "--threads", "1")
    assert result.code == 1
    assert "eager PyTorch itself fails on this step, in loss(model, batch): IndexError: Target 7" in result.err
    assert "model.py:12" in result.err
    assert "Traceback" not in result.err


def test_an_optimizer_over_other_parameters_is_refused() -> None:
    case = CASES["function"]
    other = case.make()
    build = api.compile(case.make(), case.loss, case.batches(1)[0], cost="analytic")
    with pytest.raises(TaskError, match="parameters that it was not given"):
        build.local(optimizer=lambda named: torch.optim.SGD(other.parameters(), lr=0.1))


def test_a_scheduler_that_fails_is_named(model: Path, tmp_path: Path) -> None:
    model.write_text(
        MODEL + "\ndef lr_scheduler(opt):\n    return torch.optim.lr_scheduler.OneCycleLR(opt, 1.0, total_steps=2)\n"
    )
    assert fxpipe("compile", model, "-o", tmp_path / "build", *QUICK).code == 0
    result = fxpipe("run", tmp_path / "build", "--local", "--steps", "4", "--out", tmp_path / "out")
    assert result.code == 1
    assert "OneCycleLR.step()" in result.err
    model.write_text(MODEL + "\ndef lr_scheduler(opt):\n    return 0.1\n")
    result = fxpipe("compile", model, "-o", tmp_path / "build", *QUICK)
    assert result.code == 1
    assert "lr_scheduler() returned float, which has no step()" in result.err


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda m, b: m(b["lable"]).sum(), "the step raised KeyError: 'lable'"),
        (lambda m: m.sum(), "the step raised TypeError"),
        (lambda m, b: m(b["x"]).sum().backward(), "the step calls backward() itself"),
    ],
)
def test_a_mistake_in_the_step_is_the_users(step: object, message: str) -> None:
    with pytest.raises(CaptureError) as caught:
        api.capture(torch.nn.Linear(2, 2), step, {"x": torch.ones(3, 2)})  # type: ignore[arg-type]
    assert message in str(caught.value)


def test_only_one_of_the_evaluation_hooks_is_a_warning(model: Path, tmp_path: Path) -> None:
    model.write_text(MODEL + "\ndef eval_data():\n    return train_data()\n")
    result = fxpipe("compile", model, "-o", tmp_path / "build", *QUICK)
    assert result.code == 0
    assert "only one of eval_data() and metrics()" in result.err


CLIPPING = """
class Clipping(torch.optim.SGD):
    def step(self, closure=None):
        torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1.0)
        super().step(closure)

def optimizer(named):
    return Clipping([p for _, p in named], lr=RATE)
"""


def test_an_optimizer_that_looks_at_all_parameters_is_refused(model: Path, tmp_path: Path) -> None:
    model.write_text(MODEL.split("def optimizer")[0] + CLIPPING)
    build = tmp_path / "build"
    result = fxpipe("compile", model, "-o", build, *QUICK)
    assert result.code == 1
    assert "Clipping behaves differently when each worker has its own" in result.err
    assert "use --clip-norm" in result.err
    assert not build.exists()
    assert fxpipe("compile", model, "-n", "1", "-o", build, *QUICK).code == 0
    result = fxpipe("compile", model, "-o", build, *QUICK, "--accept-optimizer-per-worker")
    assert result.code == 0
    assert "warning: Clipping behaves differently" in result.err
    assert "this was accepted" in result.err
    assert fxpipe("run", build, "--local", "--steps", "2", "--out", tmp_path / "out").code == 0


def test_an_optimizer_that_needs_a_closure_is_refused(model: Path, tmp_path: Path) -> None:
    model.write_text(MODEL.replace(SGD, "torch.optim.LBFGS(dict(named).values())"))
    result = fxpipe("compile", model, "-o", tmp_path / "build", *QUICK)
    assert result.code == 1
    assert "LBFGS.step() needs a closure" in result.err
    assert "torch.optim.AdamW" in result.err


@pytest.mark.parametrize("chosen", ["'4.' in n", "'0.' in n"])
def test_an_optimizer_may_choose_no_parameter_of_a_worker(model: Path, tmp_path: Path, chosen: str) -> None:
    model.write_text(MODEL.replace("[p for _, p in named]", f"[p for n, p in named if {chosen}]"))
    assert fxpipe("compile", model, "-o", tmp_path / "build", "--threads", "1").code == 0  # times the stages, too
    out = tmp_path / "out"
    result = fxpipe("run", tmp_path / "build", "--local", "--steps", "3", "--out", out)
    assert result.code == 0
    before, after = load_file(tmp_path / "build" / "weights.safetensors"), load_file(out / "model.safetensors")
    moved = {name for name in before if not before[name].equal(after[name])}
    assert moved == {name for name in before if name.startswith(chosen[1:3])}
    rows = [json.loads(line) for line in (out / "metrics.jsonl").open()]
    assert ["lr" in row for row in rows] == [chosen == "'0.' in n"] * 3


def test_an_optimizer_that_chooses_nothing_at_all_is_refused(model: Path, tmp_path: Path) -> None:
    model.write_text(MODEL.replace("[p for _, p in named]", "[p for n, p in named if 'lora' in n]"))
    result = fxpipe("compile", model, "-o", tmp_path / "build", *QUICK)
    assert result.code == 1
    assert "optimizer() chooses none of the model's parameters" in result.err


def test_a_rate_that_the_optimizer_finds_itself(model: Path, tmp_path: Path) -> None:
    adafactor = "Adafactor([p for _, p in named], lr=None, relative_step=True, warmup_init=True)"
    pytest.importorskip("transformers")
    model.write_text("from transformers import Adafactor\n" + MODEL.replace(SGD, adafactor))
    assert fxpipe("compile", model, "-o", tmp_path / "build", "--threads", "1").code == 0
    result = fxpipe("run", tmp_path / "build", "--local", "--steps", "3", "--out", tmp_path / "out")
    assert result.code == 0
    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").open()]
    assert ["lr" in row for row in rows] == [False] * 3

"""Mistakes that a first user made: none may lose data, train nothing in silence, or end in a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from commands import QUICK, fxpipe
from small_models import CASES

import fxpipe as api
from fxpipe.errors import CaptureError, TaskError
from fxpipe.task.batch import default_microbatches

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
    assert "the step fails on the first batch: IndexError" in result.err
    assert "if loss(model, batch) fails in eager PyTorch too, look at the batch" in result.err
    assert "model.py:12" in result.err
    assert "Traceback" not in result.err


def test_another_model_file_is_stale(model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.py"
    other.write_text(MODEL.replace("RATE = 0.1", "RATE = 5.0"))
    assert fxpipe("compile", model, "-o", tmp_path / "build", *QUICK).code == 0
    result = fxpipe("run", tmp_path / "build", "--local", "--steps", "2", "--model", other, "--out", tmp_path / "out")
    assert result.code == 1
    assert "the build is stale" in result.err


def test_a_run_removes_the_weights_of_the_run_before(model: Path, tmp_path: Path) -> None:
    assert fxpipe("compile", model, "-o", tmp_path / "build", *QUICK).code == 0
    out = tmp_path / "out"
    out.mkdir()
    (out / "model.safetensors").write_text("old")
    (tmp_path / "build" / "stage_1.py").write_text(
        (tmp_path / "build" / "stage_1.py").read_text().replace("aten.t.default(", "aten.nothing.default(", 1)
    )
    assert fxpipe("run", tmp_path / "build", "--local", "--steps", "2", "--out", out).code == 1
    assert not (out / "model.safetensors").exists()


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
    assert fxpipe("compile", model, "-o", tmp_path / "build", *QUICK).code == 0
    result = fxpipe("run", tmp_path / "build", "--local", "--steps", "4", "--out", tmp_path / "out")
    assert "lr_scheduler() returned float, which has no step()" in result.err


def test_a_loss_that_is_not_finite_is_a_warning(model: Path, tmp_path: Path) -> None:
    model.write_text(MODEL.replace("model(x), y)", "model(x) * float('inf'), y)"))
    assert fxpipe("compile", model, "-o", tmp_path / "build", *QUICK).code == 0
    result = fxpipe("run", tmp_path / "build", "--local", "--steps", "2", "--out", tmp_path / "out")
    assert result.code == 0
    assert "the loss is not finite from step 1 on" in result.err


def test_workers_of_a_build_cannot_be_chosen_again(model: Path, tmp_path: Path) -> None:
    assert fxpipe("compile", model, "-o", tmp_path / "build", *QUICK).code == 0
    result = fxpipe("run", tmp_path / "build", "-n", "3", "--out", tmp_path / "out")
    assert result.code == 2
    assert "-n goes with a model file" in result.err


def test_default_microbatches_divide_the_batch() -> None:
    assert default_microbatches(torch.zeros(32, 2), 3) == 4
    assert default_microbatches(torch.zeros(6, 2), 3) == 3
    assert default_microbatches(torch.zeros(2, 2), 3) == 2


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

"""What is done every epoch: a scheduler's steps, evaluations and checkpoints, as a user asks for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import QUICK, fxpipe
from model_files import write_model

import fxpipe as api
from fxpipe.errors import FxpipeError, TaskError

HOOKS = """

def train_data():
    torch.manual_seed(7)
    {data}


def optimizer(named_parameters):
    return torch.optim.SGD([p for _, p in named_parameters], lr=0.5, momentum=0.9)


def lr_scheduler(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5), "epoch"


def eval_data():
    return [{{"x": torch.ones(4, 6), "y": torch.zeros(4, dtype=torch.int64)}}]


def metrics(model, batch):
    return {{"loss": loss(model, batch)}}
"""
EPOCH = 6
LIST = 'return [{"x": torch.randn(4, 6), "y": torch.randint(0, 3, (4,))} for _ in range(6)]'
GENERATED = 'yield from [{"x": torch.randn(4, 6), "y": torch.randint(0, 3, (4,))} for _ in range(6)]'


def built(folder: Path, data: str, *options: Any) -> Path:
    model = write_model(folder, ("0.1, self.training", "0.0, self.training"))
    model.write_text(model.read_text() + HOOKS.format(data=data))
    result = fxpipe("compile", model, "-o", folder / "build", *QUICK, *options)
    assert result.code == 0, result.err
    return model


def rates(out: Path) -> list[float]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [row["lr"] for row in rows if "lr" in row]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("epochs")
    built(folder, LIST)
    return folder


def epochs(out: Path) -> list[int]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [row["epoch"] for row in rows if "loss" in row]


BY_EPOCH = [0.5 * 0.5 ** (step // EPOCH) for step in range(3 * EPOCH)]


def test_a_resumed_run_counts_the_epochs_of_the_first(folder: Path, tmp_path: Path) -> None:
    four = ("run", folder / "build", "--local", "--steps-per-epoch", 4)
    assert fxpipe(*four, "--steps", 14, "--out", tmp_path / "whole").code == 0
    assert fxpipe(*four, "--steps", 6, "--checkpoint-every", 3, "--out", tmp_path / "part").code == 0
    more = fxpipe("run", folder / "build", "--local", "--steps", 14, "--out", tmp_path / "part", "--resume")
    assert more.code == 0, more.err
    assert rates(tmp_path / "part") == rates(tmp_path / "whole") == [0.5 * 0.5 ** (step // 4) for step in range(14)]
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "part")]
    assert files[0] == files[1]


def test_a_scheduler_whose_state_cannot_be_written_goes_on(tmp_path: Path) -> None:
    model = built(tmp_path, LIST)
    assert model.read_text().count("StepLR(optimizer, step_size=1, gamma=0.5)") == 1
    unwritable = "LambdaLR(optimizer, Halved())"
    halved = "\n\nclass Halved:\n    def __init__(self):\n        self.file = open(__file__)\n\n"
    halved += "    def __call__(self, epoch):\n        return 0.5**epoch\n"
    model.write_text(model.read_text().replace("StepLR(optimizer, step_size=1, gamma=0.5)", unwritable) + halved)
    assert fxpipe("compile", model, "-o", tmp_path / "build", *QUICK).code == 0
    run = ("run", tmp_path / "build", "--local", "--out", tmp_path / "out")
    assert fxpipe(*run, "--steps", 8, "--checkpoint-every", 8).code == 0
    more = fxpipe(*run, "--steps", 14, "--resume")
    assert more.code == 0, more.err
    assert rates(tmp_path / "out") == BY_EPOCH[:14]


def test_epochs_of_a_given_length(folder: Path, tmp_path: Path) -> None:
    run = ("run", folder / "build", "--local", "--epochs", 3, "--steps-per-epoch", 4, "--out", tmp_path / "out")
    assert fxpipe(*run, "--json").json["steps"] == 12
    assert epochs(tmp_path / "out") == [step // 4 + 1 for step in range(12)]


def test_data_without_a_length_are_counted(tmp_path: Path) -> None:
    built(tmp_path, GENERATED)
    run = ("run", tmp_path / "build", "--steps", 3 * EPOCH, "--eval-every", "epoch", "--json", "--out")
    for out, local in (("one", ("--local",)), ("several", ())):
        result = fxpipe(*run, tmp_path / out, *local)
        assert [row["step"] for row in result.json["evaluations"]] == [6, 12, 18]
        assert rates(tmp_path / out) == BY_EPOCH
    result = fxpipe(*run, tmp_path / "four", "--steps-per-epoch", 4, "--local")
    assert [row["step"] for row in result.json["evaluations"]] == [4, 8, 12, 16, 18]
    assert rates(tmp_path / "four") == [0.5 * 0.5 ** (step // 4) for step in range(3 * EPOCH)]


def test_epochs_that_differ_are_told(tmp_path: Path) -> None:
    shrinking = "globals().update(left=globals().get('left', 8) - 1); " + LIST.replace("range(6)", "range(left)")
    built(tmp_path, shrinking)
    result = fxpipe("run", tmp_path / "build", "--steps", 14, "--local", "--out", tmp_path / "out")
    assert result.code == 0, result.err
    assert "train_data() gave 6 batches this epoch, not 7: what runs every epoch" in " ".join(result.err.split())


def test_a_scheduler_for_epochs_that_goes_with_steps_is_warned_of(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = write_model(tmp_path)
    hooks = HOOKS.format(data=LIST.replace("range(6)", "range(40)")).replace(', "epoch"', "")
    model.write_text(model.read_text() + hooks)
    assert fxpipe("compile", model, "-o", tmp_path / "build", *QUICK).code == 0
    for local in (["--local"], []):
        said = fxpipe("run", tmp_path / "build", *local, "--out", tmp_path / "out").err
        said = " ".join((said + capfd.readouterr().err).split())
        assert "learning rate falls from 0.5 to 0.000488 in the first 10 updates" in said
        assert 'return scheduler, "epoch"' in said


def test_a_scheduler_over_several_epochs_is_not_warned_of(tmp_path: Path) -> None:
    model = write_model(tmp_path)
    scheduler = "CosineAnnealingLR(optimizer, 72)"
    hooks = HOOKS.format(data=LIST).replace("StepLR(optimizer, step_size=1, gamma=0.5)", scheduler)
    model.write_text(model.read_text() + hooks.replace(', "epoch"', ""))
    assert fxpipe("compile", model, "-o", tmp_path / "build", *QUICK).code == 0
    result = fxpipe("run", tmp_path / "build", "--local", "--epochs", 30, "--out", tmp_path / "out")
    assert result.code == 0, result.err
    assert "lr_scheduler()" not in result.err


def test_options_in_python_are_checked(folder: Path) -> None:
    build = api.load(folder / "build")
    with pytest.raises(FxpipeError, match="steps_per_epoch=0 is not a whole number of at least 1"):
        build.local(steps_per_epoch=0)
    with pytest.raises(TaskError, match="length of an epoch is unknown"):
        build.local(lr_scheduler=lambda o: (torch.optim.lr_scheduler.StepLR(o, 1), "epoch"))


def test_what_is_no_number_of_steps(folder: Path) -> None:
    result = fxpipe("run", folder / "build", "--eval-every", "epochs")
    assert result.code != 0
    assert "'epochs' is not a number of steps" in result.err
    result = fxpipe("run", folder / "build", "--eval-every", "0")
    assert result.code != 0
    result = fxpipe("run", folder / "build", "--checkpoint-every", "epochs")
    assert "or epoch" in result.err

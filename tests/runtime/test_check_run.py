"""What a run checked is what it reads: a build that is replaced in between is refused, never mixed."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from commands import QUICK, fxpipe
from model_files import write_model

from fxpipe.errors import BuildError
from fxpipe.files import Snapshot
from fxpipe.precision import precision_flags, precision_text
from fxpipe.runtime.options import RunOptions
from fxpipe.runtime.process.check_run import check_run, check_unchanged, files_read
from fxpipe.runtime.process.start import run_local
from fxpipe.task.hooks import Hooks
from fxpipe.task.model_file import Task


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("checked")
    write_model(made)
    assert fxpipe("compile", made / "model.py", "-o", made / "build", "--fp-cut", "blocks.2", *QUICK).code == 0
    return made


def test_another_plan_than_the_launcher_checked(folder: Path) -> None:
    options = RunOptions(str(folder / "build"))
    plan, _ = check_run(options)
    assert check_run(dataclasses.replace(options, plan_digest=plan.digest)) == (plan, None)
    with pytest.raises(BuildError, match="replaced after the run had checked it") as caught:
        check_run(dataclasses.replace(options, plan_digest="0" * 64))
    assert caught.value.where
    assert caught.value.hint


def test_a_build_replaced_while_it_is_read(folder: Path, tmp_path: Path) -> None:
    """Compiled with another seed while the workers are being opened: the same names and shapes."""
    build = tmp_path / "build"
    model = write_model(tmp_path)
    compiled = ("compile", model, "-o", build, "--fp-cut", "blocks.2", *QUICK)
    assert fxpipe(*compiled).code == 0
    made = []

    def optimizer(named: list[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
        if not made:
            made.append(fxpipe(*compiled, "--seed", 5).code)
        return torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9)

    data = [torch.zeros(1)]
    options = RunOptions(str(build), steps=1, out=str(tmp_path / "out"))
    with pytest.raises(BuildError, match="changed while the run read the build") as caught:
        run_local(options, Task(Hooks(optimizer=optimizer, train_data=lambda: data)))
    assert made == [0]
    assert caught.value.hint
    assert not (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize("damage", ["written", "replaced", "removed"])
def test_every_change_of_a_file_is_seen(tmp_path: Path, damage: str) -> None:
    file = tmp_path / "plan.json"
    file.write_text("{}")
    os.utime(file, ns=(0, 0))
    files = files_read(RunOptions(str(tmp_path)))
    check_unchanged(files)
    if damage == "written":
        file.write_text("[]")
    elif damage == "replaced":
        (tmp_path / "other").write_text("{}")
        os.utime(tmp_path / "other", ns=(0, 0))
        (tmp_path / "other").replace(file)
    else:
        file.unlink()
    assert files.changed() == [file]
    with pytest.raises(BuildError, match=r"plan\.json changed while"):
        check_unchanged(files)
    assert Snapshot.of([file]).changed() == []


def test_a_run_with_another_precision_than_the_compile_says_so(folder: Path, set_flag: Callable[..., None]) -> None:
    run = ("run", folder / "build", "--local", "--steps", 1, "--out", folder / "out")
    assert "precision" not in fxpipe(*run).err
    set_flag(torch.backends.mkldnn.matmul, "fp32_precision", "bf16")
    said = "compiled with torch's defaults, and this run has torch.backends.mkldnn.matmul.fp32_precision = bf16"
    assert said in fxpipe(*run).err


def test_the_flags_of_each_device(monkeypatch: pytest.MonkeyPatch, set_flag: Callable[..., None]) -> None:
    for name in ("NVIDIA_TF32_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    assert precision_flags("cpu") == precision_flags("cuda") == {}
    set_flag(torch.backends.cuda.matmul, "fp32_precision", "tf32")
    set_flag(torch.backends.cudnn.conv, "fp32_precision", "ieee")  # by operator: older names fail now
    set_flag(torch.backends.cuda.matmul, "allow_fp16_accumulation", True)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    monkeypatch.setattr(torch.backends.cudnn, "enabled", False)
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    assert precision_flags("cuda") == {
        "NVIDIA_TF32_OVERRIDE": "0",
        "backends.cuda.matmul.fp32_precision": "tf32",
        "backends.cuda.matmul.allow_fp16_accumulation": "True",
        "backends.cudnn.enabled": "False",
        "backends.cudnn.conv.fp32_precision": "ieee",
        "backends.cudnn.benchmark": "True",
    }
    assert "NVIDIA_TF32_OVERRIDE=0, torch.backends.cuda" in precision_text(precision_flags("cuda"))
    assert precision_flags("cpu") == {}
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert precision_flags("cpu") == {"are_deterministic_algorithms_enabled": "True"}

"""The examples compile, agree with eager PyTorch and learn; those that are scripts end in their report."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import fxpipe
from families.entry import define_torchvision_ops

from fxpipe.builds.build import load

NEEDS = {
    "dpo.py": ("trl", "peft"),
    "diffusion_lora.py": ("diffusers", "peft"),
    "lightning_adapter.py": ("lightning", "torchmetrics"),
    "qlora.py": ("bitsandbytes", "peft"),
    "trainer_adapter.py": ("transformers", "accelerate"),
}
EXAMPLES = Path(__file__).parents[1] / "examples"


def compiled(name: str, folder: Path, *options: str) -> dict[str, Any]:
    return fxpipe("compile", EXAMPLES / name, "-o", folder, "--verify", "--json", *options).json["verify"]


@pytest.mark.slow
@pytest.mark.multiproc
def test_digits_reaches_its_accuracy(tmp_path: Path) -> None:
    verified = compiled("digits.py", tmp_path / "build", "-n", "2", "--cost", "analytic")
    assert max(verified["gradients"].values()) < 1e-5
    assert max(verified["buffers"].values()) < 1e-5
    summary = fxpipe("run", tmp_path / "build", "--epochs", "4", "--out", tmp_path / "out", "--json").json
    assert summary["evaluation"]["accuracy"] > 0.95


@pytest.mark.slow
def test_gpt_compiles_for_four_workers_with_distinct_cuts(tmp_path: Path) -> None:
    pins = [f"--fp-cut=blocks.{i}" for i in (2, 4, 6)] + [f"--bp-cut=blocks.{i}" for i in (1, 4, 7)]
    verified = compiled("gpt.py", tmp_path / "build", "-n", "4", "--cost", "analytic", *pins)
    assert verified["loss"] < 1e-6
    assert max(verified["gradients"].values()) < 1e-5


@pytest.mark.slow
@pytest.mark.multiproc
def test_an_unmodified_llama_trains_on_four_workers(tmp_path: Path) -> None:
    """Its samples are padded, and the loss is the mean over the whole minibatch's bytes."""
    pytest.importorskip("transformers")
    define_torchvision_ops()
    synchronous = ("--schedule", "1f1b", "--microbatches", "4")
    verified = compiled("hf_llama.py", tmp_path / "build", "-n", "4", "--cost", "analytic", *synchronous)
    assert (tmp_path / "build" / "totals.py").is_file()
    assert verified["loss"] < 1e-6
    assert max(verified["gradients"].values()) < 1e-5
    summary = fxpipe("run", tmp_path / "build", "--steps", "20", "--out", tmp_path / "out", "--json").json
    assert summary["evaluation"]["loss"] < 5.0  # a uniform guess of 256 bytes has 5.55


@pytest.mark.slow
@pytest.mark.multiproc
def test_gpt_learns_the_standard_library(tmp_path: Path) -> None:
    compiled("gpt.py", tmp_path / "build", "-n", "2")
    summary = fxpipe("run", tmp_path / "build", "--steps", "1500", "--out", tmp_path / "out", "--json").json
    assert summary["evaluation"]["loss"] < 2.0


@pytest.mark.slow
@pytest.mark.multiproc
def test_attention_residuals_learn_on_four_workers(tmp_path: Path) -> None:
    verified = compiled("attention_residuals.py", tmp_path / "build", "-n", "4", "--cost", "analytic")
    assert verified["loss"] < 1e-6
    assert max(verified["gradients"].values()) < 1e-5
    assert "add:1" in fxpipe("inspect", tmp_path / "build", "--edges").out, (
        "the embedding's edge to the first of its readers"
    )
    summary = fxpipe("run", tmp_path / "build", "--steps", "300", "--out", tmp_path / "out", "--json").json
    assert summary["evaluation"]["loss"] < 2.6  # 5.55 for a uniform guess, 3.2 for the bytes' frequencies


@pytest.mark.slow
@pytest.mark.multiproc
def test_unet_finds_the_discs(tmp_path: Path) -> None:
    verified = compiled("unet.py", tmp_path / "build", "-n", "2", "--cost", "analytic")
    assert max(verified["gradients"].values()) < 1e-5
    summary = fxpipe("run", tmp_path / "build", "--steps", "60", "--out", tmp_path / "out", "--json").json
    assert summary["evaluation"]["accuracy"] > 0.9


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("name", "cuts", "waits", "steps", "metric", "least"),
    [
        ("two_towers.py", ["--workers=4"], "0 → 1 → 3, 2 → 3", 100, "found", 0.7),  # 0.03 by chance
        (
            "vision_language.py",
            ["--workers=3", *(f"--{phase}-cut={at}" for phase in ("fp", "bp") for at in ("language", "joint"))],
            "0 → 2, 1 → 2",
            300,
            "right",
            0.9,  # 0.25 by chance
        ),
    ],
    ids=["two_towers", "vision_language"],
)
def test_branches_run_side_by_side_and_learn(
    name: str, cuts: list[str], waits: str, steps: int, metric: str, least: float, tmp_path: Path
) -> None:
    verified = compiled(name, tmp_path / "build", *cuts, "--cost", "analytic")
    assert max(verified["gradients"].values()) < 1e-5
    assert f"side by side: workers {waits}" in fxpipe("inspect", tmp_path / "build").out
    summary = fxpipe("run", tmp_path / "build", "--steps", steps, "--out", tmp_path / "out", "--json").json
    assert summary["evaluation"][metric] > least


@pytest.mark.slow
@pytest.mark.multiproc
def test_nanogpt_learns_by_its_recipe(tmp_path: Path) -> None:
    compiled("nanogpt.py", tmp_path / "build", "-n", "2")
    run = ("run", tmp_path / "build", "--steps", "100", "--eval-every", "50", "--json")
    evaluations = fxpipe(*run, "--out", tmp_path / "out").json["evaluations"]
    assert [e["step"] for e in evaluations] == [50, 100]
    assert evaluations[1]["metrics"]["loss"] < min(3.0, evaluations[0]["metrics"]["loss"])


@pytest.mark.slow
@pytest.mark.multiproc
def test_lora_learns_on_pairs_of_lines(tmp_path: Path) -> None:
    for package in ("transformers", "peft"):
        pytest.importorskip(package, reason=f"{package} is not installed; `make venv` installs it")
    define_torchvision_ops()
    verified = compiled("glue_lora.py", tmp_path / "build", "-n", "2", "--cost", "analytic")
    assert max(verified["gradients"].values()) < 1e-5
    assert all("lora" in n or "classifier" in n or "embeddings" in n for n in verified["gradients"])
    run = ("run", tmp_path / "build", "--epochs", "2", "--eval-every", "epoch", "--json")
    evaluations = fxpipe(*run, "--out", tmp_path / "out").json["evaluations"]
    assert len(evaluations) == 2
    assert evaluations[-1]["metrics"]["accuracy"] > 0.85


@pytest.mark.slow
@pytest.mark.multiproc
def test_a_base_in_4_bits_is_planned_and_trained_without_loading_it(tmp_path: Path) -> None:
    for package in NEEDS["qlora.py"]:
        pytest.importorskip(package, reason=f"{package} is not installed; `make venv` installs it")
    small = [f"--set={name}" for name in ("layers=2", "width=256", "rows=2", "tokens=32")]
    cards = ("-n", "2", "--meta", "--device-spec", "rtx-4090,rtx-3060", "--links", "pcie4x8")
    plan = fxpipe("plan", EXAMPLES / "llama8b_qlora.py", *cards, *small, "--json").json
    assert plan["ideal_ms"] > 0
    fxpipe("compile", EXAMPLES / "llama8b_qlora.py", *cards, *small, "-o", tmp_path / "build")
    assert "packed as Params4bit nf4: " in fxpipe("inspect", tmp_path / "build").out
    summary = fxpipe("run", tmp_path / "build", "--steps", "8", "--out", tmp_path / "out", "--json").json
    assert summary["losses"][-1] < summary["losses"][0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("own_policy.py", ("worker 2: ", "means of 1 seeds", "halfway+down")),
        ("own_codec.py", ("means of 1 seeds", "gradient=signs")),
        ("own_schedule.py", ("worker 3: ", "eager-1f1b")),
        ("serve_onnx.py", ("from the model's own",)),
        (
            "lightning_adapter.py",
            ("the last one of 16 rows", "Lightning after step 78", "best weights: f1 0.8023 of step"),
        ),
        ("dpo.py", ("as PeftModel.from_pretrained loads the adapter",)),
        ("diffusion_lora.py", ("with the adapters that diffusers has loaded",)),
        ("diffusion_lora.py unet", ("with the adapters that diffusers has loaded",)),
        ("qlora.py", ("as PeftModel.from_pretrained loads them",)),
        ("trainer_adapter.py", ("the last one of 16 rows", "early end: Trainer after step", "best weights: f1 ")),
    ],
)
def test_a_script_ends_in_its_report(name: str, said: tuple[str, ...], tmp_path: Path) -> None:
    name, *options = name.split()
    for package in NEEDS.get(name, ()):
        pytest.importorskip(package, reason=f"{package} is not installed; `make venv` installs it")
    options += ["--quick"] if name.startswith("own_") else []  # the other one takes seconds as it is
    command = [sys.executable, EXAMPLES / name, *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    for text in said:
        assert text in done.stdout


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.parametrize("started", [[], ["-m", "torch.distributed.run", "--nproc-per-node", "2"]])
def test_fit_trains_a_model_in_one_call(started: list[str], tmp_path: Path) -> None:
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, *started, str(EXAMPLES / "fit.py")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (accuracy,) = re.findall(r"accuracy (0\.\d+)", done.stdout)
    assert float(accuracy) > 0.9


@pytest.mark.slow
@pytest.mark.multiproc
def test_a_residual_lstm_learns_with_one_operator_a_layer(tmp_path: Path) -> None:
    verified = compiled("residual_lstm.py", tmp_path / "build", "-n", "2", "--cost", "analytic")
    assert verified["loss"] == max(verified["gradients"].values()) == 0  # eager's kernels
    table = load(tmp_path / "build").nodes
    assert table is not None
    assert sum(row.phase == "F" and "recurrent_layer" in row.op for row in table.rows) == 6
    summary = fxpipe("run", tmp_path / "build", "--steps", "50", "--out", tmp_path / "out", "--json").json
    assert summary["evaluation"]["loss"] < 3.0


@pytest.mark.slow
@pytest.mark.multiproc
def test_forces_in_the_loss_are_learned(tmp_path: Path) -> None:
    """Its backward has second derivatives."""
    verified = compiled("forces.py", tmp_path / "build", "-n", "2", "--cost", "analytic")
    assert verified["loss"] == max(verified["gradients"].values()) == 0
    run = ("run", tmp_path / "build", "--steps", "300", "--json", "--out", tmp_path / "out")
    losses = fxpipe(*run).json["losses"]
    assert sum(losses[-20:]) < 0.2 * sum(losses[:20])

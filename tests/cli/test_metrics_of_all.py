"""`metrics_of_all`: numbers of what `metrics` has returned for all batches of an evaluation, against eager PyTorch."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import QUICK, fxpipe
from model_files import write_model
from safetensors.torch import load_file

HOOKS = """

def train_data():
    torch.manual_seed(7)
    return [{"x": torch.randn(12, 6), "y": torch.randint(0, 3, (12,))} for _ in range(6)]


def eval_data():
    torch.manual_seed(8)
    return [{"x": torch.randn(size, 6), "y": torch.randint(0, 3, (size,))} for size in (4, 4, 4, 1)]


def metrics(model, batch):
    logits = model(batch["x"])
    return {"loss": loss(model, batch), "logits": logits, "y": batch["y"]}


def metrics_of_all(gathered):
    found, labels = torch.cat(gathered["logits"]).argmax(-1), torch.cat(gathered["y"])
    assert labels.dtype == torch.int64 and len(labels) == 13
    right = [float(((found == k) & (labels == k)).sum()) for k in range(3)]
    counts = [float((found == k).sum() + (labels == k).sum()) for k in range(3)]
    f1 = sum(2 * r / max(c, 1.0) for r, c in zip(right, counts)) / 3
    return {"f1": f1, "spread": torch.cat(gathered["logits"]).std()}
"""


def written(folder: Path, *edits: tuple[str, str]) -> Path:
    model = write_model(folder)
    text = model.read_text() + HOOKS
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    model.write_text(text)
    return model


def compiled(model: Path) -> Path:
    made = fxpipe("compile", model, "-n", 2, "-o", model.parent / "build", *QUICK)
    assert made.code == 0, made.err
    return model.parent / "build"


def by_eager(model: Path, weights: Path) -> dict[str, float]:
    hooks: dict[str, Any] = runpy.run_path(str(model))
    made = hooks["model"]()
    made.load_state_dict(load_file(weights))
    made.eval()
    with torch.no_grad():
        rows = [hooks["metrics"](made, batch) for batch in hooks["eval_data"]()]
    found = hooks["metrics_of_all"]({name: [row[name] for row in rows] for name in ("logits", "y")})
    loss = sum(len(row["y"]) * float(row["loss"]) for row in rows) / 13
    return {"loss": loss, **{name: float(value) for name, value in found.items()}}


def test_a_run_evaluates_as_eager_does(tmp_path: Path) -> None:
    """So do processes and replicas (tests/law, evaluation=often)."""
    model = written(tmp_path)
    made = fxpipe(
        "run", compiled(model), "--local", "--eval-every", 2, "--save-best", "f1", "--out", tmp_path / "out", "--json"
    )
    assert made.code == 0, made.err
    assert made.json["evaluation"] == pytest.approx(by_eager(model, tmp_path / "out" / "model.safetensors"), abs=1e-6)
    best = by_eager(model, tmp_path / "out" / "best.safetensors")
    assert made.json["best"]["value"] == pytest.approx(best["f1"])
    assert len(made.json["evaluations"]) == 3


def test_one_process_evaluates_alike_where_the_pipeline_does_not(tmp_path: Path) -> None:
    model = written(
        tmp_path, ("    logits = model(batch", "    assert float(batch['y'].sum()) >= 0\n    logits = model(batch")
    )
    build = compiled(model)
    made = fxpipe("run", build, "--local", "--out", tmp_path / "out", "--json")
    assert made.json["evaluation"] == pytest.approx(by_eager(model, tmp_path / "out" / "model.safetensors"), abs=1e-6)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('{"f1": ', 'gathered["none"] or {"f1": ', "metrics_of_all() raised KeyError: 'none'"),
        ('return {"f1": ', 'return 3 or {"f1": ', "metrics_of_all() returned int, not a dictionary of numbers"),
        ('"spread": ', '"spread": "much" or ', "metrics_of_all() returned 'spread' as a str, not as a number"),
        ('"f1": ', '"f2": ', "the evaluation gave no 'f1'"),
    ],
)
def test_mistakes_are_said_by_the_first_evaluation(old: str, new: str, said: str, tmp_path: Path) -> None:
    run = ("run", compiled(written(tmp_path, (old, new))), "--local", "--eval-every", 2, "--save-best", "f1")
    made = fxpipe(*run, "--out", tmp_path / "out")
    assert made.code != 0
    assert said in " ".join(made.err.split())


def test_without_it_metrics_are_numbers(tmp_path: Path) -> None:
    made = fxpipe("compile", written(tmp_path, ("def metrics_of_all", "def other")), "-o", tmp_path / "build", *QUICK)
    assert "'logits' as a tensor of shape [4, 3]" in made.err
    assert "metrics_of_all() takes an evaluation's tensors" in " ".join(made.err.split())

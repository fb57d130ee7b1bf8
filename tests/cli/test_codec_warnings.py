"""What compile and run say of codecs, from the accuracy study: a warning once, or a note at compile alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import QUICK, fxpipe

MODEL = """
import torch
from torch import nn


def model():
    return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 4))


def loss(model, batch):
    return nn.functional.mse_loss(model(batch), batch[:, :4])


def train_data():
    return [torch.randn(16, 8, generator=torch.Generator().manual_seed(i)) for i in range(4)]
"""
CUT = ("-n", "2", "--fp-cut", "2", *QUICK)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    return path


def said(model: Path, codec: str) -> tuple[str, str]:
    """What compile and a run of its build say on stderr."""
    folder = model.parent
    compiled = fxpipe("compile", model, "-o", folder / "build", "--codec", codec, *CUT)
    assert compiled.code == 0, compiled.err
    ran = fxpipe("run", folder / "build", "--steps", 2, "--local", "--threads", 1, "--out", folder / "out")
    assert ran.code == 0, ran.err
    return compiled.err, ran.err


def test_a_codec_that_lost_much_is_warned_of_once_by_each(model: Path) -> None:
    for err in said(model, "int4"):
        assert err.count("warning: codec int4 lost ") == 1
        assert "not studied" not in err


def test_a_codec_that_was_not_studied_is_noted_by_compile(model: Path) -> None:
    compiled, ran = said(model, "gradient=topk:0.01")
    assert "was not studied (benchmarks/accuracy): topk:0.01 for gradient" in compiled
    for err in (compiled, ran):
        assert "warning: codec" not in err
    assert "not studied" not in ran

"""`fxpipe doctor` says what is here and whether it works."""

from __future__ import annotations

import pytest
import torch
from commands import fxpipe

import fxpipe as package
from fxpipe.engines import ENGINES
from fxpipe.engines.onnxruntime import OrtEngine
from fxpipe.lowering import compare_with_eager as agreement
from fxpipe.tracing.torch_versions import standing

KEYS = ["fxpipe", "python", "torch", "torch-tested", "safetensors", "devices", "transports", "engines", "self-test"]


def test_a_sound_installation() -> None:
    said = fxpipe("doctor", "--json").json
    assert list(said) == KEYS
    assert (said["fxpipe"], said["torch"], said["self-test"]) == (package.__version__, torch.__version__, "passed")
    assert said["torch-tested"] == standing(torch.__version__)
    assert "local" in said["transports"]
    assert said["devices"][0].startswith("cpu (")
    assert [line.split()[0] for line in said["engines"]] == list(ENGINES)
    text = fxpipe("doctor").out
    assert [line.split()[0] for line in text.splitlines() if not line.startswith(" ")] == KEYS


def test_an_installation_that_computes_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = agreement.Agreement(0.5, {}, {})
    monkeypatch.setattr(agreement, "compare_with_eager", lambda *_: wrong)
    result = fxpipe("doctor")
    assert result.code == 1
    assert "failed: the stages differ from eager PyTorch by 5.0e-01" in result.out


def test_an_engine_that_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OrtEngine, "missing", lambda self, device: "onnxruntime is not installed")
    assert "onnxruntime (not for cpu: onnxruntime is not installed)" in fxpipe("doctor").out

"""`fxpipe doctor` says what is here and whether it works."""

from __future__ import annotations

import pytest
import torch
from commands import fxpipe

import fxpipe as package
from fxpipe import agreement

KEYS = ["fxpipe", "python", "torch", "safetensors", "devices", "transports", "self-test"]


def test_a_sound_installation() -> None:
    said = fxpipe("doctor", "--json").json
    assert list(said) == KEYS
    assert (said["fxpipe"], said["torch"], said["self-test"]) == (package.__version__, torch.__version__, "passed")
    assert "local" in said["transports"]
    assert said["devices"][0].startswith("cpu (")
    text = fxpipe("doctor").out
    assert [line.split()[0] for line in text.splitlines()] == KEYS


def test_an_installation_that_computes_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = agreement.Agreement(0.5, {}, {})
    monkeypatch.setattr(agreement, "compare_with_eager", lambda *_: wrong)
    result = fxpipe("doctor")
    assert result.code == 1
    assert "failed: the stages differ from eager PyTorch by 5.0e-01" in result.out

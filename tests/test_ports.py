"""One port of examples/ports trains as its script does; `make ports` compares them all."""

from __future__ import annotations

from pathlib import Path

import pytest
from compared import Script, built, run_itself, trained


def test_a_port_trains_as_its_script_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mnist.EPOCHS", 2)
    losses, measured = run_itself("mnist")
    script = Script("mnist", ("--epochs", "2"))
    compiled = built(script, tmp_path, "1f1b")
    assert compiled.code == 0, compiled.err
    ours, evaluation = trained(script, tmp_path)
    assert ours == pytest.approx(losses, rel=script.tolerance)
    assert evaluation == pytest.approx(measured, rel=script.tolerance)

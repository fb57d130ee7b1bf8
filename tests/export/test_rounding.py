"""The whole pipeline may be off as far as rounding moves the stages themselves, and no further."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from cached import CASES, cuts, lowered

pytest.importorskip("onnx", reason="needs onnx")
pytest.importorskip("onnxscript", reason="needs onnxscript")
pytest.importorskip("onnxruntime", reason="needs onnxruntime")

from fxpipe.backend.compare import Difference
from fxpipe.build import Build
from fxpipe.errors import ExportError
from fxpipe.export import stages
from fxpipe.export.stages import export

CASE = CASES["function"]
BATCH = CASE.batches(1)[0]


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Build:
    """Its pipeline seems to be off."""
    check = stages.check_file

    def wrong(path: Path, *arguments: object) -> list[Difference]:
        found = check(path, *arguments)  # type: ignore[arg-type]
        if path.stem != "pipeline":
            return found
        return [dataclasses.replace(d, error=2e-3) if d.output == "grad:layers.0.weight" else d for d in found]

    monkeypatch.setattr(stages, "check_file", wrong)
    return lowered("function", workers=2, **cuts(CASE, 2, 0))


def test_a_pipeline_that_is_off_for_no_reason_is_refused(build: Build, tmp_path: Path) -> None:
    with pytest.raises(
        ExportError, match=r"pipeline\.onnx does not compute .* grad:layers\.0\.weight is off by 2\.0e-03"
    ):
        export(build, tmp_path / "onnx", BATCH)
    assert not (tmp_path / "onnx").exists()


def test_one_whose_stages_move_as_far_by_rounding_is_written(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "_rounded", lambda weight: weight * 1.01)
    told: list[str] = []
    found = export(build, tmp_path / "onnx", BATCH, warn=told.append)
    assert found[-1].error == 2e-3
    assert told == [
        "pipeline.onnx is off by 2.0e-03 on this batch, and so are the stages themselves: "
        "a rounding error in each weight moves grad:layers.0.weight as far"
    ]

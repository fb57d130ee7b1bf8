"""The whole pipeline may be off as far as rounding moves the stages themselves, and no further."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import needs_onnx  # noqa: F401
import pytest
from cached import CASES, cuts, lowered
from torch import Tensor

from fxpipe.builds.build import Build
from fxpipe.errors import ExportError
from fxpipe.export import checked_files, stages
from fxpipe.export.stages import export

CASE = CASES["function"]
BATCH = CASE.batches(1)[0]


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Build:
    """Its pipeline seems to be off."""
    run = checked_files.run_file

    def wrong(path: Path, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        values = run(path, inputs)
        if path.stem == "pipeline":
            values["grad:layers.0.weight"] *= 1.002
        return values

    monkeypatch.setattr(checked_files, "run_file", wrong)
    return lowered("function", workers=2, **cuts(CASE, 2, 0))


@pytest.mark.slow
def test_a_pipeline_that_is_off_for_no_reason_is_refused(build: Build, tmp_path: Path) -> None:
    with pytest.raises(
        ExportError, match=r"pipeline\.onnx does not compute .* grad:layers\.0\.weight is off by 2\.0e-03"
    ):
        export(build, tmp_path / "onnx", BATCH)
    assert not (tmp_path / "onnx").exists()


@pytest.mark.slow
def test_one_whose_stages_move_as_far_by_rounding_is_written(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "_rounded", lambda weight: weight * 1.01)
    told: list[str] = []
    found = export(build, tmp_path / "onnx", BATCH, warn=told.append)
    assert found[-1].error == pytest.approx(2e-3, rel=1e-2)
    assert told == [
        "pipeline.onnx is off by 2.0e-03 on this batch, like the stages themselves: "
        "a rounding error in each weight moves grad:layers.0.weight as much"
    ]

"""Checkpoints that earlier versions have written are gone on from for ever; `golden/make.py` has made them."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fxpipe.checkpoint import manifest
from fxpipe.errors import CheckpointError
from fxpipe.plan.signed import signed

GOLDEN = Path(__file__).parent / "golden"
KEPT = sorted(path for path in GOLDEN.glob("checkpoint-*-build-*") if path.is_dir())
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
"""Processors differ in how they add up."""

_found = importlib.util.spec_from_file_location("golden_checkpoint", GOLDEN / "make.py")
assert _found is not None
assert _found.loader is not None
make = importlib.util.module_from_spec(_found)
_found.loader.exec_module(make)


def batches(folder: Path) -> list[Any]:
    parts = load_file(folder / "batches.safetensors")
    return [(parts[f"{step}.0"], parts[f"{step}.1"]) for step in range(make.STEPS)]


def test_there_is_one_of_these_formats() -> None:
    assert GOLDEN / make.name() in KEPT, (
        "the format of checkpoints or of builds is another one. Run tests/checkpoint/golden/make.py, and keep, of each "
        "format of checkpoints, the folders of the oldest and of the newest builds. If it is that of checkpoints, "
        "read_manifest must go on reading all earlier formats: runs of weeks are in them"
    )


@pytest.mark.parametrize("folder", KEPT, ids=lambda path: path.name)
def test_goes_on_under_other_cuts(folder: Path) -> None:
    """Builds of earlier formats are refused, so that this is how their runs go on: compiled again."""
    build = make.compiled(3, batches(folder)[0])
    hooks = {"optimizer": make.optimizer, "lr_scheduler": make.scheduler}
    pipeline = build.local(**hooks, schedule="1f1b", resume=folder / f"step-{make.SAVED}")
    assert pipeline.fed == make.SAVED
    losses = pipeline.run(batches(folder)[make.SAVED :])
    torch.testing.assert_close(losses, json.loads((folder / "synchronous.json").read_text()), **CLOSE)
    torch.testing.assert_close(make.end_of(pipeline), load_file(folder / "synchronous.safetensors"), **CLOSE)


def test_a_format_of_later_is_refused(tmp_path: Path) -> None:
    shutil.copytree(KEPT[-1] / f"step-{make.SAVED}", tmp_path, dirs_exist_ok=True)
    body = json.loads((tmp_path / manifest.MANIFEST).read_text())
    del body["digest"]
    body["format"] = manifest.FORMAT + 1
    (tmp_path / manifest.MANIFEST).write_text(signed(body))
    with pytest.raises(CheckpointError, match=f"has format {manifest.FORMAT + 1}, this fxpipe reads") as refused:
        manifest.read_manifest(tmp_path)
    assert "resume with the fxpipe that wrote it" in str(refused.value)

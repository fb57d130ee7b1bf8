"""What is looked at: from a folder, without weights, model or stages being loaded; or from memory."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from cached import lowered
from commands import QUICK, fxpipe, unchanged
from model_files import write_model

from fxpipe.errors import BuildError
from fxpipe.inspection.facts import facts
from fxpipe.inspection.subject import read_subject, subject_of


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A build of a model file, in the working directory."""
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path)
    assert fxpipe("compile", "model.py", *QUICK, "--fp-cut", "blocks.2", "--bp-cut", "blocks.1").code == 0
    return Path("build")


def test_neither_weights_nor_model_nor_stages_are_loaded(build: Path) -> None:
    before = set(sys.modules)
    (build / "weights.safetensors").unlink()
    (build / "stage_0.py").write_text("raise SystemExit(1)")
    Path("model.py").write_text("raise SystemExit(1)")
    with unchanged(build):
        found = facts(read_subject(build))
    assert found["build"]["edited"] == ["stage_0.py"]
    assert found["build"]["stale"] == ["model.py: top level is new"]
    assert [w["edited"] for w in found["workers"]] == [True, False]
    assert not {name for name in set(sys.modules) - before if "stage" in name and name.startswith("fxpipe_")}


def test_a_model_that_is_gone(build: Path) -> None:
    Path("model.py").unlink()
    assert read_subject(build).stale == ("model.py is gone",)


def test_folder_and_memory_give_the_same_facts(tmp_path: Path) -> None:
    made = lowered("gpt", microbatches=2, workers=2)
    saved = made.save(tmp_path / "build")
    here, there = facts(subject_of(saved)), facts(read_subject(tmp_path / "build"))
    assert there["build"].pop("folder") == str(tmp_path / "build")
    assert here["build"].pop("folder") is None
    assert here == there


@pytest.mark.parametrize(
    ("remove", "message"),
    [
        ("plan.json", "is not an fxpipe build"),
        ("stage_1.py", "stage_1.py cannot be read"),
        ("costs.json", "the build lacks costs.json, which inspecting it needs"),
        ("nodes.json", "the build lacks nodes.json, which inspecting it needs"),
        ("profile.json", "the build lacks profile.json, which inspecting it needs"),
    ],
)
def test_what_is_no_whole_build(build: Path, remove: str, message: str) -> None:
    (build / remove).unlink()
    with pytest.raises(BuildError, match=message):
        read_subject(build)


def test_measured_and_computed(build: Path) -> None:
    assert not read_subject(build).measured
    (build / "node_costs.json").write_text("{}")
    assert read_subject(build).measured

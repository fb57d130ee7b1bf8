"""A checkpoint is read by any name, from one file or many, and refused with everything that is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from cached import lowered
from safetensors.torch import save_file
from torch import Tensor

from fxpipe.builds.build import Build
from fxpipe.checkpoint.starting_weights import INDEX, SINGLE, Checkpoint
from fxpipe.errors import BuildError


@pytest.fixture
def build() -> Build:
    """A GPT: `head.weight` is `tok.weight`."""
    return lowered("gpt", workers=2)


@pytest.fixture
def values(build: Build) -> dict[str, Tensor]:
    """Random values for all its parameters."""
    return {name: torch.randn_like(value) for name, value in build.tensors.items()}


def _equal(build: Build, path: Path, values: dict[str, Tensor]) -> bool:
    state = build.local(weights=path).state_dict()
    return all(torch.equal(state[name], value) for name, value in values.items())


def test_a_file_a_folder_and_shards(build: Build, values: dict[str, Tensor], tmp_path: Path) -> None:
    save_file(values, tmp_path / "any.safetensors")
    assert _equal(build, tmp_path / "any.safetensors", values)
    (tmp_path / "folder").mkdir()
    save_file(values, tmp_path / "folder" / SINGLE)
    assert _equal(build, tmp_path / "folder", values)
    shards = tmp_path / "shards"
    shards.mkdir()
    places = {name: f"model-{i % 3}.safetensors" for i, name in enumerate(values)}
    for file in set(places.values()):
        save_file({name: values[name] for name in values if places[name] == file}, shards / file)
    (shards / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    assert _equal(build, shards, values)
    (shards / "model-1.safetensors").unlink()
    with pytest.raises(BuildError, match=r"incomplete: model-1.safetensors missing"):
        Checkpoint.open(shards, build.plan)
    for outside in ("../any.safetensors", str(tmp_path / "any.safetensors")):
        (shards / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(values, outside)}))
        with pytest.raises(BuildError, match=r"names a file outside of its folder"):
            Checkpoint.open(shards, build.plan)


def test_any_name_of_a_tied_parameter_will_do(build: Build, values: dict[str, Tensor], tmp_path: Path) -> None:
    values["head.weight"] = values.pop("tok.weight")
    save_file(values, tmp_path / "tied.safetensors")
    assert _equal(build, tmp_path / "tied.safetensors", values)


def test_dtypes_are_converted_and_strangers_left_out(
    build: Build, values: dict[str, Tensor], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values["tok.weight"] = values["tok.weight"].bfloat16()
    save_file({**values, "stranger": torch.zeros(1)}, tmp_path / "mixed.safetensors")
    state = build.local(weights=tmp_path / "mixed.safetensors").state_dict()
    assert torch.equal(state["tok.weight"], values["tok.weight"].float())
    said = capsys.readouterr().err
    assert said.count("tensors converted to the build's dtype, 1: tok.weight (BF16 to F32)") == 1, "from worker 0 alone"
    assert said.count("tensors that are not in the model are ignored, 1: stranger") == 1


def test_buffers_are_taken_where_they_are_there(tmp_path: Path) -> None:
    build = lowered("conv", workers=2)
    values = {p.name: build.tensors[p.name] for p in build.plan.parameters}
    mean = "layers.0.1.running_mean"
    save_file({**values, mean: torch.full_like(build.tensors[mean], 5.0)}, tmp_path / "c.safetensors")
    state = build.local(weights=tmp_path / "c.safetensors").state_dict()
    assert state[mean].eq(5.0).all()
    assert torch.equal(state["layers.0.1.running_var"], build.tensors["layers.0.1.running_var"])


def test_all_that_is_wrong_is_said(build: Build, values: dict[str, Tensor], tmp_path: Path) -> None:
    values["pos"] = values["pos"][:2].contiguous()
    del values["tok.weight"], values["norm.bias"]
    save_file(values, tmp_path / "wrong.safetensors")
    with pytest.raises(BuildError) as caught:
        build.local(weights=tmp_path / "wrong.safetensors")
    assert "missing: tok.weight, norm.bias" in str(caught.value)
    assert "of another shape: pos is [2, 16], not [8, 16]" in str(caught.value)


def test_names_that_begin_with_a_wrapper(build: Build, values: dict[str, Tensor], tmp_path: Path) -> None:
    save_file({f"module.{name}": value for name, value in values.items()}, tmp_path / "wrapped.safetensors")
    with pytest.raises(BuildError, match=r"all names of the checkpoint begin with 'module\.'"):
        build.local(weights=tmp_path / "wrapped.safetensors")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("nowhere", None, "there is no"),
        ("empty", {}, "has no checkpoint"),
        ("index", {INDEX: "[]"}, "cannot be read"),
        ("broken", {SINGLE: "nonsense"}, "cannot be read"),
    ],
)
def test_no_checkpoint(build: Build, tmp_path: Path, name: str, content: dict[str, str] | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).mkdir()
        for file, text in content.items():
            (tmp_path / name / file).write_text(text)
    with pytest.raises(BuildError, match=message):
        Checkpoint.open(tmp_path / name, build.plan)

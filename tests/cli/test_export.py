"""What `fxpipe export` writes and prints, and what it refuses."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import needs_onnx  # noqa: F401
import onnx
import onnxruntime
import pytest
import torch
from commands import QUICK, files, fxpipe, unchanged
from model_files import PARAMETERS, write_model
from safetensors.torch import load_file, save_file
from torch import nn

import fxpipe as library
from fxpipe.export import stages

NAMES = [
    "stage_0.forward.onnx",
    "stage_0.backward.onnx",
    "stage_1.forward.onnx",
    "stage_1.backward.onnx",
    "pipeline.onnx",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with model.py, its build for two workers, and an empty folder that was there before."""
    made = tmp_path_factory.mktemp("export")
    result = fxpipe("compile", write_model(made), "-o", made / "build", "--fp-cut", "blocks.2", *QUICK)
    assert result.code == 0, result.err
    (made / "onnx").mkdir()
    return made


@pytest.fixture(scope="module")
def said(folder: Path) -> dict[str, Any]:
    """What the export of the build says, as JSON."""
    with_build = files(folder / "build")
    result = fxpipe("export", folder / "build", "-o", folder / "onnx", "--json")
    assert files(folder / "build") == with_build
    found = result.json
    assert isinstance(found, dict)
    return found


def test_json(said: dict[str, Any], folder: Path) -> None:
    assert set(said) == {"out", "opset", "weights", "trained", "error", "files"}
    assert (said["out"], said["opset"], said["weights"]) == (str(folder / "onnx"), 20, "inputs")
    assert [f["name"] for f in said["files"]] == NAMES
    assert sorted(files(folder / "onnx")) == sorted(NAMES)
    for file in said["files"]:
        assert set(file) == {"name", "nodes", "bytes", "error", "worst", "seconds"}
        assert file["bytes"] == (folder / "onnx" / file["name"]).stat().st_size
        assert 0 <= file["error"] <= 1e-4
    assert said["error"] == max(f["error"] for f in said["files"])


def test_the_models_are_of_this_build(said: dict[str, Any], folder: Path) -> None:
    model = onnx.load(folder / "onnx" / "pipeline.onnx")
    assert {v.name for v in model.graph.input} >= PARAMETERS
    assert {v.name for v in model.graph.output} >= {"loss"} | {f"grad:{name}" for name in PARAMETERS}
    text = model.SerializeToString()
    assert str(folder).encode() not in text, "no paths of this machine"


@pytest.mark.slow
def test_an_earlier_export_is_replaced_and_a_foreign_folder_is_not(said: dict[str, Any], folder: Path) -> None:
    with unchanged(folder):
        result = fxpipe("export", folder / "build", "-o", folder / "build")
    assert result.code == 1
    assert re.search(r"error: .*build exists and holds costs\.json, .*, which an export would delete", result.err)
    assert "\n  hint: choose another -o" in result.err
    serve = ("-o", folder / "serve", "--inference", "--untrained", "--weights", "external", "--json")
    fxpipe("export", folder / "build", *serve)
    found = fxpipe("export", folder / "build", *serve).json
    assert [f["name"] for f in found["files"]] == ["stage_0.inference.onnx", "stage_1.inference.onnx"]
    assert (found["dynamic"], found["weights"]) == (True, "external")
    assert len(found["batches"]) > 1
    assert found["error"] <= 1e-4
    assert found["trained"] is None
    left = files(folder / "serve")
    assert all(re.fullmatch(r"stage_[01]\.inference\.onnx(\.data)?", name) for name in left)
    assert len(left) == 4
    for file in found["files"]:
        both = (left[file["name"]], left[file["name"] + ".data"])
        assert file["bytes"] == sum(len(content or b"") for content in both)


@pytest.mark.slow
def test_an_older_opset(folder: Path, tmp_path: Path) -> None:
    result = fxpipe("export", folder / "build", "--opset", 18, "-o", tmp_path / "onnx")
    assert result.code == 0, result.err
    rows = [line.split() for line in result.out.splitlines() if line.strip().startswith(("stage_", "pipeline"))]
    assert len(rows) == 5
    assert all(float(row[-3]) <= 1e-4 for row in rows)
    assert f"wrote {tmp_path / 'onnx'}: stage_0.forward.onnx" in result.out
    model = onnx.load(tmp_path / "onnx" / "stage_1.backward.onnx")
    assert {o.domain: o.version for o in model.opset_import} == {"": 18}


def test_an_edited_stage_warns(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stops right behind the warning."""
    build = tmp_path / "build"
    build.mkdir()
    for name, content in files(folder / "build").items():
        (build / name).write_bytes(content or b"")
    path = build / "stage_0.py"
    path.write_text(path.read_text() + "\n# a note\n")

    def stop(*arguments: Any) -> None:
        raise library.FxpipeError("stopped")

    monkeypatch.setattr(stages, "trace_stage", stop)
    model = folder / "model.py"
    result = fxpipe("export", build, "--model", model, "-o", tmp_path / "onnx")
    assert result.code == 1
    assert "warning: stage_0.py was edited since it was compiled; the edited version is exported" in result.err
    assert "error: stopped" in result.err
    assert not (tmp_path / "onnx").exists()


def test_a_build_from_objects(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    options: dict[str, Any] = {"workers": 2, "forward_at": ["1"], "cost": "analytic"}
    library.compile(net, lambda m, x: m(x).square().mean(), torch.randn(3, 4), **options).save(tmp_path / "build")
    with unchanged(tmp_path):
        result = fxpipe("export", tmp_path / "build", "-o", tmp_path / "onnx")
    assert result.code == 1
    assert "compiled from objects" in result.err
    assert "--model" in result.err


def test_a_stale_build(folder: Path, tmp_path: Path) -> None:
    model = write_model(tmp_path, ("0.1, self.training", "0.2, self.training"))
    result = fxpipe("export", folder / "build", "--model", model, "-o", tmp_path / "onnx")
    assert result.code == 1
    assert "the build is stale: since it was compiled, model.py: Net changed" in result.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["build", "--inference", "--weights", "inputs"], "--weights inputs is for training"),
        (["build", "--trained", "out/model.safetensors"], "--trained needs models that hold weights"),
        (["build", "--inference"], "say which weights to serve: --trained out/model.safetensors"),
        (["build", "--inference", "--untrained", "--trained", "model.safetensors"], "give one of them"),
        (["build", "--weights", "outside"], "'outside' is not one of"),
    ],
)
def test_wrong_usage(arguments: list[str], message: str) -> None:
    result = fxpipe("export", *arguments)
    assert result.code == 2
    assert message in result.err


# ---- trained weights ----


@pytest.fixture(scope="module")
def trained(folder: Path) -> Path:
    """What a short run of the build left."""
    result = fxpipe("run", folder / "build", "--local", "--steps", 3, "--out", folder / "out")
    assert result.code == 0, result.err
    return folder / "out" / "model.safetensors"


@pytest.mark.slow
def test_trained_weights_for_inference(folder: Path, trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "onnx"
    result = fxpipe("export", folder / "build", "-o", out, "--inference", "--trained", trained, "--json")
    assert result.json["error"] <= 1e-4
    assert result.json["trained"] == str(trained)
    net = runpy.run_path(str(folder / "model.py"))["model"]()
    net.load_state_dict(load_file(trained))
    x = torch.randn(7, 6)
    values = [x.numpy()]
    for k in range(2):
        session = onnxruntime.InferenceSession(out / f"stage_{k}.inference.onnx", providers=["CPUExecutionProvider"])
        values = session.run(None, dict(zip([i.name for i in session.get_inputs()], values, strict=True)))
    torch.testing.assert_close(torch.from_numpy(values[0]), net.eval()(x).detach(), rtol=1e-4, atol=1e-5)


def test_trained_weights_of_another_model(folder: Path, trained: Path, tmp_path: Path) -> None:
    tensors = load_file(trained)
    tensors["first.weight"] = tensors["first.weight"].t().contiguous()
    tensors["norm.bias"] = tensors["norm.bias"].half()
    tensors["tail.bias"] = tensors.pop("head.bias")
    save_file(tensors, tmp_path / "other.safetensors")
    arguments = ("export", folder / "build", "-o", tmp_path / "onnx", "--inference", "--trained")
    result = fxpipe(*arguments, tmp_path / "other.safetensors")
    assert result.code == 1
    assert result.err.startswith(
        "error: the trained weights are for another model:\n"
        "  missing: head.bias\n"
        "  not of the model: tail.bias\n"
        "  of another kind: first.weight is float32[6, 8], not float32[8, 6], norm.bias is float16[8], not float32[8]\n"
    ), result.err
    for name, content in (("none.safetensors", None), ("text.safetensors", "no tensors")):
        if content is not None:
            (tmp_path / name).write_text(content)
        result = fxpipe(*arguments, tmp_path / name)
        assert result.code == 1
        assert f"{name} cannot be read" in result.err
    assert not (tmp_path / "onnx").exists()


def test_only_its_own_kind_of_export_is_replaced(tmp_path: Path) -> None:
    """By what the files are, not by their names alone."""
    target = tmp_path / "onnx"
    target.mkdir()
    (target / "pipeline.onnx").write_text("mine")
    for more in ((), ("--inference", "--untrained")):
        result = fxpipe("export", str(tmp_path), "-o", str(target), *more)
        assert result.code == 1
        assert "holds pipeline.onnx, which an export would delete" in result.err
    assert (target / "pipeline.onnx").read_text() == "mine"
    model = onnx.helper.make_model(onnx.helper.make_graph([], "g", [], []), producer_name="fxpipe")
    (target / "pipeline.onnx").unlink()
    (target / "stage_0.inference.onnx").write_bytes(model.SerializeToString())
    assert "holds stage_0.inference.onnx" in fxpipe("export", str(tmp_path), "-o", str(target)).err
    result = fxpipe("export", str(tmp_path), "-o", str(target), "--inference", "--untrained")
    assert "is not an fxpipe build" in result.err

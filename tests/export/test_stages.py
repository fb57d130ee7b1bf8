"""Each part as a model: its names, its metadata, its weights; and nothing that is wrong is ever written."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import needs_onnx  # noqa: F401
import onnx
import pytest
import torch
from cached import cuts, lowered
from commands import files
from exported_files import BATCH, CASE, leaves, metadata, session
from onnx import helper
from torch import Tensor, fx, nn

import fxpipe
from fxpipe.builds.build import Build
from fxpipe.errors import BatchError, ExportError
from fxpipe.export import stages
from fxpipe.export.names import names_of
from fxpipe.export.stages import ExportedFile, export
from fxpipe.onnx import check, model_file
from fxpipe.onnx.model_file import WeightsForm, write
from fxpipe.plan.spec import TensorSpec
from fxpipe.stages.pure_part import PartInput, PartOutput, PurePart

FLOAT = onnx.TensorProto.FLOAT
PARTS = ["stage_0.forward.onnx", "stage_0.backward.onnx", "stage_1.forward.onnx", "stage_1.backward.onnx"]


@pytest.fixture(scope="module")
def build() -> Build:
    """Two workers; between their cuts a module whose forward and backward lie apart."""
    return lowered("dict", workers=2, **cuts(CASE, 2, -1))


@pytest.fixture(scope="module")
def exported(build: Build, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[ExportedFile]]:
    folder = tmp_path_factory.mktemp("export") / "onnx"
    told: list[str] = []
    found = export(build, folder, BATCH, warn=told.append)
    assert not told
    return folder, found


# ---- what is written ----


def test_a_file_for_each_part_and_one_for_all(exported: tuple[Path, list[ExportedFile]]) -> None:
    folder, found = exported
    assert [f.name for f in found] == [*PARTS, "pipeline.onnx"]
    assert sorted(files(folder)) == sorted(f.name for f in found)
    for file in found:
        assert file.bytes == (folder / file.name).stat().st_size
        assert file.nodes > 0
        assert 0 <= file.error <= 1e-4
        assert file.worst
        assert file.seconds > 0
        onnx.checker.check_model(str(folder / file.name), full_check=True)


def test_names_and_metadata(build: Build, exported: tuple[Path, list[ExportedFile]]) -> None:
    edges = {e.name: e for e in build.plan.edges}
    for name in PARTS:
        body = metadata(exported[0] / name)
        model = onnx.load(exported[0] / name)
        assert (body["version"], body["workers"], body["weights"]) == (fxpipe.__version__, 2, "inputs")
        assert name == f"stage_{body['stage']}.{body['phase']}.onnx"
        spec = getattr(build.plan.stages[body["stage"]], body["phase"])
        assert [row["value"] for row in body["inputs"]] == [value.name for value in model.graph.input]
        assert [row["value"] for row in body["outputs"]] == [value.name for value in model.graph.output]
        kinds: dict[str, list[str]] = {}
        for row in (*body["inputs"], *body["outputs"]):
            kinds.setdefault(row["kind"], []).append(row["name"])
            if row["kind"] == "received":
                edge = edges[row["name"]]
                assert (row["from"], row["edge"], edge.dst) == (edge.src, edge.kind, body["stage"])
            if row["kind"] == "sent":
                edge = edges[row["name"]]
                assert (row["to"], row["edge"], edge.src) == (edge.dst, edge.kind, body["stage"])
            if row["kind"] == "gradient":
                assert row["value"] == f"grad:{row['name']}"
            elif row["kind"] in ("weight", "buffer", "batch", "received"):
                assert row["value"] == row["name"]
        assert kinds.get("weight", []) == list(spec.weights)
        assert kinds.get("buffer", []) == list(spec.buffers)
        assert kinds.get("batch", []) == list(spec.batch)
        assert kinds.get("saved", []) == list(spec.saved)
        assert kinds.get("received", []) == list(spec.receives)
        assert kinds.get("sent", []) == list(spec.sends)
        assert kinds.get("gradient", []) == list(spec.gradients)
        assert ("loss" in kinds) == spec.loss
        words = [value.doc_string for value in (*model.graph.input, *model.graph.output)]
        assert all(words)


def test_a_weight_copy_says_whose_it_is(build: Build, exported: tuple[Path, list[ExportedFile]]) -> None:
    words = {v.name: v.doc_string for v in onnx.load(exported[0] / "stage_0.forward.onnx").graph.input}
    owners = {name: p.owner for p in build.plan.parameters for name in p.names}
    weights = build.plan.stages[0].forward.weights
    assert {owners[name] for name in weights} == {0, 1}
    for name in weights:
        assert words[name] == ("weight" if owners[name] == 0 else "copy of a weight of worker 1")


# ---- names ----


def part_of(inputs: list[tuple[Any, str]], outputs: list[tuple[Any, str]]) -> PurePart:
    spec = TensorSpec((1,), (1,), "float32")
    return PurePart(
        0,
        "F",
        fx.GraphModule({}, fx.Graph()),
        tuple(PartInput(kind, name, spec) for kind, name in inputs),
        tuple(PartOutput(kind, name, spec) for kind, name in outputs),
        (),
        "cpu",
    )


def test_a_name_that_is_taken_gets_its_kind() -> None:
    part = part_of(
        [("weight", "x"), ("buffer", "n"), ("saved", "x"), ("received", "h:1"), ("mask", "mask_0")],
        [("loss", "loss"), ("update", "n"), ("saved", "h:1"), ("saved", "y"), ("sent", "y"), ("sent", "z")],
    )
    inputs, outputs = names_of(part)
    assert inputs == ["x", "n", "saved:x", "h:1", "mask_0"]
    assert outputs == ["loss", "new:n", "saved:h:1", "saved:y", "y", "z"]


def test_a_parameter_called_loss() -> None:
    assert names_of(part_of([("weight", "loss")], [("loss", "loss")])) == (["loss"], ["loss:loss"])


# ---- weights ----


@pytest.mark.slow
@pytest.mark.parametrize("form", ["initializers", "external"])
def test_weights_within_and_beside(
    form: WeightsForm, exported: tuple[Path, list[ExportedFile]], build: Build, tmp_path: Path
) -> None:
    export(build, tmp_path / "made", BATCH, weights=form)
    moved = tmp_path / "moved"
    (tmp_path / "made").rename(moved)
    names = {name for row in (*build.plan.parameters, *build.plan.buffers) for name in row.names}
    for path in sorted(moved.glob("*.onnx")):
        onnx.checker.check_model(str(path), full_check=True)
        model = onnx.load(path)
        held = {t.name: torch.tensor(onnx.numpy_helper.to_array(t)) for t in model.graph.initializer}
        asked = {value.name for value in onnx.load(exported[0] / path.name).graph.input}
        assert {value.name for value in model.graph.input} == asked - names
        assert set(held) >= asked & names
        assert all(torch.equal(held[name], build.tensors[name]) for name in asked & names)
        assert path.with_name(path.name + ".data").exists() == (form == "external" and bool(asked & names))
    given = {name: value.numpy() for name, value in leaves().items()}
    found = session(moved / "pipeline.onnx").run(["loss"], given)[0]
    assert found == pytest.approx(CASE.loss(CASE.make(), BATCH).item(), rel=1e-5)


def small_model() -> onnx.ModelProto:
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "w"], ["y"])],
        "small",
        [helper.make_tensor_value_info(name, FLOAT, [1000]) for name in ("x", "w")],
        [helper.make_tensor_value_info("y", FLOAT, [1000])],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def test_a_model_larger_than_a_file_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = {"w": torch.randn(1000)}
    monkeypatch.setattr(model_file, "LIMIT", 2000)
    with pytest.raises(ExportError, match=r"small\.onnx would be 4\.\d KiB.*at most") as caught:
        write(tmp_path / "small.onnx", small_model(), weights, "initializers")
    assert "--weights external" in (caught.value.hint or "")
    assert not list(tmp_path.iterdir())
    beside = write(tmp_path / "small.onnx", small_model(), weights, "external")
    assert beside == tmp_path / "small.onnx.data"
    x = torch.randn(1000)
    found = check.run_file(tmp_path / "small.onnx", {"x": x})
    assert torch.equal(found["y"], x + weights["w"])
    monkeypatch.setattr(model_file, "LIMIT", 20)
    with pytest.raises(ExportError, match="at most 20 B"):
        write(tmp_path / "small.onnx", small_model(), {}, "inputs")


# ---- what must not be written ----

EARLIER = helper.make_model(helper.make_graph([], "g", [], []), producer_name="fxpipe").SerializeToString()


def test_a_wrong_model_is_not_written(build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = stages.convert

    def wrong(*arguments: Any, **options: Any) -> onnx.ModelProto:
        model = right(*arguments, **options)
        (last,) = (n for n in model.graph.node if model.graph.output[0].name in n.output)
        last.output[0] = "right"
        model.graph.node.add(op_type="Add", input=["right", "right"], output=[model.graph.output[0].name])
        return model

    monkeypatch.setattr(stages, "convert", wrong)
    target = tmp_path / "onnx"
    target.mkdir()
    (target / "pipeline.onnx").write_bytes(EARLIER)
    with pytest.raises(ExportError, match=r"stage_0\.forward\.onnx does not compute what .* is off by 1\.0e\+00"):
        export(build, target, BATCH)
    assert files(tmp_path) == {"onnx": None, "onnx/pipeline.onnx": EARLIER}


def test_a_foreign_folder_is_left_alone(build: Build, tmp_path: Path) -> None:
    (tmp_path / "pipeline.onnx").write_bytes(EARLIER)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ExportError, match=r"holds notes\.txt, which an export would delete"):
        export(build, tmp_path, BATCH)
    with pytest.raises(ExportError, match="is a file"):
        export(build, tmp_path / "notes.txt", BATCH)
    assert len(files(tmp_path)) == 2


@pytest.mark.parametrize(("opset", "message"), [(17, "too old"), (99, "too new")])
def test_an_opset_that_cannot_be(opset: int, message: str, build: Build, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=message) as caught:
        export(build, tmp_path / "onnx", BATCH, opset=opset)
    assert "from 18 to 25" in (caught.value.hint or "")


def test_a_batch_of_another_shape(build: Build, tmp_path: Path) -> None:
    with pytest.raises(BatchError, match="does not fit"):
        export(build, tmp_path / "onnx", CASE.batches(1, 4)[0])
    assert not list(tmp_path.iterdir())


def test_without_onnxruntime(build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxpipe.export.target.PACKAGES", ("onnx", "no_such_package"))
    with pytest.raises(ExportError, match="needs no_such_package, which is not installed") as caught:
        export(build, tmp_path / "onnx", BATCH)
    assert caught.value.hint == "pip install no_such_package"


# ---- edits and random numbers ----


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(nn.functional.dropout(torch.tanh(self.a(x)), 0.5, self.training))


def dropped(tmp_path: Path) -> Tensor:
    """Compiles it; gives the batch."""
    torch.manual_seed(0)
    batch = torch.randn(6, 4)
    options: dict[str, Any] = {"workers": 2, "forward_at": ["b"], "cost": "analytic"}
    made = fxpipe.compile(Dropped(), lambda model, x: model(x).square().mean(), batch, **options)
    made.save(tmp_path / "build")
    return batch


@pytest.mark.slow
def test_masks_are_inputs_and_an_edit_is_exported(tmp_path: Path) -> None:
    batch = dropped(tmp_path)
    path = tmp_path / "build" / "stage_0.py"
    assert path.read_text().count("= torch.tanh(") == 1
    path.write_text(path.read_text().replace("= torch.tanh(", "= torch.sin("))
    told: list[str] = []
    export(fxpipe.load(tmp_path / "build"), tmp_path / "onnx", batch, warn=told.append)
    assert told == ["stage_0.py was edited since it was compiled; the edited version is exported"]
    model = onnx.load(tmp_path / "onnx" / "stage_0.forward.onnx")
    operators = {n.op_type for n in model.graph.node}
    assert "Sin" in operators
    assert "Tanh" not in operators
    inputs = {v.name: v for v in model.graph.input}
    assert inputs["mask_0"].type.tensor_type.elem_type == onnx.TensorProto.BOOL
    assert "stage_0.forward.mask_0" in {v.name for v in onnx.load(tmp_path / "onnx" / "pipeline.onnx").graph.input}


@pytest.mark.slow
def test_a_stage_that_computes_nothing_has_no_file(tmp_path: Path) -> None:
    """Frozen up to its last module: the first worker's backward has nothing to do."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    options: dict[str, Any] = {"workers": 2, "forward_at": ["2"], "backward_at": ["2"], "cost": "analytic"}
    build = fxpipe.compile(model, lambda m, x: m(x).square().mean(), torch.randn(3, 4), **options)
    if build.plan.stages[0].backward.sends or build.plan.stages[0].backward.gradients:
        pytest.skip("it has something to do after all")
    told: list[str] = []
    found = export(build, tmp_path / "onnx", torch.randn(3, 4), warn=told.append)
    assert "stage_0.backward.onnx" not in {f.name for f in found}
    assert told == ["stage_0.backward computes nothing, so there is no file for it"]


class Experts(nn.Module):
    """Norms that are frozen and in eval mode, and tokens sorted by their expert: most of what is sorted is equal."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.router = nn.Linear(8, 8), nn.BatchNorm1d(8).eval(), nn.Linear(8, 4)
        self.experts = nn.Parameter(torch.randn(4, 8, 8) / 3)
        self.register_buffer("scale", torch.rand(8) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.a(x)) * self.scale.rsqrt().view(1, -1)
        chosen = self.router(x).argmax(-1)
        expert, order = chosen.sort()
        one_hot = nn.functional.one_hot(expert, 4).to(x.dtype)
        sorted_out = torch.einsum("te,ti,eij->tj", one_hot, x[order], self.experts)
        return torch.empty_like(sorted_out).index_copy(0, order, sorted_out) + x


@pytest.mark.slow
def test_equal_elements_are_sorted_as_onnx_does(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, batch = nn.Sequential(Experts(), nn.Linear(8, 2)), torch.randn(96, 8)
    options: dict[str, Any] = {"workers": 2, "forward_at": ["1"], "backward_at": ["1"], "cost": "analytic"}
    build = fxpipe.compile(model, lambda m, x: m(x).square().mean(), batch, **options)
    export(build, tmp_path / "onnx", batch)
    (order,) = [
        v for v in session(tmp_path / "onnx" / "stage_0.forward.onnx").get_outputs() if v.type == "tensor(int64)"
    ]
    assert order.shape == [96]


# ---- files that onnxruntime runs ----


def test_bfloat16_goes_in_and_out(tmp_path: Path) -> None:
    kind = onnx.TensorProto.BFLOAT16
    graph = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["y"])],
        "same",
        [helper.make_tensor_value_info("x", kind, [2, 3])],
        [helper.make_tensor_value_info("y", kind, [2, 3])],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), tmp_path / "m.onnx")
    x = torch.randn(2, 3).bfloat16()
    assert torch.equal(check.run_file(tmp_path / "m.onnx", {"x": x})["y"], x)


def test_a_model_that_onnxruntime_refuses(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(small_model(), path)
    with pytest.raises(ExportError, match=r"m\.onnx needs 'x', which is not an input"):
        check.run_file(path, {})
    with pytest.raises(ExportError, match=r"onnxruntime .* cannot run m\.onnx"):
        check.run_file(path, {"x": torch.ones(1000), "w": torch.ones(7)})
    shutil.copy(__file__, path)
    with pytest.raises(ExportError, match=r"m\.onnx is not a valid ONNX model"):
        check.run_file(path, {})


def test_an_exported_file_is_plain_data(exported: tuple[Path, list[ExportedFile]]) -> None:
    assert json.loads(json.dumps([dataclasses.asdict(f) for f in exported[1]]))

"""Files chained by their metadata train as eager; with weight gradients apart there is a third one for each stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import needs_onnx  # noqa: F401
import onnx
import pytest
import torch
from cached import CASES, cuts, lowered
from exported_files import BATCH, CASE, leaves, metadata, session
from random_cuts import random_cuts
from torch import Tensor

from fxpipe.builds.build import Build
from fxpipe.engines.attach import equip
from fxpipe.export.stages import export
from fxpipe.stages.loaded import load_stages
from fxpipe.stages.pure_part import PurePart, trace_stage


@pytest.fixture(scope="module", params=["async", "zb-v"])
def build(request: pytest.FixtureRequest) -> Build:
    """Two ranks; of zb-v, each has two workers."""
    workers = 4 if request.param == "zb-v" else 2
    return lowered("dict", workers=2, schedule=request.param, **cuts(CASE, workers, -1))


@pytest.fixture(scope="module")
def folder(build: Build, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is exported, and that every function that computes anything has its file."""
    made = tmp_path_factory.mktemp("export") / "onnx"
    told: list[str] = []
    found = [file.name for file in export(build, made, BATCH, warn=told.append)]
    parts = ("forward", "backward", *(["weights"] if build.plan.stages[0].weights else []))
    order = [f"stage_{k}.{part}" for k in range(build.plan.workers) for part in parts]
    empty = {text.split()[0] for text in told}
    assert all("computes nothing" in text for text in told)
    assert found == [f"{name}.onnx" for name in order if name not in empty] + ["pipeline.onnx"]
    apart = [s for s in build.plan.stages if s.weights and s.weights.gradients]
    assert len(apart) >= 2 or not any(s.weights for s in build.plan.stages)
    assert not any(f"{Path(s.file).stem}.weights" in empty for s in apart)
    assert all(file.error <= 1e-4 for file in export(build, made, BATCH)), "an earlier export is replaced"
    return made


def eager() -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and the gradients."""
    model = CASE.make()
    loss = CASE.loss(model, BATCH)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def are_those_of_eager(loss: Any, found: dict[str, Tensor]) -> None:
    expected, gradients = eager()
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    assert set(found) >= set(gradients)
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)


def test_what_backward_leaves_is_what_weights_takes(build: Build, folder: Path) -> None:
    handed = sum(s.weights is None for s in build.plan.stages)
    for k, stage in enumerate(build.plan.stages):
        path = folder / f"stage_{k}.weights.onnx"
        if not path.exists():
            continue
        onnx.checker.check_model(str(path), full_check=True)
        assert stage.weights is not None
        body, before = metadata(path), metadata(folder / f"stage_{k}.backward.onnx")
        taken = [row["name"] for row in body["inputs"] if row["kind"] == "deferred"]
        assert taken == [row["name"] for row in before["outputs"] if row["kind"] == "deferred"]
        assert taken == list(stage.weights.deferred)
        assert body["phase"] == "weights"
        assert [row["name"] for row in body["outputs"] if row["kind"] == "gradient"] == list(stage.weights.gradients)
        assert not any(row["kind"] == "gradient" for row in before["outputs"])
        assert all(v.doc_string for model in (onnx.load(path),) for v in (*model.graph.input, *model.graph.output))
        handed += len(taken)
    assert handed


def test_the_files_chained_by_their_metadata_train_as_eager(build: Build, folder: Path) -> None:
    model, workers = CASE.make(), range(build.plan.workers)
    known: dict[tuple[Any, ...], Any] = {("batch", name): value.numpy() for name, value in leaves().items()}
    known |= {("weight", name): p.detach().numpy() for name, p in model.named_parameters()}
    known |= {("buffer", name): b.numpy() for name, b in model.named_buffers()}
    order = [f"stage_{k}.forward" for k in workers]
    order += [f"stage_{k}.{part}" for part in ("backward", "weights") for k in reversed(workers)]
    for name in order:
        if not (folder / f"{name}.onnx").exists():
            continue
        body = metadata(folder / f"{name}.onnx")

        def key(row: dict[str, Any], stage: int = body["stage"]) -> tuple[Any, ...]:
            kind = {"received": "edge", "sent": "edge"}.get(row["kind"], row["kind"])
            return (kind, stage, row["name"]) if kind in ("saved", "deferred") else (kind, row["name"])

        given = {row["value"]: known[key(row)] for row in body["inputs"]}
        values = session(folder / f"{name}.onnx").run([row["value"] for row in body["outputs"]], given)
        known |= {key(row): value for row, value in zip(body["outputs"], values, strict=True)}
    found = {key[1]: torch.from_numpy(value) for key, value in known.items() if key[0] == "gradient"}
    are_those_of_eager(known["loss", "loss"], found)


def test_the_pipeline_is_one_model_that_trains_as_eager(build: Build, folder: Path) -> None:
    model = onnx.load(folder / "pipeline.onnx")
    onnx.checker.check_model(str(folder / "pipeline.onnx"), full_check=True)
    phases = [n.op_type.partition(".")[2] for n in model.graph.node]
    assert ("weights" in phases) == (build.plan.stages[0].weights is not None)
    assert phases == sorted(phases, key=["forward", "backward", "weights"].index), "every backward comes before them"
    module = CASE.make()
    given = leaves() | {n: p.detach() for n, p in module.named_parameters()} | dict(module.named_buffers())
    runner = session(folder / "pipeline.onnx")
    names = [v.name for v in runner.get_outputs()]
    values = runner.run(names, {v.name: given[v.name].numpy() for v in runner.get_inputs()})
    found = dict(zip(names, values, strict=True))
    gradients = {n.removeprefix("grad:"): torch.from_numpy(v) for n, v in found.items() if n.startswith("grad:")}
    are_those_of_eager(found["loss"], gradients)


@pytest.mark.slow
def test_what_is_computed_again_and_dropout(tmp_path: Path) -> None:
    """Cuts at random, workers that compute others' forwards again: elements of tuples are handed to weights, too."""
    made = lowered("gpt-dropout", 4, workers=2, schedule="v-half", cuts=random_cuts("gpt-dropout", 4, seed=5))
    files = export(made, tmp_path / "onnx", CASES["gpt-dropout"].batches(1)[0])
    assert {f.name for f in files} >= {f"stage_{k}.weights.onnx" for k in range(4)}
    assert all(f.error <= 1e-4 for f in files)


def test_an_engine_traces_no_weight_gradients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are made by the emitted code."""
    build = lowered("dict", workers=2, schedule="zb-h1", **cuts(CASE, 2, -1))
    seen: list[str] = []

    def noted(*arguments: Any) -> tuple[PurePart, ...]:
        parts = trace_stage(*arguments)
        seen.extend(part.phase for part in parts)
        return parts

    monkeypatch.setattr("fxpipe.engines.attach.trace_stage", noted)
    (stage, *_) = load_stages(build.plan, build.files)
    put = equip(build.plan, 0, stage, ("onnxruntime", "onnxruntime"), tmp_path, "cpu")
    assert seen == ["F", "B"]
    assert put.functions["W"] is stage.functions["W"]
    assert put.functions["B"] is not stage.functions["B"]

"""The whole step as one model: what a viewer shows are the stages, and it computes what eager PyTorch computes."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import needs_onnx  # noqa: F401
import onnx
import onnxruntime as ort
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe
from fxpipe.builds.build import Build
from fxpipe.export.stages import ExportedFile, export


class Tied(nn.Module):
    """A weight that the first and the last worker read, a buffer that forward updates, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 6)
        self.inner = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 6)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = F.dropout(torch.tanh(self.inner(self.words(ids))), 0.3, self.training)
        return self.head(torch.tanh(self.last(self.norm(x))))


def loss(model: nn.Module, batch: Any) -> Tensor:
    ids, targets = batch
    return F.cross_entropy(model(ids), targets)


BATCH = (torch.tensor([0, 1, 2, 3, 4, 5, 6, 0]), torch.tensor([1, 2, 3, 4, 5, 6, 0, 1]))
BUFFERS = ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked")


@dataclass(frozen=True)
class Made:
    model: nn.Module
    build: Build
    path: Path
    files: list[ExportedFile]

    @property
    def onnx(self) -> onnx.ModelProto:
        return onnx.load(self.path)


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    torch.manual_seed(0)
    model = Tied()
    build = fxpipe.compile(
        model,
        loss,
        BATCH,
        workers=3,
        microbatches=1,
        forward_at=["norm", "head"],
        backward_at=["inner", "last"],
        cost="analytic",
    )
    folder = tmp_path_factory.mktemp("pipeline") / "onnx"
    return Made(model, build, folder / "pipeline.onnx", export(build, folder, BATCH))


def test_it_is_valid(made: Made) -> None:
    onnx.checker.check_model(str(made.path), full_check=True)
    (row,) = (f for f in made.files if f.name == "pipeline.onnx")
    assert row.error <= 1e-4
    assert row.nodes == 6 + sum(len(f.node) for f in made.onnx.functions)


def test_the_main_graph_calls_the_stages_in_order(made: Made) -> None:
    model = made.onnx
    calls = [n.op_type for n in model.graph.node]
    forwards, backwards = ([f"stage_{k}.{phase}" for k in range(3)] for phase in ("forward", "backward"))
    assert calls == forwards + backwards[::-1]
    assert {n.domain for n in model.graph.node} == {"fxpipe"}
    assert sorted((f.domain, f.name) for f in model.functions) == sorted(("fxpipe", name) for name in calls)
    assert {o.domain: o.version for o in model.opset_import} == {"": 20, "fxpipe": 1}


def test_every_edge_runs_from_its_worker_to_its_reader(made: Made) -> None:
    model = made.onnx
    calls = {n.op_type: n for n in model.graph.node}
    phases = {"F": "forward", "B": "backward"}
    assert {e.kind for e in made.build.plan.edges} >= {"input", "activation", "saved", "gradient"}
    for edge in made.build.plan.edges:
        assert edge.name in calls[f"stage_{edge.src}.{phases[edge.src_phase]}"].output
        assert edge.name in calls[f"stage_{edge.dst}.{phases[edge.dst_phase]}"].input
    for k, stage in enumerate(made.build.plan.stages):
        for name in stage.forward.saved:
            value = f"stage_{k}.{name}"
            assert value in calls[f"stage_{k}.forward"].output
            assert value in calls[f"stage_{k}.backward"].input
    inside = {v.name for v in model.graph.value_info}
    assert inside >= {e.name for e in made.build.plan.edges}, "a viewer shows their shapes"


def test_inputs_and_outputs(made: Made) -> None:
    graph = made.onnx.graph
    read = {name for s in made.build.plan.stages for part in (s.forward, s.backward) for name in part.weights}
    assert "words.weight" in read
    inputs = [v.name for v in graph.input]
    assert len(set(inputs)) == len(inputs)
    assert {name for name in inputs if name.endswith(("weight", "bias"))} == read - {"head.weight"}
    assert {"batch[0]", "batch[1]", "stage_0.forward.mask_0"} <= set(inputs)
    readers = [n.op_type for n in graph.node if "words.weight" in n.input]
    assert {"stage_0.forward", "stage_2.forward"} <= set(readers), "both read the one input"
    outputs = {v.name for v in graph.output}
    gradients = {f"grad:{name}" for name, _ in made.model.named_parameters()}
    assert outputs == {"loss"} | gradients | {f"new:{name}" for name in BUFFERS}


def test_metadata(made: Made) -> None:
    model = made.onnx
    (text,) = (p.value for p in model.metadata_props if p.key == "fxpipe")
    body = json.loads(text)
    assert [row["value"] for row in body["inputs"]] == [v.name for v in model.graph.input]
    assert [row["value"] for row in body["outputs"]] == [v.name for v in model.graph.output]
    tied = next(row for row in body["inputs"] if row["name"] == "words.weight")
    assert tied["names"] == ["words.weight", "head.weight"]
    for node in model.graph.node:
        (own,) = (json.loads(p.value) for p in node.metadata_props if p.key == "fxpipe")
        assert f"stage_{own['stage']}.{own['phase']}" == node.op_type
        assert len(own["inputs"]) == len(node.input)
        assert len(own["outputs"]) == len(node.output)


def test_it_computes_what_eager_pytorch_computes(made: Made) -> None:
    model = copy.deepcopy(made.model)
    torch.manual_seed(3)
    mask = torch.empty(8, 6).bernoulli_(0.7).bool()
    given = {name: p.detach().clone() for name, p in model.named_parameters()}
    given |= {name: b.clone() for name, b in model.named_buffers()}
    given |= {"batch[0]": BATCH[0], "batch[1]": BATCH[1], "stage_0.forward.mask_0": mask}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "dropout", lambda x, p, training: x * mask / (1 - p))
        value = loss(model, BATCH)
    value.backward()
    session = ort.InferenceSession(str(made.path), providers=["CPUExecutionProvider"])
    names = [v.name for v in session.get_outputs()]
    feed = {v.name: given[v.name].numpy() for v in session.get_inputs()}
    found = {n: torch.from_numpy(x) for n, x in zip(names, session.run(names, feed), strict=True)}
    assert found["loss"].item() == pytest.approx(value.item(), rel=1e-5)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(found[f"grad:{name}"], parameter.grad, rtol=1e-4, atol=1e-6)
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(found[f"new:{name}"], buffer)

"""The forward as a chain of ONNX files: the same numbers as the model's, cut where the build is, or a clear refusal."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import needs_onnx  # noqa: F401
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from small_models import CASES
from torch import Tensor, nn
from torch.nn import functional as F

from fxpipe.errors import ExportError
from fxpipe.export.inference import InferenceExport, export_inference
from fxpipe.lowering.lower import compile
from fxpipe.plan.plan import Plan


def planned(model: nn.Module, loss: Callable[..., Any], batch: Any, *at: str) -> Plan:
    return compile(model, loss, batch, workers=len(at) + 1, forward_at=at, cost="analytic").plan


def serve(folder: Path, export: InferenceExport, *inputs: Tensor) -> list[Any]:
    """The chain as a server runs it: what one file gives, the next one takes."""
    values: list[Any] = [t.numpy() for t in inputs]
    for stage in export.stages:
        session = onnxruntime.InferenceSession(folder / stage.files[0], providers=["CPUExecutionProvider"])
        names = [i.name for i in session.get_inputs()]
        assert names == [p.name for p in stage.inputs]
        values = session.run(None, dict(zip(names, values, strict=True)))
    return values


def regression(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    made = model(x)
    return F.mse_loss(made, y.expand_as(made))


def vectors(rows: int = 4, width: int = 6) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, width), torch.randn(rows, 1)


@pytest.mark.slow
def test_a_chain_for_every_batch_size(tmp_path: Path) -> None:
    case = CASES["unet"]
    model, batch = case.make(), case.batch(4)
    made = export_inference(
        model, case.loss, batch, tmp_path, plan=planned(model, case.loss, batch, "down1", "up2"), model_file="unet.py"
    )
    assert made.dynamic
    assert made.batches == (4, 1, 5)
    assert made.warnings == ()
    assert made.error < 1e-5
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"stage_{k}.inference.onnx" for k in range(3)]
    # What the first stage makes for the last one goes through the second.
    names = [[(p.name, p.kind) for p in stage.inputs] for stage in made.stages]
    assert names[0] == [("x", "input")]
    assert names[1] == [("relu", "activation")]
    assert names[2][0] == ("relu.1", "passed")
    for before, after in zip(made.stages, made.stages[1:], strict=False):
        assert [p.name for p in before.outputs] == [p.name for p in after.inputs]
    assert [(p.name, p.kind, p.shape) for p in made.stages[-1].outputs] == [("output", "output", ("batch", 5))]
    model.eval()
    for rows in (1, 2, 11):
        x = torch.randn(rows, 3, 8, 8)
        np.testing.assert_allclose(serve(tmp_path, made, x)[0], model(x).detach(), rtol=1e-4, atol=1e-5)
    proto = onnx.load(tmp_path / "stage_1.inference.onnx")
    notes = json.loads(proto.metadata_props[0].value)
    assert (notes["phase"], notes["stage"], notes["workers"], notes["model"]) == ("inference", 1, 3, "unet.py")
    assert notes["outputs"] == [{"value": "relu.1", "kind": "passed"}, {"value": "cat_1", "kind": "activation"}]
    assert str(Path.cwd()) not in str(proto)


def test_batch_norm_and_weights_under_the_models_names(tmp_path: Path) -> None:
    case = CASES["conv"]
    model, batch = case.make(), case.batch(4)
    for layer in model.layers:
        layer[1].running_mean.normal_()
    model.layers[0][1].eval()
    state = {name: t.clone() for name, t in model.state_dict().items()}
    made = export_inference(model, case.loss, batch, tmp_path, plan=planned(model, case.loss, batch, "layers.2"))
    assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())
    assert [m.training for m in (model, model.layers[0][1], model.layers[1][1])] == [True, False, True]
    held = {}
    for stage in made.stages:
        graph = onnx.load(tmp_path / stage.files[0]).graph
        held |= {t.name: onnx.numpy_helper.to_array(t) for t in graph.initializer if t.name in stage.weights}
    assert sorted(held) == sorted(name for name in state if "num_batches_tracked" not in name)
    assert all(np.array_equal(value, state[name]) for name, value in held.items())


@pytest.mark.slow
def test_each_stage_holds_what_its_forward_reads(tmp_path: Path) -> None:
    """A tied weight as well: once in each file whose stage reads it."""
    case = CASES["gpt-dropout"]
    model, batch = case.make(), case.batch(4)
    model.blocks = model.blocks[:2]
    plan = planned(model, case.loss, batch, "blocks.1")
    made = export_inference(model, case.loss, batch, tmp_path, plan=plan)
    assert [sorted(stage.weights) for stage in made.stages] == [sorted(s.forward.weights) for s in plan.stages]
    assert all("tok.weight" in stage.weights and "head.weight" not in stage.weights for stage in made.stages)
    assert made.dynamic


class Flattening(nn.Module):
    """Sizes that no input has, in-place changes, a cut inside a module, a value that only the end reads."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 8)
        self.b = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        y = self.a(x.reshape(rows * length, width)).relu_()
        y = self.b(y) * (rows / length)
        return y.view(rows, length, 3) + x[..., :3]


@pytest.mark.slow
def test_sizes_are_found_again_in_later_stages(tmp_path: Path) -> None:
    model, batch = Flattening(), (torch.randn(4, 5, 6), torch.randn(4, 1, 1))
    made = export_inference(model, regression, batch, tmp_path, plan=planned(model, regression, batch, "b.0", "b.2"))
    assert made.dynamic
    assert ("5*batch", 8) in [p.shape for p in made.stages[1].inputs]
    x = torch.randn(7, 5, 6)
    np.testing.assert_allclose(serve(tmp_path, made, x)[0], model(x).detach(), rtol=1e-4, atol=1e-5)


class Named(NamedTuple):
    scores: Tensor
    states: list[Tensor]
    nothing: Tensor | None = None
    note: str = "no tensor"


class Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 8)
        self.b = nn.Linear(8, 5)

    def forward(
        self, pair: tuple[Tensor, Tensor], factor: float, *, more: dict[str, Tensor], labels: Tensor | None = None
    ) -> tuple[Named, Tensor, Tensor]:
        hidden = self.a(pair[0] + pair[1])
        scores = self.b(hidden + more["shift"]) * factor
        loss = F.cross_entropy(scores, labels) if labels is not None else scores.sum()
        return Named(scores, [hidden, pair[0]]), scores, loss


@pytest.mark.slow
def test_nested_inputs_and_outputs_get_names_and_the_loss_is_left_out(tmp_path: Path) -> None:
    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        found = model((batch["x"], batch["x"]), 2.0, more={"shift": batch["s"]}, labels=batch["y"])[2]
        return found, {"twice": 2 * found.detach()}

    model = Structured()
    batch = {"x": torch.randn(1, 6), "s": torch.randn(1, 8), "y": torch.randint(0, 5, (1,))}
    made = export_inference(model, loss, batch, tmp_path, plan=planned(model, loss, batch, "b"))
    assert [p.name for p in made.stages[0].inputs] == ["pair[0]", "pair[1]", "more.shift"]
    assert [p.name for p in made.stages[-1].outputs] == [
        "output[0].scores", "output[0].states[0]", "output[0].states[1]", "output[1]",
    ]  # fmt: skip
    assert made.warnings == (
        "output output[0].note is a str, not a tensor: left out",
        "input labels is not read by any output: left out",
    )
    assert made.dynamic  # though the example is of one sample
    inputs = (torch.randn(3, 6), torch.randn(3, 6), torch.randn(3, 8))
    scores, _, first, again = serve(tmp_path, made, *inputs)
    right = model(inputs[:2], 2.0, more={"shift": inputs[2]})[1].detach()
    np.testing.assert_allclose(scores, right, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(scores, again)
    np.testing.assert_array_equal(first, inputs[0])


class Counting(nn.Module):
    """Changes what it holds, in eval mode too; its output has its input's name."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 1)
        self.calls = 0
        self.register_buffer("total", torch.zeros(6))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        self.total += x.sum(0)
        return {"x": self.a(x + self.total)}


def test_the_model_is_as_it_was(tmp_path: Path) -> None:
    model, batch = Counting(), vectors()
    made = export_inference(model, lambda m, b: m(b[0])["x"].mean(), batch, tmp_path)
    assert (model.calls, model.total.tolist()) == (0, [0.0] * 6)
    assert [p.name for p in (*made.stages[0].inputs, *made.stages[0].outputs)] == ["x", "x_1"]
    assert "the forward changes total in eval mode; the exported files do not" in made.warnings
    np.testing.assert_allclose(serve(tmp_path, made, batch[0])[0], model(batch[0])["x"].detach(), rtol=1e-4, atol=1e-5)


def test_weights_can_lie_beside_the_files(tmp_path: Path) -> None:
    model = nn.Linear(6, 1)
    made = export_inference(model, regression, vectors(), tmp_path, weights="external")
    assert made.stages[0].files == ("stage_0.inference.onnx", "stage_0.inference.onnx.data")
    assert (tmp_path / "stage_0.inference.onnx.data").read_bytes()[:24] == model.weight.detach().numpy().tobytes()
    assert made.error < 1e-6


class Fixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 1)
        self.rows = nn.Parameter(torch.randn(4, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * self.rows


def test_a_batch_size_that_must_be_fixed_is_said(tmp_path: Path) -> None:
    made = export_inference(Fixed(), regression, vectors(), tmp_path)
    assert not made.dynamic
    assert made.batches == (4,)
    assert made.stages[0].inputs[0].shape == (4, 6)
    assert made.warnings[0].startswith("the batch size is fixed at 4: with an open one, ")


class Deciding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            x = x + 1
        return self.a(x)


class Noisy(Deciding):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(F.dropout(x, 0.5))


class Split(Deciding):
    def encode(self, x: Tensor) -> Tensor:
        return self.a(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x)


class Rare(Deciding):
    def forward(self, x: Tensor) -> Tensor:
        return torch.special.airy_ai(self.a(x)) + 1


class Masked(Rare):
    def forward(self, x: Tensor) -> Tensor:
        mask = torch.arange(12).reshape(2, 6) < 2
        made = torch.index_put(x.new_zeros(2, 6, 3), (mask, torch.arange(2)), self.a.bias.sum())
        return self.a(x) + made.sum()


class RarePart(Deciding):
    def forward(self, x: Tensor) -> Tensor:
        return torch.special.bessel_j0(self.a(x)) + 1


def twice(model: nn.Module, batch: Any) -> Tensor:
    return regression(model, batch) + regression(model, batch)


def around(model: Any, batch: Any) -> Tensor:
    return model.encode(batch[0]).mean()


def beside(model: Any, batch: Any) -> Tensor:
    return model.a(batch[0]).mean() + model(batch[0]).mean()


@pytest.mark.parametrize(
    ("model", "loss", "said"),
    [
        (Deciding(), regression, ["depends on the values of a tensor", "if x.sum() > 0:"]),
        (Noisy(), regression, ["draws random numbers in eval mode", "F.dropout(x, 0.5)"]),
        (Rare(), regression, ["aten.special_airy_ai.default", "airy_ai(self.a(x)) + 1"]),
        (Masked(), regression, ["aten.index_put.default", "made = torch.index_put(x.new_zeros"]),
        (RarePart(), regression, ["prims.bessel_j0.default", "bessel_j0(self.a(x)) + 1"]),
        (Split(), twice, ["calls the model 2 times", "in twice"]),
        (Split(), around, ["does not call the model, and calls 'a' on its own", "in around"]),
        (Split(), beside, ["calls the model once, and calls 'a' on its own"]),
    ],
)
def test_refusals(model: nn.Module, loss: Callable[..., Tensor], said: list[str], tmp_path: Path) -> None:
    with pytest.raises(ExportError) as error:
        export_inference(model, loss, vectors(), tmp_path)
    for text in said:
        assert text in str(error.value)
    assert model.training
    assert not list(tmp_path.iterdir())


def test_a_plan_of_another_model_is_refused(tmp_path: Path) -> None:
    other = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))
    plan = planned(other, regression, vectors(), "2")
    with pytest.raises(ExportError, match="for another model"):
        export_inference(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 1)), regression, vectors(), tmp_path, plan=plan)


@pytest.mark.slow
def test_wrong_numbers_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxpipe.export.inference.check.tolerance", lambda dtypes: -1.0)
    with pytest.raises(ExportError, match="differ from the model's own"):
        export_inference(nn.Linear(6, 1), regression, vectors(), tmp_path)
    assert not list(tmp_path.iterdir())

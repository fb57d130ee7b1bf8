"""`metrics(model, batch)` cut into stages: the same numbers as the model in eval mode, where the weights are."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import golden_model
import numpy as np
import pytest
import torch
from evaluations import in_eager, in_pipeline, move_on
from small_models import CASES
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe
from fxpipe.builds.build import Build
from fxpipe.errors import BuildError, VerifyError
from fxpipe.inspection.sentences import evaluation_facts, evaluation_text
from fxpipe.inspection.subject import read_subject
from fxpipe.ir.law import verify
from fxpipe.ir.program import Output, info
from fxpipe.lowering.evaluation import Metrics, capture_evaluations
from fxpipe.lowering.first_of_each import SHAPES, first_of_each
from fxpipe.runtime.wires.addresses import moves
from fxpipe.task.batch import Batch
from fxpipe.tracing.evaluation import capture_evaluation


def compiled(
    model: nn.Module, batch: Any, metrics: Metrics | None, batches: Iterable[Any] | None = None, **options: Any
) -> Build:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    chosen = {"workers": 2, "cost": "analytic", **options}
    evaluation = None if metrics is None else (metrics, [batch] if batches is None else batches)
    return fxpipe.compile(model, loss, batch, evaluation=evaluation, **chosen)


def vectors(size: int = 8) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 6), torch.randint(0, 5, (size,))


def accuracy(model: nn.Module, batch: Any) -> dict[str, Any]:
    logits = model(batch[0])
    return {"accuracy": (logits.argmax(1) == batch[1]).float().mean(), "loss": F.cross_entropy(logits, batch[1])}


def layers(*more: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), *more, nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 5))


def test_only_tied_weights_move() -> None:
    case = CASES["gpt"]
    model, (batch,) = case.make(), case.batches(1)

    def metrics(model: nn.Module, batch: Any) -> dict[str, Any]:
        return {"loss": case.loss(model, batch)}

    build = fxpipe.compile(
        model, case.loss, batch, workers=2, cost="analytic", forward_at=["blocks.1"], evaluation=(metrics, [batch])
    )
    move_on(model)
    assert in_pipeline(build, model, batch) == pytest.approx(in_eager(model, metrics, batch), rel=1e-6)
    assert [(m.name, m.source, m.reader) for m in moves(build.plan)] == [("tok.weight", 0, 1)]
    read = [set(stage.forward.weights) for stage in build.plan.evaluations[0].stages]
    assert read[0] & read[1] == {"tok.weight"}
    assert read[0] | read[1] == {p.name for p in build.plan.parameters}


def test_of_a_batch_norm_cut_apart_the_smaller_part_moves() -> None:
    """Its statistics are where its forward is, its weights where its backward is."""
    case = CASES["conv"]
    model, (batch,) = case.make(), case.batches(1)
    build = fxpipe.compile(
        model,
        case.loss,
        batch,
        workers=2,
        cost="analytic",
        forward_at=["layers.1"],
        backward_at=["layers.3"],
        evaluation=(lambda m, b: {"loss": case.loss(m, b)}, [batch]),
    )
    moved = moves(build.plan)
    assert {(m.name, m.source, m.reader) for m in moved} == {
        (f"layers.{i}.1.running_{kind}", 1, 0) for i in (1, 2) for kind in ("mean", "var")
    }


def test_training_is_the_same_with_and_without_an_evaluation() -> None:
    batch = vectors()
    model = layers(nn.BatchNorm1d(8), nn.Dropout(0.5))
    with_it, without = compiled(model, batch, accuracy), compiled(model, batch, None)
    assert {name: text for name, text in with_it.files.items() if name.startswith("stage")} == without.files
    assert dataclasses.replace(with_it.plan, evaluations=()) == without.plan
    assert not without.plan.not_evaluated
    assert evaluation_facts(without.plan) is None


def test_every_shape_of_batch_has_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setenv("FXPIPE_DUMP", str(tmp_path))
    model, whole, rest = layers(), vectors(8), vectors(3)
    build = compiled(model, whole, accuracy, [whole, vectors(8), rest])
    assert {n for n in build.files if n.startswith("evaluate")} == {
        "evaluate_0.py",
        "evaluate_1.py",
        "evaluate_0_1.py",
        "evaluate_1_1.py",
    }
    for shape, batch in enumerate((whole, rest)):
        spec = build.plan.evaluations[shape]
        assert [leaf.tensor.shape for leaf in spec.batch if leaf.tensor] == [v.shape for v in batch]
        assert in_pipeline(build, model, batch, shape) == pytest.approx(in_eager(model, accuracy, batch), rel=1e-6)
        assert spec.edges
        assert all(edge.name.startswith(f"evaluate.{shape}:") for edge in spec.edges)
        lines = [line for line in build.passes if line.startswith(f"evaluation {shape}: ")]
        assert " fold " in lines[0]
        assert " codegen " in lines[-1]
    dumped = {path.name for path in tmp_path.iterdir()}
    assert dumped > {"01_fold.py", "evaluate_0_01_fold.py", "evaluate_1_01_fold.py"}


def test_a_constant_of_the_batch_is_part_of_its_shape() -> None:
    def metrics(model: nn.Module, batch: Any) -> dict[str, Any]:
        return {"scaled": model(batch[0]).mean() * float(batch[2])}

    model, (x, y) = layers(), vectors()
    batches = [(x, y, 2.0), (x, y, 3.0), (x, y, 2.0)]
    build = compiled(model, (x, y), metrics, batches)
    assert [e.batch[2].constant for e in build.plan.evaluations] == [2.0, 3.0]
    for shape in (0, 1):
        assert in_pipeline(build, model, batches[shape], shape) == pytest.approx(
            in_eager(model, metrics, batches[shape]), rel=1e-6
        )


def test_metrics_are_made_where_their_values_are() -> None:
    """An eval-only branch, metrics of both workers, a weight as a metric, one value under two names."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 5)

        def forward(self, x: Tensor) -> Any:
            h = self.first(x).relu()
            if self.training:
                return self.last(h)
            return h.square().mean(), self.last(h).softmax(1)

    def metrics(model: Any, batch: Any) -> dict[str, Any]:
        size, shares = model(batch[0])
        return {
            "best": shares.amax(1).mean(),
            "size": size,
            "again": size,
            "bias": model.last.bias[0],
            "rows": len(batch[0]),
            "single": shares[:1, :1],
        }

    torch.manual_seed(0)
    model, batch = Model(), vectors()
    build = compiled(model, batch, metrics, forward_at=["last"])
    stages = build.plan.evaluations[0].stages
    assert stages[0].forward.metrics == ("size", "again")
    assert stages[1].forward.metrics == ("best", "bias", "single")
    assert build.plan.evaluations[0].constants == {"rows": 8.0}
    move_on(model)
    assert in_pipeline(build, model, batch) == pytest.approx(in_eager(model, metrics, batch), rel=1e-6)
    assert not moves(build.plan)


def test_constants_and_what_training_does_not_read() -> None:
    """Tensors from outside the model; a buffer and a plain attribute that only eval mode reads; a frozen weight."""
    weights = torch.rand(5)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 5)
            self.first.weight.requires_grad_(False)
            self.register_buffer("scale", torch.rand(8))
            self.table = torch.rand(5)
            self.unread = nn.Parameter(torch.rand(5), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                return self.last(self.first(x))
            return self.last(self.first(x) * self.scale) * self.table + self.unread

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], weight=weights)

    other = torch.rand(5)

    def metrics(model: nn.Module, batch: Any) -> dict[str, Any]:
        logits = model(batch[0]) * other
        return {"loss": F.cross_entropy(logits, batch[1], weight=weights)}

    torch.manual_seed(0)
    model, batch, rest = Model(), vectors(), vectors(4)
    build = fxpipe.compile(
        model,
        loss,
        batch,
        workers=2,
        cost="analytic",
        forward_at=["last"],
        evaluation=(metrics, [batch, rest]),
    )
    for shape, now in enumerate((batch, rest)):
        assert in_pipeline(build, model, now, shape) == pytest.approx(in_eager(model, metrics, now), rel=1e-6)
    rows = {b.name: b for b in build.plan.buffers}
    assert {"scale", "table", "constant_0"} < set(rows)
    own = [name for name in rows if name.startswith("evaluate.")]
    assert own == ["evaluate.0.constant_0"]  # of both shapes; the class weights are training's
    assert torch.equal(build.tensors[own[0]], other)
    assert not rows[own[0]].saved
    for shape in build.plan.evaluations:
        for worker, stage in enumerate(shape.stages):
            assert all(worker in rows[name].workers for name in stage.forward.buffers)
    assert [(m.name, m.source, m.reader, m.once) for m in moves(build.plan)] == [("unread", 0, 1, True)]


def test_an_evaluation_changes_nothing() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = layers()
            self.register_buffer("calls", torch.zeros(()))
            self.register_buffer("unread", torch.zeros(()))
            self.shown: Tensor | None = torch.zeros(8, 5)
            self.kept = torch.ones(())

        def forward(self, x: Tensor) -> Tensor:
            if not self.training:
                self.calls.add_(1)
                self.unread.add_(1)
                self.kept = self.kept * 2
            self.shown = self.inner(x)
            return self.shown + self.calls * self.kept

    model, batch = Counting(), vectors()
    build = compiled(model, batch, accuracy)
    assert model.calls == 0
    assert model.kept == 1
    assert build.warnings == ("evaluation: it changes buffer unread: no metric reads it, and the change is not kept",)
    assert {n for stage in build.plan.evaluations[0].stages for n in stage.forward.updates} == {"calls", "kept"}
    assert in_pipeline(build, model, batch) == pytest.approx(in_eager(model, accuracy, batch), rel=1e-6)


def test_every_module_is_back_in_its_own_mode() -> None:
    model = layers(nn.Dropout(0.5), nn.BatchNorm1d(8))
    model[3].eval()
    before = [m.training for m in model.modules()]
    capture_evaluation(model, accuracy, vectors())
    assert [m.training for m in model.modules()] == before


def test_a_transformer_takes_no_shortcut_that_cannot_be_cut() -> None:
    """torch's encoder layer has a fused operator for eval mode."""
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1)
    model = nn.Sequential(nn.Linear(6, 8), encoder, nn.Flatten(), nn.Linear(24, 5))
    batch = torch.randn(4, 3, 6), torch.randint(0, 5, (4,))
    build = compiled(model, batch, accuracy, forward_at=["1.layers.0.linear1"])
    assert in_pipeline(build, model, batch) == pytest.approx(in_eager(model, accuracy, batch), rel=1e-5)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (lambda model, batch: {"loss": model(batch[0]).mean().item()}, "return tensors from metrics()"),
        (lambda model, batch: {"loss": float(model(batch[0]).mean())}, "return tensors from metrics()"),
        (lambda model, batch: {"loss": model(batch[0])}, "shape [8, 5]"),
        (lambda model, batch: model(batch[0]).mean(), "returned a tensor, not a dictionary"),
        (lambda model, batch: {"rows": 8}, "returned no tensor"),
        (lambda model, batch: {"loss": "low", "n": model(batch[0]).mean()}, "'loss' as a str"),
        (lambda model, batch: {1: model(batch[0]).mean()}, "calls a metric 1"),
        (
            lambda model, batch: {"loss": model(batch["x"]).mean()},
            "run metrics(model(), batch) alone, with a batch of eval_data()",
        ),
        (lambda model, batch: {"loss": model(batch["x"]).mean()}, "metrics(model, batch) raised TypeError"),
    ],
)
def test_a_build_says_why_its_pipeline_does_not_evaluate(value: Metrics, said: str) -> None:
    build = compiled(layers(), vectors(), value)
    assert not build.plan.evaluations
    assert said in build.plan.not_evaluated
    assert [w for w in build.warnings if said in w]
    assert said in evaluation_text(evaluation_facts(build.plan))
    assert not [name for name in build.files if name.startswith("evaluate")]


def test_too_many_shapes_no_batch_and_no_pytree_are_reasons() -> None:
    model = layers()
    many = [vectors(n) for n in range(1, SHAPES + 2)]
    assert len(list(first_of_each(map(Batch.of, [*many[:-1], *many[:-1]])))) == SHAPES
    for batches, said in (
        (many, "more than 8 shapes; pad them"),
        ((), "eval_data() gave no batch"),
        ([np.zeros(3)], "numpy.ndarray"),
    ):
        assert said in capture_evaluations(model, accuracy, batches, "cpu").reason


def test_reading_the_batches_leaves_random_numbers_alone() -> None:
    def batches() -> Iterator[Any]:
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        yield vectors()

    model = layers()
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    assert capture_evaluations(model, accuracy, batches(), "cpu").captured
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert (np.random.get_state()[1] == states[2]).all()


def test_a_saved_build_keeps_its_evaluations(tmp_path: Path) -> None:
    batch = vectors()
    build = compiled(layers(), batch, accuracy).save(tmp_path / "build")
    loaded = fxpipe.load(tmp_path / "build")
    assert loaded.plan == build.plan
    assert dict(loaded.files) == dict(build.files)
    facts = evaluation_facts(loaded.plan)
    assert facts is not None
    assert facts["metrics"] == ["accuracy", "loss"]
    assert facts["shapes"][0]["batch"] == {"batch[0]": [8, 6], "batch[1]": [8]}
    assert evaluation_text(facts) == "evaluation: accuracy, loss in evaluate_0.py, evaluate_1.py"
    file = tmp_path / "build" / "evaluate_1.py"
    file.write_text(file.read_text() + "# mine\n")
    assert read_subject(tmp_path / "build").edited == ("evaluate_1.py",)
    build.save(tmp_path / "build")
    file.unlink()
    with pytest.raises(BuildError, match=r"evaluate_1\.py missing"):
        fxpipe.load(tmp_path / "build")


def test_an_evaluation_has_neither_loss_nor_backward() -> None:
    torch.manual_seed(0)
    program = capture_evaluation(golden_model.Golden(), golden_metrics, golden_model.batch()).program
    verify(program)
    with pytest.raises(VerifyError, match="an evaluation has only metrics and buffers"):
        verify(dataclasses.replace(program, outputs=(Output("loss"), *program.outputs[1:])))
    broken = program.copy()
    info(list(broken)[-1]).phase = "B"
    with pytest.raises(VerifyError, match="is backward, in an evaluation"):
        verify(broken)


def test_what_cannot_be_sent_leaves_training_as_it_is() -> None:
    """Metrics that would send a sparse tensor from worker to worker."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 5)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x).relu()
            return self.last(h) if self.training else torch.sparse.mm(h.to_sparse(), self.last.weight.t())

    batch = vectors()
    build = compiled(Model(), batch, lambda m, b: {"mean": m(b[0]).mean()}, forward_at=["last"])
    assert "sparse tensor" in build.plan.not_evaluated
    assert "make it dense" in build.plan.not_evaluated
    assert set(build.files) == {"stage_0.py", "stage_1.py"}


def golden_metrics(model: nn.Module, batch: Any) -> dict[str, Any]:
    loss = golden_model.loss(model, batch)
    return {"loss": loss, "perplexity": loss.exp()}

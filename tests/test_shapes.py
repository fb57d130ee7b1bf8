"""Batches of several shapes: last smaller ones, several lengths, other constants. Every shape has stages of its own."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pipelines import sgd
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe
from fxpipe.builds.build import Build
from fxpipe.errors import BatchError, BuildError, CutError
from fxpipe.lowering.agreement import Agreement, worst_agreement
from fxpipe.lowering.compare_with_eager import compare_with_eager
from fxpipe.lowering.first_of_each import SHAPES
from fxpipe.lowering.shapes import _check_alike
from fxpipe.plan.build_folder import read_plan
from fxpipe.plan.signed import signed
from fxpipe.runtime.options import RunOptions
from fxpipe.runtime.process.start import run_local
from fxpipe.task.hooks import Hooks
from fxpipe.task.model_file import Task

SIZES = ((8, 6), (8, 3), (4, 6), (4, 9))  # samples, tokens


class Reader(nn.Module):
    """A model whose normalisation has state, and whose recurrent layer has as many units as a text has tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.norm = nn.BatchNorm1d(8)
        self.cell = nn.RNNCell(8, 8)
        self.middle = nn.Linear(8, 8)
        self.head = nn.Linear(8, 11)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.norm(self.embed(ids).transpose(1, 2)).transpose(1, 2)
        state = hidden.new_zeros(len(ids), 8)
        states = []
        for token in hidden.unbind(1):
            state = self.cell(token, state)
            states.append(state)
        return self.head(torch.tanh(self.middle(torch.stack(states, 1))))


def loss(model: nn.Module, batch: Any) -> Tensor:
    ids, labels = batch
    return F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())


def batch_of(samples: int, tokens: int, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 11, (samples, tokens), generator=generator)
    labels = torch.randint(0, 11, (samples, tokens), generator=generator)
    labels[torch.rand(samples, tokens, generator=generator) < 0.3] = -100
    return ids, labels


def model_of(norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    model = Reader().double()
    if not norm:
        model.norm = nn.Identity()
    return model


def built(schedule: str = "1f1b", workers: int = 2, norm: bool = False, sizes: Any = SIZES, **more: Any) -> Build:
    first, *others = [batch_of(*size) for size in sizes]
    options = {"microbatches": 2, "cost": "analytic", **more}
    return fxpipe.compile(model_of(norm), loss, first, shapes=others, workers=workers, schedule=schedule, **options)


@pytest.fixture(scope="module")
def whole() -> Build:
    return built()


def test_every_shape_is_compared_with_eager(whole: Build) -> None:
    assert len(whole.of_shapes) == len(SIZES)
    for part, size in zip(whole.of_shapes, SIZES, strict=True):
        assert compare_with_eager(part, model_of(), loss, batch_of(*size)).largest < 1e-12


def test_an_error_counts_though_another_shape_was_not_compared() -> None:
    agreements = [Agreement(0.5, {}, {}), Agreement(0.0, {}, {}, not_compared="rrelu")]
    for order in (agreements, agreements[::-1]):
        found = worst_agreement(order)
        assert (found.largest, found.not_compared) == (0.5, "rrelu")


def test_weights_and_buffers_stay_where_they_are(whole: Build) -> None:
    plan = built(norm=True).plan
    for of_shape in plan.of_shapes:
        for first, stage in zip(plan.stages, of_shape.stages, strict=True):
            assert set(stage.backward.gradients) <= set(first.backward.gradients)
            assert set(stage.forward.weights) <= set(first.forward.weights)
            assert set(stage.forward.updates) == set(first.forward.updates)
    assert len({len(of_shape.step.units) for of_shape in plan.of_shapes}) == 3  # by the number of tokens


@pytest.mark.parametrize("field", ["weights", "gradients", "loss"])
def test_a_plan_whose_shapes_hold_different_things_is_refused(whole: Build, tmp_path: Path, field: str) -> None:
    whole.save(tmp_path / "build")
    body = json.loads((tmp_path / "build" / "plan.json").read_text())
    del body["digest"]
    part = body["steps"][1]["stages"][0]["backward" if field == "gradients" else "forward"]
    part[field] = True if field == "loss" else [*part[field], "head.weight"]
    (tmp_path / "build" / "plan.json").write_text(signed(body))
    with pytest.raises(BuildError, match="for batches of the first shape"):
        read_plan(tmp_path / "build")


def test_a_shape_that_was_not_captured_is_named(whole: Build) -> None:
    pipeline = whole.local(optimizer=sgd, new_shapes=0)
    pipeline.step(batch_of(4, 6))
    with pytest.raises(
        BatchError, match=r"step 2 does not fit .*: batch\[0\] is int64\[4, 7\], captured as int64\[4, "
    ):
        pipeline.step(batch_of(4, 7))


def test_there_are_not_more_shapes_than_fit() -> None:
    sizes = [(2, 2 + i) for i in range(SHAPES + 1)]
    with pytest.raises(BatchError, match=f"more than {SHAPES} shapes"):
        built(sizes=sizes)


def test_cuts_that_no_other_shape_allows_are_refused() -> None:
    class Turned(nn.Module):
        """Long texts meet the layers in the other order."""

        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            one, two = (self.one, self.two) if x.shape[1] < 5 else (self.two, self.one)
            return two(torch.tanh(one(x)))

    def square(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().mean()

    with pytest.raises(CutError, match="cannot be cut so that gradients stay on their workers"):
        fxpipe.compile(
            Turned(), square, torch.randn(4, 3, 4), shapes=[torch.randn(4, 6, 4)], workers=2, cost="analytic"
        )


@pytest.mark.parametrize("schedule", ["1f1b", "async"])
def test_every_shape_has_tokens_of_its_own(schedule: str) -> None:
    cuts = {"forward_at": ["middle"] * 2, "backward_at": ["middle"] * 2}  # worker 1 has nothing to do
    build = built(schedule, 3, sizes=SIZES[:2], **cuts)
    tokens = [edge.name for edge in build.plan.all_edges if edge.kind == "token"]
    assert len(tokens) == len(set(tokens)) >= 2


def test_totals_read_the_constants_of_their_own_shape() -> None:
    def weighted(model: nn.Module, batch: Any) -> Tensor:
        ids, labels = batch
        weight = torch.tensor([1.0] * 10 + [5.0] if ids.shape[1] == 3 else [3.0] + [1.0] * 10, dtype=torch.float64)
        return F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), weight=weight)

    batches = [batch_of(*size) for size in SIZES[:2]]
    options: dict[str, Any] = {"workers": 2, "schedule": "1f1b", "microbatches": 2, "cost": "analytic"}
    build = fxpipe.compile(model_of(), weighted, batches[0], shapes=batches[1:], **options)
    for part, batch in zip(build.of_shapes, batches, strict=True):
        assert part.plan.step.totals is not None
        assert compare_with_eager(part, model_of(), weighted, batch).largest < 1e-12


class Counted(nn.Module):
    """Counts short texts; batches of all lengths read the count where `reads` says."""

    def __init__(self, reads: str) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("seen", torch.ones(()))
        self.reads = reads

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.one(x))
        if self.reads == "at home":
            hidden = hidden + self.seen
        if x.shape[1] < 5:
            self.seen = self.seen + hidden.detach().mean() * 0 + 1
        hidden = torch.tanh(self.two(hidden))
        if self.reads == "elsewhere":
            hidden = hidden + self.seen
        if self.reads == "in backward":
            hidden = hidden * self.seen
        return self.three(hidden)


def counted(reads: str) -> Build:
    long, short = torch.ones(4, 6, 4), torch.ones(4, 3, 4)
    return fxpipe.compile(
        Counted(reads),
        lambda model, batch: model(batch).square().mean(),
        short,
        shapes=[long],
        evaluation=(lambda model, batch: {"seen": model.seen + model(batch).sum() * 0}, [short]),
        workers=3,
        microbatches=1,
        schedule="async",
        cost="analytic",
        forward_at=["two", "three"],
    )


@pytest.mark.parametrize("reads", ["nowhere", "at home"])
def test_evaluations_see_buffers_that_a_later_batch_of_another_shape_updates(tmp_path: Path, reads: str) -> None:
    counted(reads).save(tmp_path / "build")
    data = [torch.randn(4, tokens, 4) for tokens in (3, 6, 6, 3, 6, 6, 3)]
    task = Task(Hooks(optimizer=sgd, train_data=lambda: data, eval_data=lambda: data[:1]))
    summary = run_local(RunOptions(str(tmp_path / "build"), eval_every=1), task)
    assert [row["metrics"]["seen"] for row in summary["evaluations"]] == [2, 2, 2, 3, 3, 3, 4]


@pytest.mark.parametrize(
    ("reads", "said"), [("elsewhere", "forward of worker 1 reads seen"), ("in backward", "backward of worker 1 reads")]
)
def test_what_only_another_shape_updates_is_read_at_its_home_and_by_forwards_alone(reads: str, said: str) -> None:
    with pytest.raises(CutError, match=f"{said}.* batches of another shape update"):
        counted(reads)


def test_cuts_before_modules_hold_whatever_comes_between() -> None:
    class Deeper(nn.Module):
        """Short texts take more steps outside its modules."""

        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.three = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.one(x)
            for _ in range(6 if x.shape[1] == 3 else 1):
                hidden = torch.tanh(hidden)
            return self.three(torch.tanh(self.two(hidden)))

    for sizes in ((3, 6), (6, 3)):
        first, other = (torch.randn(4, size, 4) for size in sizes)
        plan = fxpipe.compile(
            Deeper(),
            lambda model, batch: model(batch).square().mean(),
            first,
            shapes=[other],
            workers=3,
            cost="analytic",
            forward_at=["two", "three"],
        ).plan
        for of_shape in plan.of_shapes:
            assert [of_shape.step.units[stage.forward_units[0]] for stage in of_shape.stages] == ["one", "two", "three"]


def test_a_build_of_one_shape_says_nothing_of_shapes() -> None:
    build = built(sizes=[SIZES[0], SIZES[0]])
    assert len(build.plan.steps) == 1
    assert all(not name.endswith("_1_1.py") for name in build.files)


def test_a_batch_that_microbatches_do_not_divide_says_so() -> None:
    with pytest.raises(BatchError, match="2 microbatches do not divide a batch of 3"):
        built(sizes=[(4, 3), (3, 3)])


def test_the_model_is_left_as_it_was() -> None:
    model = model_of()
    before = copy.deepcopy(model.state_dict())
    fxpipe.compile(model, loss, batch_of(4, 3), shapes=[batch_of(2, 3)], workers=2, cost="analytic")
    torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)


def test_a_shape_that_leaves_out_a_module_warns_of_nothing() -> None:
    """Its parameters keep their values in such steps, as in eager PyTorch, and are trained by the others."""

    class Optional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.long, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            return self.last(self.long(x).tanh() if x.shape[1] > 4 else x)

    def square(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().mean()

    batches = [torch.randn(4, 6, 4), torch.randn(4, 3, 4)]
    build = fxpipe.compile(Optional(), square, batches[0], shapes=batches, workers=2, cost="analytic")
    assert len(build.plan.steps) == 2
    assert not build.warnings


@pytest.mark.parametrize("mode", ["same", "distinct"])
def test_the_hint_names_the_module_to_cut_before(mode: str) -> None:
    build = fxpipe.compile(model_of(), loss, batch_of(8, 6), workers=2, cost="analytic", cuts="same")
    plan = build.plan
    if mode == "distinct":
        moved = dataclasses.replace(plan.stages[1], backward_units=(1, plan.stages[1].backward_units[1]))
        plan = plan.with_step(stages=(plan.stages[0], moved))
    one = plan.stages[1]
    backward = dataclasses.replace(one.backward, weights=(*one.backward.weights, "gru.weight_hh_l0"))
    made = plan.with_step(stages=(plan.stages[0], dataclasses.replace(one, backward=backward)))
    with pytest.raises(CutError, match=r"backward of worker 1 reads gru\.weight_hh_l0, too") as refused:
        _check_alike(plan, made, 1)
    assert "(--fp-cut gru, so that no cut goes through it)" in str(refused.value.hint)
    assert ("--cuts same" in str(refused.value.hint)) == (mode == "distinct")

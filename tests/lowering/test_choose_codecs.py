"""Which edges get codecs: those that are asked for; by `auto` those that the workers wait for, and no others."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.codecs import codec as make
from fxpipe.codecs.encoding import Encoding
from fxpipe.costs.codecs import codec_times
from fxpipe.errors import CodecError
from fxpipe.inspection.sentences import codec_facts, codec_text
from fxpipe.ir.program import Program
from fxpipe.lowering.choose_codecs import encoded, ratios_of
from fxpipe.lowering.new_shape import with_new_shape
from fxpipe.lowering.option_rules import check
from fxpipe.lowering.options import CompileOptions
from fxpipe.plan.cost_records import CodecTimes
from fxpipe.planner.device import CPU
from fxpipe.planner.links import Links, matrix
from fxpipe.simulator.of_build import forecast
from fxpipe.task.step_hooks import StepHooks

WIDTH, BATCH = 256, 64
FAST, SLOW = 100e9, 40e6  # bytes a second
WAYS = [("activation", 0, 1), ("activation", 1, 2), ("gradient", 2, 1), ("gradient", 1, 0)]
CUTS = ("2", "4")  # two layers for each of three workers


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


@functools.cache
def program(rows: int = BATCH) -> tuple[nn.Module, Tensor, Program]:
    """A step whose three parts take equally long, and whose messages take as long as a part on slow links."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))
    batch = torch.randn(rows, WIDTH)
    return model, batch, fxpipe.capture(model, loss, batch)


def links(slow: Sequence[tuple[int, int]]) -> Links:
    """Fast ones, but for some from one worker to another."""
    return Links(matrix([[SLOW if (i, j) in slow else FAST for j in range(3)] for i in range(3)]))


def lowered(codec: str, slow: Sequence[tuple[int, int]] = (), **options: Any) -> fxpipe.Build:
    options = {"workers": 3, "cost": "analytic", "forward_at": CUTS, "microbatches": 1} | options
    return fxpipe.lower(program()[2], codec=codec, links=links(slow), **options)


def packed(build: fxpipe.Build) -> dict[tuple[str, int, int], str]:
    return {(e.kind, e.src, e.dst): e.codec for e in build.plan.edges if e.codec}


def seconds(build: fxpipe.Build) -> float:
    return forecast(build.plan, build.costs).seconds_per_minibatch


def test_auto_packs_what_crosses_the_slow_link_alone() -> None:
    build = lowered("auto", slow=[(1, 2)])
    assert packed(build) == {("activation", 1, 2): "int8"}
    both = lowered("auto", slow=[(1, 2), (2, 1)])
    assert packed(both) == {("activation", 1, 2): "int8", ("gradient", 2, 1): "int8"}
    assert set(packed(lowered("auto", slow=[(1, 0)]))) == {("gradient", 1, 0)}


def test_auto_packs_nothing_where_links_are_fast() -> None:
    build = lowered("auto")
    assert packed(build) == {}
    assert build.files == lowered("none").files
    assert codec_facts(build.plan, build.costs) is None


@pytest.mark.parametrize("slow", [[], [(0, 1)], [(1, 2), (2, 1)], [(i, j) for i in range(3) for j in range(3)]])
@pytest.mark.parametrize("cuts", [{"forward_at": CUTS}, {"forward_at": (), "cuts": "auto"}])
def test_auto_is_never_slower_by_its_own_forecast(slow: list[tuple[int, int]], cuts: dict[str, Any]) -> None:
    auto, plain = lowered("auto", slow=slow, **cuts), lowered("none", slow=slow, **cuts)
    assert auto.costs.without_codecs == pytest.approx(seconds(plain))
    assert auto.costs.with_codecs == pytest.approx(seconds(auto), rel=0.01)
    assert seconds(auto) <= seconds(plain) * (1 + 1e-9)
    if packed(auto):
        assert seconds(auto) < 0.98 * seconds(plain)


def test_auto_leaves_out_codecs_that_take_longer_than_they_save(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(texts: Iterable[str], *rest: Any) -> dict[str, CodecTimes]:
        return dict.fromkeys(texts, CodecTimes(20e-9, 20e-9))

    monkeypatch.setattr("fxpipe.lowering.lower.codec_times", slow)
    assert packed(lowered("auto", slow=[(1, 2)])) == {}
    assert set(packed(lowered("int8", slow=[(1, 2)]))) == set(WAYS)  # who asks for it gets it


def test_what_is_compared_is_what_the_emitted_build_then_takes() -> None:
    plain, build = (lowered(codec, slow=[(1, 2)]) for codec in ("none", "activation=int8"))
    times = codec_times(["int8"], "cpu", False, None, CPU)
    codecs = {edge.name: edge.codec for edge in build.plan.edges if edge.codec}
    plan, costs = encoded(plain.plan, plain.costs, codecs, times)
    assert plan.edges == build.plan.edges
    for guessed, found in zip(costs.workers, build.costs.workers, strict=True):
        assert (guessed.forward, guessed.backward) == pytest.approx((found.forward, found.backward))
    assert forecast(plan, costs).seconds_per_minibatch == pytest.approx(seconds(build), rel=0.01)


def test_a_codec_that_is_asked_for_packs_all_that_it_is_for() -> None:
    assert packed(lowered("int8")) == dict.fromkeys(WAYS, "int8")
    assert packed(lowered("int4")) == {way: "int8" if way[0] == "gradient" else "int4" for way in WAYS}
    assert packed(lowered("gradient=topk:0.1")) == {way: "topk:0.1" for way in WAYS if way[0] == "gradient"}
    assert packed(lowered("activation=bf16,gradient=none")) == {way: "bf16" for way in WAYS if way[0] == "activation"}
    assert packed(lowered("none")) == {}


def test_cuts_are_chosen_for_what_travels() -> None:
    """On links where whole values take longer than computing, packed ones let more workers take part."""
    cuts = {"forward_at": (), "cuts": "same"}
    slow = [(i, j) for i in range(3) for j in range(3)]
    plain, coded = (lowered(codec, slow=slow, **cuts) for codec in ("none", "int8"))
    bottlenecks = [build.costs.partitions[-1].bottleneck for build in (plain, coded)]
    assert bottlenecks[1] < 0.7 * bottlenecks[0]
    assert seconds(coded) < 0.7 * seconds(plain)


@pytest.mark.parametrize(("codec", "slow"), [("auto", [(1, 2)]), ("activation=int8,gradient=none", [])])
def test_other_shapes_of_batch_get_like_codecs(codec: str, slow: list[tuple[int, int]]) -> None:
    model, batch, _ = program()
    build = fxpipe.compile(
        model, loss, batch, shapes=[batch[:48], batch[:1]], codec=codec, links=links(slow),
        workers=3, cost="analytic", forward_at=CUTS, microbatches=1,
    )  # fmt: skip
    first, second, tiny = (
        {(e.kind, e.src, e.dst): e.codec for e in plan.edges if e.codec} for plan in build.plan.of_shapes
    )
    assert first == second
    assert first == dict.fromkeys([("activation", 1, 2)] if slow else [w for w in WAYS if w[0] == "activation"], "int8")
    assert tiny == first  # 1024 bytes are still worth it
    assert all(e.packed == make(e.codec).packed(e.tensor) for e in build.plan.all_edges if e.codec)
    smaller = fxpipe.compile(
        model, loss, batch[:, :], shapes=[torch.randn(8, WIDTH)], codec=codec, links=links(slow),
        workers=3, cost="analytic", forward_at=CUTS, microbatches=1,
    )  # fmt: skip
    on_demand = with_new_shape(smaller, batch[:48], StepHooks(lambda: model, loss, same=True))
    assert {(e.kind, e.src, e.dst): e.codec for e in on_demand.plan.of_shapes[-1].edges if e.codec} == first


def test_a_shape_that_is_larger_than_the_first_gets_what_was_asked() -> None:
    """The first shape's values are too small to pack, those of the second are not."""
    model, loss_ = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))), loss
    build = fxpipe.compile(
        model, loss_, torch.randn(4, 16), shapes=[torch.randn(64, 16)], codec="int8",
        workers=2, cost="analytic", forward_at=["2"], microbatches=1,
    )  # fmt: skip
    assert [sum(bool(e.codec) for e in plan.edges) for plan in build.plan.of_shapes] == [0, 2]
    assert build.plan.codec == "int8"


def test_evaluations_and_totals_send_values_as_they_are() -> None:
    model, batch, _ = program()
    build = fxpipe.compile(
        model, loss, batch, codec="int8", workers=3, cost="analytic", forward_at=CUTS, microbatches=2,
        evaluation=(lambda m, b: {"loss": m(b).square().mean()}, [batch]),
    )  # fmt: skip
    (evaluation,) = build.plan.evaluations
    assert evaluation.edges
    assert not any(edge.codec or edge.packed for edge in evaluation.edges)
    assert all(edge.codec for edge in build.plan.edges)
    assert "fxpipe.codecs" not in build.files["evaluate_1.py"]


def test_what_is_said_of_codecs() -> None:
    build = lowered("auto", slow=[(1, 2)])
    found = codec_facts(build.plan, build.costs)
    assert found is not None
    assert found["edges"] == {"int8": 1}
    assert found["ways"] == ["activation 1 → 2"]
    assert found["plain_bytes"] == 4 * BATCH * WIDTH * 4
    assert found["bytes"] == 3 * BATCH * WIDTH * 4 + BATCH * WIDTH // 64 * 66
    assert found["plain_seconds"] == pytest.approx(seconds(lowered("none", slow=[(1, 2)])))
    assert codec_text(found) == "codecs: int8 on 1 of 4 edges; values take 0.81 of their bytes"


def test_the_planner_knows_what_is_small() -> None:
    ratios = ratios_of(Encoding.parse("activation=int4,gradient=int8"))
    assert (ratios.activation, ratios.gradient, ratios.saved, ratios.weights) == (18 / 128, 66 / 256, 1.0, 1.0)
    (auto,) = Encoding.parse("auto").candidates
    assert ratios_of(auto).weights == 1.0  # auto leaves copies whole, and so the planner must not think them small


@pytest.mark.parametrize(
    ("codec", "message"),
    [
        ("int9", "there is no codec 'int9', did you mean 'int8'"),
        ("activations=int8", "there is no kind of edge 'activations', did you mean 'activation'"),
        ("activation=topk:0.1", "topk is only for gradient, weights, outer, not for activation"),
        ("gradient=topk:2", "has no fraction"),
        ("gradient=int8,gradient=int4", "gradient has two codecs"),
        ("int8:3", "codec 'int8' has no option"),
        ("gradient", "there is no codec 'gradient'"),
    ],
)
def test_codecs_that_make_no_sense(codec: str, message: str) -> None:
    with pytest.raises(CodecError, match=message):
        lowered(codec)
    with pytest.raises(CodecError, match=message):
        fxpipe.compile(nn.Linear(2, 2), loss, torch.ones(2, 2), codec=codec)


def test_a_codec_for_other_dtypes_leaves_values_as_they_are() -> None:
    assert packed(lowered("activation=bits")) == {}


def test_gradients_are_not_carried_over_where_the_scale_of_the_loss_moves() -> None:
    options: dict[str, Any] = {"autocast": "fp16", "schedule": "1f1b", "cost": "analytic"}
    model, batch, _ = program()
    for text in ("gradient=topk:0.1", "lowrank:2"):
        with pytest.raises(CodecError, match="adds what it left out of one gradient to the next"):
            fxpipe.compile(model, loss, batch, codec=text, **options)
    check(CompileOptions(codec="topk", autocast="bf16"))
    check(CompileOptions(codec="int8", **options))

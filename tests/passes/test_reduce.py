"""Sums over replicas: which gradients are in which bucket, where the code hands them over, and that values stay."""

from __future__ import annotations

import dataclasses
import re
from itertools import pairwise
from typing import Any

import pytest
import torch
from cached import captured, lowered, passed
from covering import covering
from program_text import placed
from torch import Tensor, nn
from two_layers import two_layers

import fxpipe
from fxpipe.builds.build import Build
from fxpipe.errors import CutError, VerifyError
from fxpipe.ir.law import verify
from fxpipe.ir.program import Program, info, size_of, value
from fxpipe.ir.transform import run_passes
from fxpipe.ir.wire import is_reduce, members_of
from fxpipe.lowering.lower import lower
from fxpipe.lowering.options import CompileOptions
from fxpipe.lowering.shapes import capture_shape
from fxpipe.passes import emitting_passes
from fxpipe.passes.comm import Comm
from fxpipe.passes.reduce import LAST_BYTES, Reduce
from fxpipe.passes.split import Split
from fxpipe.plan.consistency import check
from fxpipe.plan.spec import BucketSpec
from fxpipe.task.batch import Batch


def test_a_bucket_waits_for_its_last_member() -> None:
    program = run_passes(placed(two_layers()), [Comm(), Reduce((2,))])
    (node,) = (n for n in program if is_reduce(n))
    assert [n.name for n in members_of(node) if n] == ["d__2_mm", "d__0_mm"]
    assert node.prev.name == "d__0_mm"
    assert program.buckets == ((BucketSpec("bucket_0", ("2.weight", "0.weight"), 32),),)


def test_workers_without_replicas_hand_nothing_over() -> None:
    program = run_passes(placed(two_layers(), 2), [Comm()])
    made = run_passes(program, [Reduce((1, 2))])
    assert [info(n).worker for n in made if is_reduce(n)] == [1]
    assert [len(buckets) for buckets in made.buckets] == [0, 1]
    for replicas in ((), (1, 1)):
        same = run_passes(program, [Reduce(replicas)])
        assert not any(is_reduce(n) for n in same)
        assert same.replicas == same.buckets == ()


def test_without_replicas_the_files_and_the_plan_are_as_before() -> None:
    plain, one = lowered("gpt", workers=2), lowered("gpt", workers=2, reduce=Reduce((1, 1)))
    assert (one.files, one.plan) == (plain.files, plain.plan)
    assert plain.plan.replicas == ()
    assert all(stage.buckets == () for stage in plain.plan.stages)


BUCKETS = [(4096, 1024), (9000, 9000), (1, 1), (2**20, 2000)]
"""Bytes of a bucket at most, and of the last."""


@pytest.mark.parametrize(
    ("name", "sizes", "schedule"), covering(["gpt", "conv", "lstm"], BUCKETS, ["1f1b", "zb-h1"], strength=1)
)
def test_buckets_hold_all_gradients_in_their_order_and_are_as_full_as_they_can_be(
    name: str, sizes: tuple[int, int], schedule: str
) -> None:
    """Of all gradients in the order of the code, runs are taken from the end: as long as the limit allows."""
    most, last = sizes
    reduce = Reduce((2, 2), most, last)
    program = passed(captured(name)[2], workers=2, schedule=schedule, reduce=reduce)
    named = {p.names[0]: program.gradients().get(p.node) for p in program.parameters}
    order = {node: i for i, node in enumerate(program.graph.nodes)}
    for worker, buckets in enumerate(program.buckets):
        phase = program.phases[-1]
        mine = [(n, g) for n, g in named.items() if g is not None and info(g).worker == worker]
        mine.sort(key=lambda row: (order[row[1]] if info(row[1]).phase == phase else -1, order[row[1]]))
        assert [name for bucket in buckets for name in bucket.parameters] == [name for name, _ in mine]
        if not mine:
            continue
        sizes = {name: size_of(value(node)) for name, node in mine}
        limits = [most] * (len(buckets) - 1) + [min(most, last)]
        for bucket, limit in zip(buckets, limits, strict=True):
            assert bucket.bytes == sum(sizes[n] for n in bucket.parameters)
            assert bucket.bytes <= limit or len(bucket.parameters) == 1
        for (before, after), limit in zip(pairwise(buckets), limits[1:], strict=True):
            assert after.bytes + sizes[before.parameters[-1]] > limit
        calls = [n for n in program if is_reduce(n) and info(n).worker == worker]
        assert {info(n).phase for n in calls} == {phase}
        here = [n for n in program if info(n).worker == worker and info(n).phase == phase]
        for node in calls:
            inside = [order[m] for m in members_of(node) if m in here]
            before = here[here.index(node) - 1] if node is not here[0] else None
            assert before is None or is_reduce(before) or order[before] == max(inside)


def test_by_default_buckets_hold_an_eighth_and_the_last_one_is_small() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(300, 300, bias=False) for _ in range(32)))  # 360,000 bytes each
    program = fxpipe.capture(model, lambda m, x: m(x).sum(), torch.ones(2, 300))
    (stage,) = lower(program, workers=1, cost="analytic", reduce=Reduce((2,))).plan.stages
    assert [len(bucket.parameters) for bucket in stage.buckets] == [2, 4, 4, 4, 4, 4, 4, 4, 2]  # an eighth is four
    assert stage.buckets[-1].parameters == ("1.weight", "0.weight")
    assert stage.buckets[-1].bytes <= LAST_BYTES < stage.buckets[1].bytes


class Mixed(nn.Module):
    """Layers of two dtypes in turn."""

    def __init__(self) -> None:
        super().__init__()
        kinds = (torch.float32, torch.float64, torch.float32, torch.float64)
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False, dtype=kind) for kind in kinds)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return x


def mixed() -> Program:
    torch.manual_seed(0)
    return fxpipe.capture(Mixed(), lambda m, x: m(x).sum(), torch.ones(2, 4))


def test_a_bucket_has_one_dtype() -> None:
    made = lower(mixed(), workers=1, cost="analytic", reduce=Reduce((2,))).plan.stages[0].buckets
    found = [(b.name, b.parameters, b.bytes) for b in made]
    assert found == [  # the one that is complete first comes first
        ("bucket_0", ("layers.3.weight", "layers.1.weight"), 2 * 128),
        ("bucket_1", ("layers.2.weight", "layers.0.weight"), 2 * 64),
    ]


def reduced(sharded: bool = False) -> Program:
    """Two layers on one worker, a bucket each."""
    return run_passes(placed(two_layers()), [Comm(), Reduce((2,), bucket_bytes=16, sharded=sharded)])


def no_call(program: Program) -> Program:
    program.graph.erase_node(next(n for n in program if is_reduce(n)))
    return program


def other_member(program: Program) -> Program:
    node = next(n for n in program if is_reduce(n))
    node.args = (node.args[0], [next(n for n in program if n.name == "d__2_t")])
    return program


def twice(program: Program) -> Program:
    first, _ = program.buckets[0]
    return dataclasses.replace(program, buckets=((first, first),))


def without_updaters(program: Program) -> Program:
    made = reduced(sharded=True)
    first, *others = made.buckets[0]
    return dataclasses.replace(made, buckets=((dataclasses.replace(first, updaters=(2,)), *others),))


def in_two_buckets(program: Program) -> Program:
    first, second = program.buckets[0]
    return dataclasses.replace(program, buckets=((first, dataclasses.replace(second, parameters=first.parameters)),))


def left_out(program: Program) -> Program:
    node = next(n for n in program if is_reduce(n))
    program.graph.erase_node(node)
    return dataclasses.replace(program, buckets=(program.buckets[0][1:],))


def other_call(program: Program) -> Program:
    buckets = tuple(dataclasses.replace(b, sharded=True) for b in program.buckets[0])
    return dataclasses.replace(program, buckets=(buckets,))


def other_phase(program: Program) -> Program:
    node = next(n for n in program if is_reduce(n))
    return dataclasses.replace(program, weights_apart=True) if info(node).phase == "B" else program


def without_replicas(program: Program) -> Program:
    return dataclasses.replace(program, replicas=(), buckets=())


def two_dtypes(program: Program) -> Program:
    """One bucket for gradients of which one is said to be of another dtype."""
    made = run_passes(placed(two_layers()), [Comm(), Reduce((2,))])
    next(n for n in made if n.name == "d__2_mm").meta["val"] = torch.empty(2, 2, dtype=torch.float64, device="meta")
    return made


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (without_updaters, r"has the updaters \(2,\): of 1 parameters, 2 replicas"),
        (no_call, r"hands over the buckets \['bucket_1'\], but has \['bucket_0', 'bucket_1'\]"),
        (other_member, "which are not the gradients of"),
        (twice, r"but has \['bucket_0', 'bucket_0'\]"),
        (in_two_buckets, "the gradient of 2.weight is in two buckets"),
        (left_out, "the gradient of 2.weight is in no bucket"),
        (other_call, "is all_reduce, not reduce_scatter"),
        (other_phase, "is in B, but gradients are returned in W"),
        (without_replicas, r"hands over the buckets \['bucket_0', 'bucket_1'\], but has \[\]"),
        (two_dtypes, "a bucket has one dtype"),
    ],
)
def test_the_law_notices(broken: Any, said: str) -> None:
    program = reduced()
    verify(program)
    with pytest.raises(VerifyError, match=said):
        verify(broken(program))


def test_the_law_of_stages_notices_a_call_that_the_split_loses() -> None:
    program = run_passes(reduced(), [Split()])
    part = program.stages[0].parts["B"]
    assert part.spec.reduces == ("bucket_0", "bucket_1")
    part.graph.erase_node(next(n for n in part.graph.nodes if is_reduce(n)))
    with pytest.raises(VerifyError, match="holds the calls"):
        verify(program)


def test_the_law_of_texts_notices_a_call_that_is_not_written() -> None:
    program = run_passes(reduced(), emitting_passes())
    (stage,) = program.stages
    source = re.sub(r"    comm.all_reduce\(\"bucket_0.*\n", "", stage.source)
    with pytest.raises(VerifyError, match="hands over"):
        verify(dataclasses.replace(program, stages=(dataclasses.replace(stage, source=source),)))


def test_the_emitted_code() -> None:
    files = run_passes(reduced(), emitting_passes()).files
    assert "\nreplicas  2: gradients in 2 buckets\n" in files["stage_0.py"]
    backward = files["stage_0.py"].partition("def backward")[2]
    lines = [line.strip() for line in backward.splitlines()]
    at = lines.index('comm.all_reduce("bucket_0", [d__2_mm])  # 16 B over 2 replicas')
    assert lines[at - 2].startswith("d__2_mm = ")
    assert lines[at - 1].startswith("del ")
    assert lines[-2:] == ['comm.all_reduce("bucket_1", [d__0_mm])  # 16 B over 2 replicas', "return (d__0_mm, d__2_mm)"]


def test_shards_are_made_by_another_call() -> None:
    program = run_passes(reduced(sharded=True), emitting_passes())
    source = program.files["stage_0.py"]
    assert 'comm.reduce_scatter("bucket_0", [d__2_mm])' in source
    assert "all_reduce" not in source
    assert all(bucket.sharded for bucket in program.buckets[0])


class WithNothing(nn.Module):
    """A parameter without elements, whose gradient is ready last."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(0, 4))
        self.layer = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x + self.nothing.sum())


def test_parameters_without_elements_are_in_buckets() -> None:
    program = fxpipe.capture(WithNothing(), lambda m, x: m(x).sum(), torch.ones(2, 4))
    (bucket,) = lower(program, workers=1, cost="analytic", reduce=Reduce((2,))).plan.stages[0].buckets
    assert (sorted(bucket.parameters), bucket.bytes) == (["layer.weight", "nothing"], 64)


def test_sparse_gradients_are_refused() -> None:
    program = run_passes(placed(two_layers()), [Comm()])
    node = next(n for n in program if n.name == "d__2_mm")
    node.meta["val"] = torch.eye(2).to_sparse()
    with pytest.raises(CutError, match=r"the gradient of 2\.weight is sparse, so it cannot be summed over replicas"):
        Reduce((2,))(program)
    assert Reduce((1,))(program) is program


class Growing(nn.Module):
    """Long sequences have a layer of their own, and the order in which its layers are called is another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.one, self.two, self.extra = (nn.Linear(4, 4, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        if x.shape[1] > 3:
            return self.extra(torch.tanh(self.two(torch.tanh(self.one(x)))))
        return self.one(torch.tanh(self.two(x)))


def growing(first: int, other: int) -> Build:
    """Batches of two lengths, in one bucket for each of all gradients."""
    torch.manual_seed(0)
    model, loss = Growing(), lambda m, x: m(x).square().mean()
    options = CompileOptions(workers=1, microbatches=1, cost="analytic", schedule="1f1b")
    shape = capture_shape(model, loss, Batch.of(torch.randn(2, other, 4)), options)
    program = fxpipe.capture(model, loss, torch.randn(2, first, 4))
    return lower(program, options, shapes=[shape], reduce=Reduce((2,), 128))


def test_every_shape_has_the_buckets_of_the_first_in_their_order() -> None:
    build = growing(5, 2)
    check(dataclasses.replace(build.plan, microbatches=2))
    first, other = (plan.stages[0] for plan in build.plan.of_shapes)
    assert [b.parameters for b in first.buckets] == [("extra.weight", "two.weight"), ("one.weight", "first.weight")]
    assert other.buckets == first.buckets
    assert other.backward.reduces == first.backward.reduces == ("bucket_0", "bucket_1")
    calls = re.findall(r'comm\.all_reduce\("(\w+)", \[(.*)\]\)', build.files[other.file])
    assert [name for name, _ in calls] == ["bucket_0", "bucket_1"]
    assert calls[0][1].startswith("None, ")  # this shape has no gradient of `extra`
    assert other.gradients == ("first.weight", "one.weight", "two.weight")


def test_a_gradient_that_the_first_shape_does_not_have_is_refused() -> None:
    with pytest.raises(CutError, match="extra"):
        growing(2, 5)

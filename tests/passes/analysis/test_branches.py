"""Branches whose calls take turns are put together, against brute force and against the same model in another order."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx, nn

import fxpipe
from fxpipe.builds.build import Build
from fxpipe.ir.program import INFO, Level, NodeInfo, Parameter, Program
from fxpipe.ir.transform import run_passes
from fxpipe.lowering.compare_with_eager import compare_with_eager
from fxpipe.passes.analysis import branches
from fxpipe.passes.analysis.branches import branches_together
from fxpipe.passes.analysis.sources import sources_of
from fxpipe.passes.fold import Fold
from fxpipe.passes.units import Units
from fxpipe.schedule import of_plan

aten = torch.ops.aten
Reads = Sequence[tuple[int, ...]]
"""For each call, the earlier calls that it reads, at most two; with none, it reads the batch."""


def program_of(reads: Reads, weights: Sequence[int | None] = (), draws: Collection[int] = ()) -> Program:
    """A program of these calls; each may read a weight, by its number, and some draw random numbers."""
    graph, names = fx.Graph(), [f"w{k}" for k in range(3)]
    inputs = {name: graph.placeholder(name) for name in ("batch", *names)}
    calls: list[fx.Node] = []
    for i, read in enumerate(reads):
        found = [calls[k] for k in read] or [inputs["batch"]]
        if weights and (number := weights[i]) is not None:
            found = [found[0], inputs[f"w{number}"]]
        target = aten.bernoulli.default if i in draws else aten.mm.default
        calls.append(graph.call_function(target, (found[0],) if i in draws else (found[0], found[-1])))
        calls[-1].meta[INFO] = NodeInfo("F")
    for node in graph.nodes:
        node.meta["val"] = torch.empty(2, 2, device="meta")
    graph.output(())
    parameters = tuple(Parameter(name, (name,), True) for name in names)
    return Program(graph, Level.FOLDED, parameters, (), (), (), {}, {}, "", "cpu")


def together(program: Program) -> list[int]:
    """The numbers of the calls, in their new order, where no branch has too little work."""
    calls = list(program)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(branches, "LEAST", 0.0)
        return [calls.index(node) for node in branches_together(program, calls, sources_of(program))]


def before(reads: Reads) -> list[set[int]]:
    """All calls on which each depends."""
    found: list[set[int]] = []
    for read in reads:
        found.append(set(read).union(*(found[k] for k in read)))
    return found


def orders(reads: Reads, done: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    """All orders in which calls come after what they read."""
    if len(done) == len(reads):
        yield done
    for i, read in enumerate(reads):
        if i not in done and set(read) <= set(done):
            yield from orders(reads, (*done, i))


def breaks(reads: Reads, order: Sequence[int]) -> int:
    """How often a call comes right after one on which it does not depend."""
    needs = before(reads)
    return sum(one not in needs[next] for one, next in pairwise(order))


@st.composite
def trees(draw: st.DrawFn, most: int = 7) -> Reads:
    """Every call is read by one later call; the last one reads what is left."""
    reads: list[tuple[int, ...]] = []
    free: list[int] = []
    for i in range(draw(st.integers(2, most))):
        read = tuple(
            free.pop(draw(st.integers(0, len(free) - 1))) for _ in range(draw(st.integers(0, min(2, len(free)))))
        )
        reads.append(read)
        free.append(i)
    while len(free) > 1:
        reads.append((free.pop(0), free.pop(0)))
        free.append(len(reads) - 1)
    return reads


@given(trees(5))
def test_no_order_has_fewer_changes_of_branch(reads: Reads) -> None:
    found = together(program_of(reads))
    assert found in map(list, orders(reads))
    assert breaks(reads, found) == min(breaks(reads, order) for order in orders(reads))


def parts(reads: Reads, weights: Sequence[int | None], draws: Collection[int], end: int) -> list[set[int]]:
    """The branches of the calls before `end`: those that depend on each other, share a weight, or draw."""
    found: list[set[int]] = []
    for i in range(end):
        near = {*reads[i], i} | {k for k in range(i) if weights[i] is not None and weights[k] == weights[i]}
        near |= {k for k in draws if k < i} if i in draws else set()
        joined = [part for part in found if part & near]
        found = [part for part in found if part not in joined] + [near.union(*joined)]
    return found


@given(trees(), st.data())
def test_only_branches_that_take_turns_move_and_draws_keep_their_order(reads: Reads, data: st.DataObject) -> None:
    count = len(reads)
    more = [data.draw(st.sampled_from([None, *range(i)])) if len(read) == 1 else None for i, read in enumerate(reads)]
    reads = [read if k is None else (*read, k) for read, k in zip(reads, more, strict=True)]
    one_input = [i for i, read in enumerate(reads) if len(read) < 2]
    draws = data.draw(st.sets(st.sampled_from(one_input), max_size=3))
    weights = [data.draw(st.sampled_from([None, None, 0, 1])) if i in one_input else None for i in range(count)]
    weights = [None if i in draws else weight for i, weight in enumerate(weights)]
    found = together(program_of(reads, weights, draws))
    place = {i: k for k, i in enumerate(found)}
    assert all(place[k] < place[i] for i, read in enumerate(reads) for k in read)
    assert [i for i in found if i in draws] == sorted(draws)
    in_turns = False
    for i, read in enumerate(reads):
        joined = [part for part in parts(reads, weights, draws, i) if part & {*read}]
        for one in joined:
            for other in joined:
                if one is not other:
                    in_turns |= min(one) < min(other) < max(one)
                    assert not min(map(place.get, one)) < min(map(place.get, other)) < max(map(place.get, one))
    assert in_turns or found == list(range(count))


class Head(nn.Linear):
    def forward(self, *values: Tensor) -> Tensor:
        return super().forward(torch.cat(values, 1))


class Towers(nn.Module):
    """Layers of three towers in a given order, and a head."""

    def __init__(self, order: str, widths: Sequence[int] = (4, 4, 4), dropout: str = "") -> None:
        super().__init__()
        self.order, self.head = order, Head(3, 1)
        for name, width in zip("abc", widths, strict=True):
            inner = nn.Dropout(0.5) if name in dropout else nn.Tanh()
            self.add_module(name, nn.Sequential(nn.Linear(2, width), inner, nn.Linear(width, 1)))

    def forward(self, x: Tensor) -> Tensor:
        values, layers = dict.fromkeys("abc", x), {name: iter(self.get_submodule(name)) for name in "abc"}
        for name in self.order:
            values[name] = next(layers[name])(values[name])
        return self.head(*values.values()).square().mean()


def step(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch)


def build_of(order: str, **options: Any) -> Build:
    torch.manual_seed(0)
    model, batch = Towers(order, **options), torch.randn(4, 2)
    build = fxpipe.compile(
        model, step, batch, workers=4, schedule="1f1b", cost="analytic", forward_at=("b", "c", "head")
    )
    assert compare_with_eager(build, model, step, batch).largest < 1e-5
    return build


def test_towers_in_turns_have_the_stages_of_towers_one_after_the_other() -> None:
    expected = build_of("aaabbbccc")
    assert of_plan(expected.plan).after == ((), (), (), (0, 1, 2))
    for order in ("abcabcabc", "aabccbabc"):
        assert build_of(order).files == expected.files


def test_the_branch_that_ends_first_comes_first() -> None:
    """The text is embedded before the pictures' tower, and the pictures projected after the text's."""
    assert together(program_of([(), (), (1,), (0,), (2,), (3,), (4, 5)])) == [1, 2, 4, 0, 3, 5, 6]


def test_a_tower_with_little_work_stays_where_it_is() -> None:
    program = fxpipe.capture(Towers("aaabcbcbc", widths=(1 << 14, 1 << 14, 1)), step, torch.randn(4, 2))
    units = run_passes(program, [Fold(), Units()]).units
    assert units[3:9] == ("b.0", "c.0", "b.1", "c.1", "b.2", "c.2")


def test_only_one_of_the_towers_that_draw_random_numbers_moves_alone() -> None:
    """Forwards that draw in another order would differ from eager PyTorch, which `build_of` compares."""
    units = build_of("abcabcabc", dropout="ab").plan.step.units
    assert units[:9] == ("a.0", "b.0", "a.1", "b.1", "a.2", "b.2", "c.0", "c.1", "c.2")

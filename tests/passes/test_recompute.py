"""What backwards compute again to save memory: what is chosen, what never is, and that what is saved becomes less."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from cached import captured, cuts, lowered
from covering import a_few_quick, covering
from random_cuts import random_cuts
from small_models import CASES

from fxpipe.ir.aten import is_random
from fxpipe.ir.program import AGAIN, Program, info
from fxpipe.ir.transform import run_passes
from fxpipe.passes import front_passes
from fxpipe.passes.analysis.left_values import LeftValues, left_values
from fxpipe.passes.analysis.levels import levels_of_units
from fxpipe.passes.cost import Cost
from fxpipe.passes.cut import Cut
from fxpipe.passes.defer import Defer
from fxpipe.passes.recompute import LEAST, Choices, Recompute, Room
from fxpipe.passes.rematerialize import Rematerialize
from fxpipe.planner.cuts import Cuts


def cut(name: str, workers: int, seed: int | None = None, apart: bool = False) -> Program:
    """A case with costs and workers, perhaps with weight gradients apart; cut evenly, or anywhere with a seed."""
    program = run_passes(captured(name)[2], [*front_passes(split_backward=apart), Cost()])
    even = tuple(len(program.units) * k // workers for k in range(workers + 1))
    where = Cuts(even, even) if seed is None else random_cuts(name, workers, seed)
    return run_passes(program, [Cut(where), *([Defer()] if apart else [])])


def left(program: Program) -> list[LeftValues]:
    return left_values(run_passes(program, [Rematerialize()]))


@pytest.mark.parametrize(("name", "apart"), covering(CASES, [False, True], strength=1))
def test_the_least_saves_less_and_computes_the_same(name: str, apart: bool) -> None:
    program = cut(name, 3, apart=apart)
    least = run_passes(program, [Recompute((LEAST,) * 3)])
    before, after = left(program), left(least)
    for worker, (one, other) in enumerate(zip(before, after, strict=True)):
        assert other.saved <= one.saved
        again = least.again[worker]
        assert again.bytes == one.saved - other.saved
        assert again.seconds == pytest.approx(max(other.seconds - one.seconds, 0.0))
    assert sum(a.saved for a in after) < 0.8 * sum(b.saved for b in before)
    torch.manual_seed(0)
    expected = program.run()
    torch.manual_seed(0)
    found = run_passes(least, [Rematerialize()]).run()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("name", "share"),
    [
        ("unet", 0.6),
        ("function", 0.6),
        pytest.param("unet", 0.3, marks=pytest.mark.slow),
        pytest.param("function", 0.9, marks=pytest.mark.slow),
        pytest.param("gpt-dropout", 0.6, marks=pytest.mark.slow),
    ],
)
def test_it_fits_in_hardly_more_time_than_it_takes(name: str, share: float) -> None:
    """Of ten microbatches; of all choices of a worker, none that fits is faster by more than the steps between them."""
    program = cut(name, 2, seed=5)
    before = left(program)
    rooms = tuple(Room(10 * share * row.saved, ((10, 0),)) for row in before)
    made = run_passes(program, [Recompute(rooms)])
    plain = run_passes(program, [Rematerialize()])
    for worker, (row, room) in enumerate(zip(left(made), rooms, strict=True)):
        choices = Choices(program, plain, worker)
        tried = []
        for place in range(choices.last + 1):
            known = tuple(tuple(choices.names(place)) if k == worker else () for k in range(2))
            tried.append(left(run_passes(program, [Recompute(known=known)]))[worker])
        fitting = [t.seconds for t in tried if room.filled(t) <= room.bytes]
        if not fitting:
            assert room.filled(row) == min(room.filled(t) for t in tried)
            continue
        assert room.filled(row) <= room.bytes
        steps = sorted({t.seconds for t in tried})
        widest = max((b - a for a, b in pairwise(steps)), default=0.0)
        assert row.seconds <= min(fitting) + widest + 1e-12


def test_of_one_microbatch_at_a_time_no_more_is_held_than_without() -> None:
    """Not even where nothing fits: what is computed again would all be there at once."""
    program = cut("conv", 2)
    rooms = tuple(Room(0.5 * row.saved, ((1, 0),)) for row in left(program))
    found = left(run_passes(program, [Recompute(rooms)]))
    assert all(room.filled(row) <= one.saved for room, row, one in zip(rooms, found, left(program), strict=True))


def test_without_limit_nothing_is_computed_again() -> None:
    program = cut("gpt", 3)
    assert not any(again.values for again in run_passes(program, [Recompute((Room(),) * 3)]).again)


def test_what_was_drawn_and_what_updates_buffers_is_never_computed_again() -> None:
    for name in ("gpt-dropout", "conv"):
        made = run_passes(cut(name, 2), [Recompute((LEAST, LEAST)), Rematerialize()])
        copies = [node for node in made if AGAIN in node.meta]
        assert copies
        assert not any(is_random(node) for node in copies)
        assert not any(new in copies for new in made.updates().values())


def test_what_weight_gradients_read_is_handed_through() -> None:
    """What B has computed again, W does not compute a third time."""
    made = run_passes(cut("gpt", 2, apart=True), [Recompute((LEAST, LEAST)), Rematerialize()])
    weights = {p.node for p in made.parameters}
    both: dict[tuple[str, int], set[str]] = {}
    for node in made:
        if AGAIN in node.meta and info(node).phase != "F" and not all(n.name in weights for n in node.all_input_nodes):
            both.setdefault((node.meta[AGAIN], info(node).worker or 0), set()).add(info(node).phase)
    assert any("B" in phases for phases in both.values())
    assert not any(len(phases) > 1 for phases in both.values())


def test_the_same_names_are_computed_again_of_a_known_choice() -> None:
    program = cut("gpt", 2)
    chosen = run_passes(program, [Recompute((LEAST, LEAST))])
    known = run_passes(program, [Recompute(known=tuple(again.values for again in chosen.again))])
    assert left(known) == left(chosen)


@pytest.mark.parametrize(("name", "schedule"), covering(CASES, ["1f1b", "zb-h1"], strength=1))
def test_the_summary_and_the_choice_count_alike(name: str, schedule: str) -> None:
    where = cuts(CASES[name], 3, 0)
    plain, full = (
        lowered(name, 2, workers=3, schedule=schedule, recompute=level, **where) for level in ("none", "full")
    )
    for one, other in zip(plain.workers, full.workers, strict=True):
        assert one.saved_bytes - other.saved_bytes == other.spared_bytes >= 0
        assert (one.again, one.spared_bytes) == (0, 0)
    assert sum(row.again for row in full.workers) > 0
    assert [bool(stage.again) for stage in full.plan.stages] == [row.again > 0 for row in full.workers]


@pytest.mark.parametrize("name", a_few_quick(CASES, "gpt", "conv", "checkpoint"))
def test_levels_of_units_add_up_to_what_a_single_worker_saves(name: str) -> None:
    """But for masks, which a planner counts as neither sent nor saved."""
    program = run_passes(captured(name)[2], [*front_passes(), Cost()])
    levels = levels_of_units(program)
    (plain,) = left(Cut(Cuts((0, len(levels)), (0, len(levels))))(program))
    saved = [plain.saved, *(sum(row.saved_bytes for row in level) for level in zip(*levels, strict=True))]
    again = [sum(row.again_ms for row in level) for level in zip(*levels, strict=True)]
    assert all(other <= one for one, other in pairwise(saved))
    assert len(set(saved)) > 2
    assert all(one < other for one, other in pairwise(again))
    for level in zip(*levels, strict=True):
        assert max(row.alive_bytes for row in level) > 0
        assert sum(row.made_bytes for row in level) > 0
        assert all(row.deferred_bytes <= row.made_bytes for row in level)

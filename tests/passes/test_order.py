"""The order of the passes: every other one is refused before the first pass runs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from wrong_layouts import Narrow, series, squared

import fxpipe
from fxpipe.errors import VerifyError
from fxpipe.ir.program import Level
from fxpipe.ir.transform import Pass, check_order, run_passes
from fxpipe.passes import emitting_passes, forward_passes, front_passes, wiring_passes
from fxpipe.passes.comm import Comm
from fxpipe.passes.cost import Cost
from fxpipe.passes.encode import Encode
from fxpipe.passes.fold import Fold
from fxpipe.passes.whole_loss import WholeLoss
from fxpipe.planner.cuts import Cuts
from fxpipe.tracing.evaluation import capture_evaluation

PARTS = ("first", "convolution", "last")
OWNERS = {f"{layer}.{kind}": int(layer == "last") for layer in PARTS for kind in ("weight", "bias")}
LISTS = {
    "training": [
        *front_passes(True, WholeLoss(2)),
        Cost(),
        *wiring_passes(Cuts((0, 4, 9), (0, 4, 9))),
        *emitting_passes(encode=Encode()),
    ],
    "evaluation": forward_passes(2, OWNERS, 0, "test"),
}
HARMLESS = {
    # Equal calls read the same weights, so that they are of the same worker: merged before or after, one is left.
    ("merge_equal", "order_evaluation"),
    # And they are laid out alike, with equal calls.
    ("keep_layouts", "merge_equal"),
    # The layouts that the two halves of a convolution's backward give are as certain as those of the whole.
    ("keep_layouts", "split_backward"),
    # Where a batch is added up, nothing depends on a layout.
    ("whole_loss", "keep_layouts"),
    # A weight whose cast is sent keeps its casts.
    ("cast_weights", "encode"),
    # What packs a value comes right before its send, wherever that is.
    ("encode", "send_early"),
}


def _in(pair: tuple[str, str], passes: Sequence[Pass]) -> bool:
    return pair in pairwise(step.name for step in passes)


def swapped(passes: Sequence[Pass], place: int) -> list[Pass]:
    return [*passes[:place], passes[place + 1], passes[place], *passes[place + 2 :]]


@pytest.mark.parametrize("name", LISTS)
def test_the_default_order_is_accepted_and_every_swap_refused(name: str) -> None:
    passes = LISTS[name]
    check_order(Level.CAPTURED, passes)
    for place, pair in enumerate(pairwise(passes)):
        if tuple(step.name for step in pair) not in HARMLESS:
            with pytest.raises(VerifyError, match="takes a program that is"):
                check_order(Level.CAPTURED, swapped(passes, place))


SWAPS = [(name, pair[0]) for pair in sorted(HARMLESS) for name, passes in LISTS.items() if _in(pair, passes)]


@pytest.mark.parametrize(("name", "first"), SWAPS)
def test_a_harmless_swap_emits_the_same_text(name: str, first: str) -> None:
    torch.manual_seed(0)
    model = Narrow()
    if name == "training":
        program = fxpipe.capture(model, squared, series())
    else:
        metrics = {"a": lambda m, x: m(x).mean(), "b": lambda m, x: squared(m, x), "c": lambda m, x: m(-x).mean()}
        program = capture_evaluation(
            model, lambda m, x: {name: made(m, x) for name, made in metrics.items()}, series()
        ).program
    passes = LISTS[name]
    place = [step.name for step in passes].index(first)
    files = run_passes(program, passes).files
    assert any("contiguous" in text for text in files.values())
    assert run_passes(program, swapped(passes, place)).files == files


@pytest.mark.parametrize(
    ("level", "passes", "message", "hint"),
    [
        (Level.CAPTURED, LISTS["training"][2:], "whole_loss takes .* FOLDED, but this one is CAPTURED", "FOLDED"),
        (Level.CAPTURED, swapped(LISTS["training"], 13), "outline takes .* SPLIT, .* is WIRED", "run split first"),
        (Level.CAPTURED, [*LISTS["training"], Fold()], "fold takes .* CAPTURED, .* EMITTED", "run fold before fold"),
        (Level.SPLIT, [Comm()], "pass comm takes a program that is PLACED, .* SPLIT", "begin with a PLACED program"),
    ],
)
def test_the_refusal_says_what_to_run_first(level: Level, passes: Sequence[Pass], message: str, hint: str) -> None:
    with pytest.raises(VerifyError, match=message) as caught:
        check_order(level, passes)
    assert hint in str(caught.value.hint)

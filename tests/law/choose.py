"""Which cases are tried: few that have every pair of values that may meet, and random ones.

    python tests/law/choose.py        write quick.txt, after an axis or a rule has changed

Cheap cases come before others that have as much to say, a case whose pairs others have goes, and one that finds a
planted fault stays (`found.json`). Delete quick.txt before, and only those stay.

Faults that take three values at once are rare, four rarer (Kuhn, Wallace and Gallo 2004, IEEE TSE 30(6)).
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "support")]

from case import AXES, SEVERAL, SLOW, WITHOUT_FLUSH, Case, of_text
from judge import PINNED, references
from own import possible
from product import places
from refused import refusals
from task import Task

QUICK = Path(__file__).parent / "quick.txt"
Pair = tuple[tuple[str, Any], tuple[str, Any]]
BY_HAND: dict[str, tuple[Any, ...]] = {name: values[:1] for name, values in AXES.items()} | {
    "workers": AXES["workers"],
    "cuts": PINNED,
    "schedule": WITHOUT_FLUSH,
    "microbatches": AXES["microbatches"],
    "replicas": ("one", "two"),
    "policy": AXES["policy"],
    "optimizer": AXES["optimizer"],
    "rate": AXES["rate"],
    "state": ("none", "data"),
}
"""Where `papers` knows the rules: here, too, every pair meets."""

TRIES = 1500
"""Draws after which a pair is taken to be impossible."""

PLAIN = {"shapes": 0.5, "processes": 0.7}
"""How often an axis has its first value, where that is cheaper to try than the others; else as often as any."""


def drawn(draw: random.Random, axes: Mapping[str, tuple[Any, ...]], fixed: Mapping[str, Any]) -> Case | None:
    """A case with these values, random otherwise; None where it is not one."""
    values = dict(fixed)
    for name, every in axes.items():
        if name not in values:
            values[name] = every[0] if draw.random() < PLAIN.get(name, 0) else draw.choice(every)
    if "policy" not in fixed and values["schedule"] not in WITHOUT_FLUSH:
        values["policy"] = "default"
    if "shapes" not in fixed and values["model"] == "texts" and draw.random() < 0.5:
        values["shapes"] = "padded"
    case = Case(**values)
    return case if exists(case) else None


def exists(case: Case) -> bool:
    """Whether there is such a case at all, refused or not."""
    several = SEVERAL.get(case.schedule, 1)
    padded = case.shapes == "padded" and case.model != "texts"
    smaller = case.shapes in ("last", "new") and case.batch // 2 % case.parts
    unequal = case.unequal and case.ranks == 1
    eager_fails = case.model == "lstm" and case.precision == "fp16"  # no such kernel
    too_many = case.model == "lstm" and case.workers > 3  # it has three places to cut before
    masks = case.model in ("gpt", "gpt-dropout", "texts") and case.codec == "int8"  # of infinities, which may cross
    uneven = case.cuts == "random" and (case.shapes != "one" or case.model == "function")  # other units than captured
    many = case.cuts == "three-way" and case.workers > 3 and case.shapes in ("last", "new")  # the same
    # torch's AveragedModel would average codes; and a packed layer gives float32, whatever its input is
    packed = case.model == "packed" and (case.average or case.mixed)
    double = case.engine != "eager" and case.precision != "float32"  # onnxruntime lacks operators for others
    kernel = case.engine == "onnxruntime" and case.model == "lstm"  # whose backward ONNX does not have
    copies = case.cuts not in PINNED or case.model == "lstm"  # of weights, or none
    planned = case.unequal and case.schedule == "async" and copies
    own = case.own and not possible(case)
    no_state = case.state != "none" and not case.fades
    moved = case.moved and not movable(case)
    elsewhere = case.device != "cpu" and (case.engine != "eager" or case.processes == "shared")
    wide = case.device == "narrow" and (case.precision == "float64" or case.model == "function")  # and its metrics
    nothing_trained = case.state == "callback" and case.model == "towers" and case.cuts == "three-way"  # on worker 0
    number = case.device != "cpu" and "sparseloco" in case.codec  # the pretended device has no `tensor & number`
    impossible = (
        own
        or no_state
        or wide
        or number
        or moved
        or case.workers % several
        or padded
        or smaller
        or unequal
        or eager_fails
        or too_many
        or case.total > 4
    )
    here = double or kernel or planned or elsewhere or nothing_trained
    return not (impossible or masks or uneven or many or packed or here)


def movable(case: Case) -> bool:
    """Whether a run may go on under other cuts without a change of a bit: no edge rounds values, no engine sums in an
    order of its own for each stage, no worker draws random numbers of its own, units keep their replicas and these have
    one state, and the scheduler has the same groups."""
    plain = case.flushes and case.codec == "none" and case.engine == "eager" and not Task(case).draws
    alike = case.replicas in ("one", "two", "shard") and not (
        case.optimizer == "two" and case.rate in ("falling", "epoch")
    )
    other = case.cuts in PINNED and places(case) != places(case, moved=True)
    return plain and alike and bool(case.stop) and other


def pairs_of(case: Case) -> set[Pair]:
    return set(itertools.combinations([(f.name, getattr(case, f.name)) for f in dataclasses.fields(case)], 2))


def owed_by(case: Case) -> set[tuple[str, Pair]]:
    """What a case proves: its pairs, and those that `papers` judges once more as theirs."""
    pairs = pairs_of(case)
    found = {("", pair) for pair in pairs}
    if "papers" in references(case):
        found |= {("papers", pair) for pair in pairs if all(value in BY_HAND[axis] for axis, value in pair)}
    return found


def seconds(case: Case) -> float:
    """About what a case takes."""
    shapes = {"new": 1.0, "last": 0.9}.get(case.shapes, 0)
    searched = 1.3 * (case.cuts == "three-way" and case.workers > 2)
    processes = bool(case.processes) * (0.4 + 0.1 * case.total)
    more = (
        1.2 * (case.stop > 0)
        + 0.6 * case.moved
        + 0.9 * (case.precision != "float64")
        + 0.5 * (case.evaluation != "none")
    )
    return 0.3 + 1.5 * case.model.startswith("gpt") + shapes + searched + processes + more


def possible_pairs(axes: Mapping[str, tuple[Any, ...]]) -> Iterator[Pair]:
    for one, other in itertools.combinations(axes, 2):
        for pair in itertools.product(axes[one], axes[other]):
            yield (one, pair[0]), (other, pair[1])


def is_legal(case: Case | None) -> bool:
    """Whether it is to train, and something can judge it."""
    return case is not None and not refusals(case) and bool(references(case))


def covering(known: Iterable[Case], kept: Iterable[Case], seed: int) -> list[Case]:
    """Cases in which every pair of values meets that can meet at all.

    Args:
        known: are used before others.
        kept: stay whatever they have.
        seed: of the order in which pairs get their cases.
    """
    draw = random.Random(seed)
    chosen = {*known, *kept}
    covered = set().union(*map(owed_by, chosen))
    owed = [("", pair) for pair in possible_pairs(AXES)] + [("papers", pair) for pair in possible_pairs(BY_HAND)]
    for judge, pair in sorted(owed, key=lambda _: draw.random()):
        if (judge, pair) in covered:
            continue
        axes, found = BY_HAND if judge else AXES, []
        for _ in range(TRIES):
            case = drawn(draw, axes, dict(pair))
            if case is not None and is_legal(case) and (judge, pair) in owed_by(case):
                found.append(case)
            if len(found) == 400:
                break
        if found:
            best = max(found, key=lambda case: len(owed_by(case) - covered) / (1 + seconds(case)))
            chosen.add(best)
            covered |= owed_by(best)
    return _without_needless(chosen, set(kept))


def _without_needless(chosen: set[Case], kept: set[Case]) -> list[Case]:
    """All but those whose pairs others have too, dear ones first."""
    times = collections.Counter(itertools.chain.from_iterable(map(owed_by, chosen)))
    for case in sorted(chosen - kept, key=lambda case: (-seconds(case), str(case))):
        if all(times[each] > 1 for each in owed_by(case)):
            times.subtract(owed_by(case))
            chosen = chosen - {case}
    return sorted(chosen, key=str)


def random_cases(count: int, seed: str, device: str = "cpu") -> list[Case]:
    """Legal cases of the slow values too, on a device."""
    draw, found = random.Random(seed), []
    while len(found) < count:
        case = drawn(draw, SLOW, {"device": device})
        if case is not None and is_legal(case):
            found.append(case)
    return found


def quick() -> list[Case]:
    """Those with the same captures together: each process of the tests takes a stretch, and captures a thing once."""
    return sorted(map(of_text, QUICK.read_text().splitlines()), key=lambda c: (c.model, c.precision, c.parts))


if __name__ == "__main__":
    found = {of_text(text) for text in json.loads((QUICK.parent / "found.json").read_text()).values() if "=" in text}
    known, kept = (
        [c for c in cases if exists(c) and is_legal(c)] for cases in (quick() if QUICK.is_file() else [], found)
    )
    found_by_chance = (covering(known, kept, seed) for seed in range(8))
    cases = min(found_by_chance, key=lambda cases: sum(map(seconds, cases)))
    QUICK.write_text("".join(f"{case}\n" for case in cases))
    print(f"{len(cases)} cases in {QUICK.name}, about {sum(map(seconds, cases)):.0f} seconds")

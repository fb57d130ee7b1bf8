"""Which cases are tried: few that have every pair of values that may meet, and random ones.

    python tests/law/choose.py        add to quick.txt what is missing, after an axis or a rule has changed

Delete quick.txt before, and the cases are chosen anew.

Faults that take three values at once are rare, four rarer (Kuhn, Wallace and Gallo 2004, IEEE TSE 30(6)).
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "support")]

from case import AXES, SEVERAL, SLOW, WITHOUT_FLUSH, Case, of_text
from judge import PINNED, references
from refused import refusals

QUICK = Path(__file__).parent / "quick.txt"
Pair = tuple[tuple[str, Any], tuple[str, Any]]
BY_HAND: dict[str, tuple[Any, ...]] = {name: values[:1] for name, values in AXES.items()} | {
    "workers": AXES["workers"],
    "cuts": PINNED,
    "schedule": WITHOUT_FLUSH,
    "microbatches": AXES["microbatches"],
    "policy": AXES["policy"],
    "optimizer": AXES["optimizer"],
    "rate": AXES["rate"],
}
"""Where `papers` knows the rules: here, too, every pair meets."""

TRIES = 400
"""Draws after which a pair is taken to be impossible."""

PLAIN = {"shapes": 0.5, "stop": 0.5, "processes": 0.7, "codec": 0.5, "precision": 0.4, "replicas": 0.4, "engine": 0.9}
"""How often an axis has its first value, where that is cheaper to try than the others; else as often as any."""


def drawn(draw: random.Random, axes: Mapping[str, tuple[Any, ...]], fixed: Mapping[str, Any]) -> Case | None:
    """A case with these values, random otherwise; None where it is not one."""
    values = dict(fixed)
    for name, every in axes.items():
        if name not in values:
            values[name] = every[0] if draw.random() < PLAIN.get(name, 0) else draw.choice(every)
    if "policy" not in fixed and values["schedule"] not in ("async", "async-late"):
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
    unequal = case.replicas == "2,1" and case.ranks == 1
    eager_fails = case.model == "lstm" and case.precision == "fp16"  # no such kernel
    too_many = case.model == "lstm" and case.workers > 3  # it has three places to cut before
    masks = case.model in ("gpt", "gpt-dropout", "texts") and case.codec == "int8"  # of infinities, which may cross
    uneven = case.cuts == "random" and case.shapes != "one"  # such cuts may not fit another shape's units
    double = case.engine != "eager" and case.precision != "float32"  # onnxruntime lacks operators for others
    planned = (
        case.replicas == "2,1" and case.schedule == "async" and case.cuts not in PINNED
    )  # copies of weights or none
    impossible = case.workers % several or padded or smaller or unequal or eager_fails or too_many or case.total > 4
    return not (impossible or masks or uneven or double or planned)


def pairs_of(case: Case) -> set[Pair]:
    return set(itertools.combinations([(f.name, getattr(case, f.name)) for f in dataclasses.fields(case)], 2))


def possible_pairs(axes: Mapping[str, tuple[Any, ...]]) -> Iterator[Pair]:
    for one, other in itertools.combinations(axes, 2):
        for pair in itertools.product(axes[one], axes[other]):
            yield (one, pair[0]), (other, pair[1])


def is_legal(case: Case | None) -> bool:
    """Whether it is to train, and something can judge it."""
    return case is not None and not refusals(case) and bool(references(case))


def covering(axes: Mapping[str, tuple[Any, ...]], known: Iterable[Case], judge: str = "") -> list[Case]:
    """Cases in which every pair of these values meets that can meet at all; the known ones first.

    Args:
        judge: by which all of them can be judged, if by one.
    """
    draw = random.Random(0)
    chosen = list(known)
    covered: set[Pair] = set().union(*map(pairs_of, chosen))
    for pair in sorted(possible_pairs(axes), key=lambda pair: draw.random()):
        if pair in covered:
            continue
        best: Case | None = None
        most = found = 0
        for _ in range(TRIES):
            case = drawn(draw, axes, dict(pair))
            if case is None or not is_legal(case) or (judge and judge not in references(case)):
                continue
            new = len(pairs_of(case) - covered)
            if new > most:
                best, most = case, new
            found += 1
            if found == 100:
                break
        if best is not None:
            chosen.append(best)
            covered |= pairs_of(best)
    return chosen


def random_cases(count: int, seed: str) -> list[Case]:
    """Legal cases of the slow values too."""
    draw, found = random.Random(seed), []
    while len(found) < count:
        case = drawn(draw, SLOW, {})
        if case is not None and is_legal(case):
            found.append(case)
    return found


def quick() -> list[Case]:
    return [of_text(line) for line in QUICK.read_text().splitlines()]


if __name__ == "__main__":
    known = [case for case in quick() if exists(case) and is_legal(case)] if QUICK.is_file() else []
    by_hand = covering(BY_HAND, [case for case in known if "papers" in references(case)], "papers")
    cases = set(covering(AXES, {*known, *by_hand}))
    QUICK.write_text("".join(f"{case}\n" for case in sorted(cases, key=str)))
    print(f"{len(cases)} cases in {QUICK.name}")

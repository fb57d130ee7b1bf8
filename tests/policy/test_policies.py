"""Each policy is its picture, and the picture stands in its docstring."""

from __future__ import annotations

import inspect
from textwrap import dedent, indent

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpipe.errors import PolicyError
from fxpipe.plan import Phase
from fxpipe.policy import POLICIES, Latest, Policy, SpecTrain, Stash, default_for, make, sees
from fxpipe.schedule import Async, GPipe, OneFOneB, Schedule, Versions


def is_drawn(policy: Policy, picture: str) -> None:
    picture = dedent(picture).strip()
    assert sees(policy, Async(workers=3), 4) == picture
    assert indent(picture, "    ") in (inspect.getdoc(type(policy)) or "")


def test_latest() -> None:
    is_drawn(
        Latest(),
        """
        worker 0: F0@0 F1@0 F2@0 ..   ..   B0@0 F3@1 B1@1 ..   B2@2 ..   B3@3
        worker 1: ..   F0@0 F1@0 ..   B0@0 F2@1 B1@1 F3@2 B2@2 ..   B3@3
        worker 2: ..   ..   F0@0 B0@0 F1@1 B1@1 F2@2 B2@2 F3@3 B3@3
        """,
    )


def test_stash() -> None:
    is_drawn(
        Stash(),
        """
        worker 0: F0@0 F1@0 F2@0 ..   ..   B0@0 F3@1 B1@0 ..   B2@0 ..   B3@1
        worker 1: ..   F0@0 F1@0 ..   B0@0 F2@1 B1@0 F3@2 B2@1 ..   B3@2
        worker 2: ..   ..   F0@0 B0@0 F1@1 B1@1 F2@2 B2@2 F3@3 B3@3
        """,
    )


def test_spectrain() -> None:
    is_drawn(
        SpecTrain(),
        """
        worker 0: F0@0   F1@0+1 F2@0+2 ..     ..     B0@0   F3@1+2 B1@1   ..     B2@2   ..     B3@3
        worker 1: ..     F0@0   F1@0+1 ..     B0@0   F2@1+1 B1@1   F3@2+1 B2@2   ..     B3@3
        worker 2: ..     ..     F0@0+1 B0@0+1 F1@1+1 B1@1+1 F2@2+1 B2@2+1 F3@3+1 B3@3+1
        """,
    )


def ahead(phase: Phase, minibatch: int, reader: int, owner: int, workers: int) -> int:
    version = Versions(Async(workers)).version(phase, minibatch, reader, owner)
    return SpecTrain().ahead(phase=phase, minibatch=minibatch, version=version, owner=owner, workers=workers)


@pytest.mark.parametrize("workers", range(1, 9))
def test_spectrain_predicts_own_weights_as_far_as_the_paper_says(workers: int) -> None:
    for k in range(workers):
        assert ahead("F", 100, k, k, workers) == k // 2 + workers - 1 - k
        assert ahead("B", 100, k, k, workers) == k // 2


@given(st.data(), st.integers(1, 6), st.integers(0, 20), st.sampled_from("FB"))
def test_spectrain_has_one_target_for_every_reader(
    data: st.DataObject, workers: int, minibatch: int, phase: Phase
) -> None:
    reader, owner = (data.draw(st.integers(0, workers - 1)) for _ in range(2))
    version = Versions(Async(workers)).version(phase, minibatch, reader, owner)
    steps = ahead(phase, minibatch, reader, owner, workers)
    assert steps >= 0
    assert version + steps == minibatch + owner // 2


@pytest.mark.parametrize("schedule", [GPipe(2, 4), OneFOneB(2, 4)])
@pytest.mark.parametrize("policy", [Stash(), SpecTrain()])
def test_only_latest_makes_sense_with_a_flush(policy: Policy, schedule: Schedule) -> None:
    Latest().check(schedule)
    with pytest.raises(PolicyError, match="no pass ever sees stale weights") as caught:
        policy.check(schedule)
    assert caught.value.hint == "policy latest, or schedule async"


def test_spectrain_refuses_microbatches_without_a_flush() -> None:
    SpecTrain().check(Async(2))
    with pytest.raises(PolicyError, match="'async' has 3 microbatches"):
        SpecTrain().check(Async(2, 3))


def test_the_picture_of_what_a_policy_refuses_is_refused() -> None:
    with pytest.raises(PolicyError):
        sees(Stash(), GPipe(2), 1)


def test_the_names() -> None:
    assert {name: make(name) for name in POLICIES} == {
        "latest": Latest(),
        "stash": Stash(),
        "spectrain": SpecTrain(),
    }


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(PolicyError, match="no policy 'spektrain', did you mean 'spectrain'"):
        make("spektrain")


@pytest.mark.parametrize(
    ("schedule", "name"),
    [(Async(4), "spectrain"), (Async(4, 2), "latest"), (GPipe(4, 2), "latest"), (OneFOneB(4), "latest")],
)
def test_the_default(schedule: Schedule, name: str) -> None:
    assert default_for(schedule) == name
    make(name).check(schedule)

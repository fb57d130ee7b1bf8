"""Each policy is the picture that stands in its docstring."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from textwrap import indent
from typing import Any, ClassVar

import pytest

from fxpipe.errors import PolicyError
from fxpipe.policy import POLICIES, Policy, copies, default_for, make, register, sees
from fxpipe.policy.repair import REPAIRS
from fxpipe.schedule import Async, GPipe, NForwardsOneBackward, OneFOneB, Schedule
from fxpipe.schedule import make as make_schedule


@pytest.mark.parametrize(
    ("text", "workers", "microbatches", "minibatches"),
    [
        *((text, 3, 1, 4) for text in ("latest", "stash", "vertical", "spectrain", "pipeoptim", "lwp", "xgrad")),
        ("2bw", 3, 2, 2),
        ("2bw+predict", 2, 1, 4),
        ("xpipe", 2, 2, 2),
    ],
)
def test_the_picture_stands_in_the_docstring(text: str, workers: int, microbatches: int, minibatches: int) -> None:
    policy = make(text)
    drawn = sees(policy, Async(workers, microbatches), minibatches)
    assert indent(drawn, "    ") in (inspect.getdoc(type(policy)) or "")


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved"])
def test_xgrad_with_a_flush_predicts_one_update(name: str) -> None:
    schedule = make_schedule(name, 2, 2)
    cells = {
        cell.split("@")[1]
        for row in sees(make("xgrad"), schedule, 2).splitlines()
        for cell in row.split()
        if "@" in cell
    }
    assert cells == {"0+1", "1+1"}
    assert copies(make("xgrad"), schedule) == (1.0,) * schedule.workers


@pytest.mark.parametrize("schedule", [GPipe(2, 4), OneFOneB(2, 4)])
@pytest.mark.parametrize("text", [*(n for n in POLICIES if n not in ("latest", "xgrad")), "latest+ef", "xgrad+brake"])
def test_what_makes_no_sense_with_a_flush(text: str, schedule: Schedule) -> None:
    make("latest").check(schedule)
    with pytest.raises(PolicyError, match="weights are never stale") as caught:
        make(text).check(schedule)
    assert caught.value.hint == "use policy latest or schedule async"


def test_2bw_needs_as_many_microbatches_as_two_versions_allow() -> None:
    make("2bw").check(Async(4, 3))
    make("2bw").check(Async(1))
    with pytest.raises(PolicyError, match="on 4 workers and microbatches=2 a forward misses 2 updates") as caught:
        make("2bw").check(Async(4, 2))
    assert "with async 3" in str(caught.value.hint)
    make("2bw").check(NForwardsOneBackward(4, 6))
    with pytest.raises(PolicyError, match="with schedule 'nf1b' on 4 workers and microbatches=5 a forward misses 2"):
        make("2bw").check(NForwardsOneBackward(4, 5))


@pytest.mark.parametrize(
    "text",
    [
        "latest",
        "stash+ef",
        "pipeoptim+keep",
        "lwp+ef",
        "pipeoptim+ef+keep",
        "spectrain+ef",
        "2bw+ef+predict",
        "lwp+ef+brake",
    ],
)
def test_a_policy_is_its_text(text: str) -> None:
    assert str(make(text)) == text
    name, *options = text.split("+")
    assert make("+".join([name, *options[::-1]])) == make(text)


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(PolicyError, match="no policy 'spektrain', did you mean 'spectrain'"):
        make("spektrain")


def test_an_unknown_option_says_whose_it_is() -> None:
    with pytest.raises(PolicyError, match="policy 'spectrain' has no option 'keep'") as caught:
        make("spectrain+keep")
    assert caught.value.hint == "spectrain has: ef, brake; keep goes with: pipeoptim"


@pytest.fixture
def registered() -> Iterator[type[Policy]]:
    @register
    @dataclass(frozen=True)
    class Halfway(Policy):
        name: ClassVar[str] = "halfway"

        gently: bool = False

    yield Halfway
    del POLICIES["halfway"]


def test_a_policy_of_ones_own_is_known_by_its_name(registered: type[Policy]) -> None:
    assert make("halfway+gently") == registered(gently=True)  # type: ignore[call-arg]


def test_a_method_with_other_arguments_is_refused() -> None:
    def lag(self: Policy, action: Any, owner: int, schedule: Schedule) -> int:
        return 1

    with pytest.raises(PolicyError, match=r"policy 'older': lag.* cannot be called as fxpipe calls it") as caught:
        register(type("Older", (Policy,), {"name": "older", "lag": lag}))
    assert caught.value.hint is not None
    assert caught.value.hint.startswith("def lag(self, newest: ")
    assert "older" not in POLICIES


@pytest.mark.parametrize(
    ("method", "gives", "says"),
    [
        ("lag", lambda *given: -1, "F on worker 0 to read worker 0's weights -1 updates late, but .* the least is 1"),
        ("ahead", lambda *given: -1, "version 0 of worker 0's weights predicted -1 updates ahead for F0"),
        ("ahead", lambda *given: 1, "version 0 of worker 0's weights predicted 1 updates ahead for F0"),
    ],
)
def test_weights_that_do_not_exist_are_refused(method: str, gives: Any, says: str) -> None:
    wrong = type("Wrong", (Policy,), {"name": "wrong", method: gives})()
    with pytest.raises(PolicyError, match=says):
        sees(wrong, Async(2), 3)


@pytest.mark.parametrize(
    ("schedule", "name", "with_momentum"),
    [
        (Async(4), "spectrain", "spectrain"),
        (Async(4, 2), "spectrain", "spectrain"),
        (Async(4, 3), "spectrain", "spectrain+ef"),
        (Async(2), "spectrain", "spectrain+ef"),
        (Async(64, 64), "spectrain", "spectrain+ef"),
        (GPipe(4, 2), "latest", "latest"),
        (OneFOneB(4), "latest", "latest"),
    ],
)
def test_the_default(schedule: Schedule, name: str, with_momentum: str) -> None:
    assert (default_for(schedule), default_for(schedule, momentum=True)) == (name, with_momentum)
    make(with_momentum).check(schedule)


@pytest.mark.parametrize(
    ("text", "microbatches", "wanted"),
    [
        ("latest", 1, (0, 0, 0, 0)),
        ("stash", 1, (3, 2, 1, 0)),
        ("vertical", 1, (3, 3, 3, 3)),
        ("2bw", 4, (1, 1, 1, 1)),
        ("spectrain", 1, (1, 1, 1, 1)),
        ("pipeoptim", 1, (1, 1, 1, 0)),
        ("pipeoptim+keep", 1, (4, 3, 2, 0)),
        ("lwp", 1, (2, 2, 2, 1)),
        ("xgrad", 1, (4, 3, 2, 1)),
        ("latest+ef", 1, (4, 3, 2, 0)),
        ("latest+ef+brake", 1, (4, 3, 2, 0)),
        ("spectrain+ef", 4, (3, 3, 3, 1)),
        ("2bw+ef", 4, (3, 3, 3, 3)),
        ("2bw+predict", 4, (2, 2, 2, 1)),
        ("2bw+predict+ef", 4, (4, 4, 4, 3)),
    ],
)
def test_copies_are_what_the_docstrings_say(text: str, microbatches: int, wanted: tuple[int, ...]) -> None:
    assert copies(make(text), Async(4, microbatches)) == wanted


def test_a_switch_with_the_name_of_a_repair_is_refused() -> None:
    namespace = {"name": "own", "ef": True, "__annotations__": {"ef": bool}}
    with pytest.raises(PolicyError, match="option 'ef' of policy 'own' has the name of a repair"):
        register(dataclass(frozen=True)(type("Own", (Policy,), namespace)))
    assert "own" not in POLICIES


def test_every_repair_has_the_class_that_it_names() -> None:
    for repair in REPAIRS.values():
        assert repair.kind.name == repair.name

"""State that is no attribute and no variable: of generators, iterators and caches, and what only the backward does."""

from __future__ import annotations

import collections
import ctypes
import functools
import itertools
import os
import random
import string
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic as clock
from typing import Any

import numpy as np
import pytest
import torch
from stateful_steps import WIDTH, Net, data, loss
from torch import Tensor

import fxpipe
from fxpipe.errors import CaptureError
from fxpipe.lowering.compare_with_eager import compare_with_eager

Change = Callable[[Net, Tensor], Tensor]


class Thing:
    steps = 0


def one_then_three(last: int) -> Iterator[float]:
    for _ in range(last):
        yield 1.0
    while True:
        yield 3.0


def drawn(draw: Callable[[], float]) -> Change:
    """A layer that is left out at times: both calls of capture may draw alike."""
    return lambda net, x: x * 2 if draw() < 0.2 else x


def taken(numbers: Iterator[float]) -> Change:
    return lambda net, x: x * 2 if next(numbers) > 2 else x


def counted(up: Callable[[], int]) -> Change:
    return lambda net, x: x * 2 if up() > 5 else x


def upper(table: Any) -> Callable[[], int]:
    def up() -> int:
        table["steps"] += 1
        return int(table["steps"])

    return up


def behind_a_weak_reference(thing: Thing) -> Change:
    seen = weakref.ref(thing)

    def up() -> int:
        found = seen()
        assert found is not None
        found.steps += 1
        return found.steps

    return counted(up)


def on_a_module() -> int:
    string.steps = getattr(string, "steps", 0) + 1  # type: ignore[attr-defined]
    return int(string.steps)  # type: ignore[attr-defined]


def in_an_array(values: Any) -> Callable[[], int]:
    def up() -> int:
        values[0] += 1
        return int(values[0])

    return up


def from_numpy(values: Any) -> Change:
    """No call that capture sees tells the values."""

    def change(net: Net, x: Tensor) -> Tensor:
        values[:] += 1
        return x * torch.from_numpy(values)

    return change


def gradient_of_an_earlier_call(net: Net, x: Tensor) -> Tensor:
    y = x * 1
    if net.hidden is not None and net.hidden.grad is not None:
        y = y + net.hidden.grad.mean()
    y.retain_grad()
    net.hidden = y
    return y


def growing(container: Any, grow: Callable[[Any], Any]) -> Change:
    def up() -> int:
        grow(container)
        return len(container)

    return counted(up)


def another_mode(net: Net, x: Tensor) -> Tensor:
    x = torch.nn.functional.dropout(x, 0.5, net.last.training)
    net.last.eval()
    return x


def in_turn(table: collections.OrderedDict[str, float]) -> Change:
    """Neither the keys nor the values change."""

    def change(net: Net, x: Tensor) -> Tensor:
        key = next(iter(table))
        table.move_to_end(key)
        return x * table[key]

    return change


def made_by_the_first_call(net: Net, x: Tensor) -> Tensor:
    if not hasattr(net, "made"):
        net.made = {"steps": [0]}
    net.made["steps"][0] += 1
    return x * 2 if net.made["steps"][0] > 300 else x


def made_by_the_second_call(net: Net, x: Tensor) -> Tensor:
    net.calls = min(net.calls + 1, 2)
    if net.calls == 2:
        net.made = vars(net).get("made") or Thing()
        net.made.steps += 1
    return x * 2 if net.calls == 2 and net.made.steps > 300 else x


def of_a_function() -> int:
    of_a_function.steps = getattr(of_a_function, "steps", 0) + 1  # type: ignore[attr-defined]
    return int(of_a_function.steps)  # type: ignore[attr-defined]


def by_its_name() -> int:
    globals()["LATE"] = globals().get("LATE", 0) + 1
    return int(globals()["LATE"])


class Lazy:
    @functools.cached_property
    def table(self) -> dict[str, int]:
        return {"steps": 0}


def cached(maxsize: int | None) -> Callable[[], int]:
    @functools.lru_cache(maxsize)
    def state() -> list[int]:
        return [0]

    def up() -> int:
        state()[0] += 1
        return state()[0]

    return up


def in_a_generators_variable() -> Iterator[int]:
    seen = [0]
    while True:
        seen[0] += 1
        yield seen[0]


def of_c(count: Any) -> Callable[[], int]:
    def up() -> int:
        count.value += 1
        return int(count.value)

    return up


def of_a_thread(own: threading.local) -> Callable[[], int]:
    def up() -> int:
        own.steps = getattr(own, "steps", 0) + 1
        return int(own.steps)

    return up


def in_the_environment() -> int:
    os.environ["STEPS"] = str(int(os.environ.get("STEPS", "0")) + 1)
    return int(os.environ["STEPS"])


def one_noise() -> Change:
    """Eager draws it once; a graph would draw it in every step."""

    @functools.lru_cache
    def noise() -> Tensor:
        return torch.randn(WIDTH)

    return lambda net, x: x + noise()


def without_gradients_at_first(net: Net, x: Tensor) -> Tensor:
    """The same calls, and yet not the same step."""
    net.calls += 1
    with torch.set_grad_enabled(net.calls > 3):
        return x * 2


LAZY = Lazy()
OWN, OLD, NEW, THING = random.Random(1), np.random.RandomState(1), np.random.default_rng(1), Thing()

REFUSED: dict[str, tuple[Change, str]] = {
    "random": (drawn(random.random), "draws random numbers from random,"),
    "numpy": (drawn(np.random.rand), "draws random numbers from numpy.random,"),
    "own": (drawn(lambda: OWN.random()), "draws random numbers from OWN,"),
    "numpy old": (drawn(lambda: OLD.rand()), "draws random numbers from OLD,"),
    "numpy new": (drawn(lambda: float(NEW.random())), "draws random numbers from NEW,"),
    "generator": (taken(one_then_three(4)), "changes numbers,"),
    "map": (taken(map(float, itertools.chain([1] * 4, itertools.repeat(3)))), "changes numbers,"),
    "cycle": (taken(itertools.cycle([1.0, 1.0, 1.0, 1.0, 3.0])), "changes numbers,"),
    "count": (taken(itertools.count(-8)), "changes numbers,"),
    "list": (taken(iter([1.0] * 8 + [3.0] * 99)), "changes numbers,"),
    "user dict": (counted(upper(collections.UserDict(steps=0))), r"changes table\.data\['steps'\] \(0 → 10\),"),
    "weak": (behind_a_weak_reference(THING), r"changes seen\.steps \(nothing → 10\),"),
    "on a module": (counted(on_a_module), r"changes string\.steps \(nothing → 10\),"),
    "large array": (counted(in_an_array(np.zeros(100_000))), "changes values,"),
    "from numpy": (from_numpy(np.zeros(WIDTH, np.float32)), "changes values,"),
    "gradient": (gradient_of_an_earlier_call, "changes hidden,"),
    "mode": (another_mode, r"changes last\.training \(True → False\),"),
    "order": (in_turn(collections.OrderedDict(a=1.0, b=2.0)), "changes table,"),
    "set": (growing(set(), lambda s: s.add(len(s))), r"changes container \(0 → 6 elements\),"),
    "dict": (growing({}, lambda d: d.setdefault(len(d))), r"changes container \(0 → 6 elements\),"),
    "one noise": (one_noise(), "changes noise,"),
    "first call": (made_by_the_first_call, r"changes made\['steps'\]\[0\] \(1 → 1000\),"),
    "second call": (made_by_the_second_call, r"changes calls \(0 → 2\), made\.steps \(1 → 1000\),"),
    "function": (counted(of_a_function), r"changes up\.steps \(nothing → 10\),"),
    "name": (counted(by_its_name), r"changes LATE \(nothing → 10\),"),
    "cached property": (counted(lambda: upper(LAZY.table)()), r"changes LAZY\.table\['steps'\] \(1 → 10\),"),
    "cached": (counted(cached(None)), r"changes .*state\(\)\S*\[0\] \(1 → 10\),"),
    "cached few": (counted(cached(4)), r"changes .*state\(\)\S*\[0\] \(1 → 10\),"),
    "generator's": (counted(functools.partial(next, in_a_generators_variable())), r"changes seen\[0\] \(3 → 6\),"),
    "ctypes": (counted(of_c(ctypes.c_int(0))), "changes count,"),
    "thread": (counted(of_a_thread(threading.local())), r"changes own\.steps \(nothing → 10\),"),
    "environment": (counted(in_the_environment), r"changes os\.environ\._data"),
    "no gradients": (without_gradients_at_first, r"changes calls \(0 → 4\),"),
}


@pytest.mark.parametrize(("change", "said"), REFUSED.values(), ids=REFUSED)
def test_what_later_steps_need_is_refused(change: Change, said: str) -> None:
    random.seed(3)  # two draws that leave the layer out
    np.random.seed(1)
    before = OWN.getstate(), str(OLD.get_state()), NEW.bit_generator.state, random.getstate(), THING.steps
    with pytest.raises(CaptureError, match=f"the step {said}.* its later calls") as caught:
        fxpipe.capture(Net(change), loss, data())
    assert caught.value.hint
    assert caught.value.page == ("randomness" if "draws" in said else "python-state")
    after = OWN.getstate(), str(OLD.get_state()), NEW.bit_generator.state, random.getstate(), THING.steps
    assert after == before, "capture leaves no trace"


def in_a_file(path: Path) -> Callable[[], int]:
    def up() -> int:
        steps = len(path.read_bytes()) + 1
        path.write_bytes(b"." * steps)
        return steps

    return up


BEGUN = time.monotonic()
UNSEEN: dict[str, Callable[[Path], Change]] = {
    "file": lambda path: counted(in_a_file(path)),
    "clock": lambda path: lambda net, x: x * 2 if time.monotonic() - BEGUN > 3_600 else x,
    "clock of its own name": lambda path: lambda net, x: x * 2 if clock() - BEGUN > 3_600 else x,
}


@pytest.mark.parametrize("change", UNSEEN.values(), ids=UNSEEN)
def test_what_no_walk_reaches_is_refused(change: Callable[[Path], Change], tmp_path: Path) -> None:
    (tmp_path / "steps").write_bytes(b"")
    with pytest.raises(CaptureError, match="later calls compute something else, and fxpipe does not see why"):
        fxpipe.capture(Net(change(tmp_path / "steps")), loss, data())


def scheduled(net: Net, x: Tensor) -> Tensor:
    """As in CDAN: what reverses the gradient grows with the steps; the forward is the same in all of them."""
    net.calls += 1
    share = min(1.0, net.calls / 100)
    x = x * 1.0
    x.register_hook(lambda gradient: -share * gradient)
    return x


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, share: float) -> Tensor:
        ctx.share = share
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return -ctx.share * gradient, None


def scheduled_in_a_function(net: Net, x: Tensor) -> Tensor:
    net.calls += 1
    return Reversed.apply(x, min(1.0, net.calls / 100))  # type: ignore[no-any-return, no-untyped-call]


class Counts(torch.autograd.Function):
    """Only its backward counts."""

    steps = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        Counts.steps += 1
        return gradient * 2 if Counts.steps > 3 else gradient


class Stops(Counts):
    """No torch call tells its steps apart."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor | None:  # type: ignore[override]
        Stops.steps += 1
        return None if Stops.steps > 3 else gradient


LAST: dict[str, Tensor] = {}


def remembers(net: Net, x: Tensor) -> Tensor:
    def add(gradient: Tensor) -> Tensor:
        before = LAST.get("gradient")
        LAST["gradient"] = gradient.detach()
        return gradient if before is None else gradient + before

    x = x * 1.0
    x.register_hook(add)
    return x


BACKWARD: dict[str, tuple[Change, str]] = {
    "scheduled": (scheduled, r"calls \(0 → 2\)"),
    "scheduled in a function": (scheduled_in_a_function, r"calls \(0 → 2\)"),
    "counts": (lambda net, x: Counts.apply(x), r"Counts\.steps \(0 → 4\)"),  # type: ignore[no-untyped-call]
    "stops": (lambda net, x: Stops.apply(x), r"Stops\.steps \(\w+ → 4\)"),  # type: ignore[no-untyped-call]
    "remembers": (remembers, r"LAST \(0 → 1 elements\)"),
}


@pytest.mark.parametrize(("change", "name"), BACKWARD.values(), ids=BACKWARD)
def test_the_backward_is_tried_too(change: Change, name: str) -> None:
    with pytest.raises(CaptureError, match=f"the step changes {name}, so its later calls"):
        fxpipe.capture(Net(change), loss, data())
    assert (Counts.steps, Stops.steps, LAST) == (0, 0, {}), "capture leaves no trace"


@pytest.mark.parametrize("name", ["steps", "seen"])
def test_what_is_set_on_a_parameter_is_refused(name: str) -> None:
    def marked(net: Net, x: Tensor) -> Tensor:
        setattr(net.first.weight, name, getattr(net.first.weight, name, 0) + 1)
        return x

    net = Net(marked)
    net.first.weight.steps = 5  # type: ignore[attr-defined]
    with pytest.raises(CaptureError, match=f"sets {name} on first.weight: attributes of tensors"):
        fxpipe.capture(net, loss, data())
    assert vars(net.first.weight) == {"steps": 5}


def test_a_parameters_hook_is_code_of_the_step() -> None:
    steps = [0]

    def louder(gradient: Tensor) -> Tensor:
        steps[0] += 1
        return gradient * 2 if steps[0] > 300 else gradient

    net = Net(lambda net, x: x)
    net.first.weight.register_hook(louder)
    with pytest.raises(CaptureError, match=r"changes steps\[0\] \(0 → 1000\), so its later calls"):
        fxpipe.capture(net, loss, data())
    assert steps == [0]


def test_a_gradient_that_is_looked_at_is_no_state() -> None:
    norms: list[Tensor] = []
    net = Net(lambda net, x: Reversed.apply(x, 0.5))  # type: ignore[no-untyped-call]
    net.first.weight.register_hook(lambda gradient: norms.append(gradient.norm()))
    net.last.register_full_backward_hook(lambda module, given, made: norms.append(made[0].norm()))
    (told, warning) = sorted(fxpipe.capture(net, loss, data()).warnings)
    assert told.startswith("gradient hooks see one microbatch's gradient")
    assert warning.startswith("the step changes norms (0 → 2 elements)")
    assert norms == []


@functools.lru_cache
def positions(width: int) -> Tensor:
    return torch.arange(width).float()


class Tables:
    @functools.lru_cache  # noqa: B019 (people do)
    def positions(self, width: int) -> Tensor:
        return torch.arange(width).float()


TABLES = Tables()


@pytest.mark.parametrize("change", [lambda net, x: x + positions(WIDTH), lambda net, x: x + TABLES.positions(WIDTH)])
def test_a_cached_table_is_made_in_every_step(change: Change) -> None:
    net = Net(change)
    build = fxpipe.compile(net, loss, data(), workers=2, cost="analytic")
    assert fxpipe.capture(net, loss, data()).warnings == ()
    assert compare_with_eager(build, net, loss, data()).largest < 1e-6
    assert torch.equal(positions(WIDTH), torch.arange(WIDTH).float()), "nothing of the trace is left in it"


def test_draws_that_nothing_needs_are_told() -> None:
    own, steady = random.Random(1), one_then_three(0)
    (warning,) = fxpipe.capture(Net(lambda net, x: x if own.random() < 2 else -x), loss, data()).warnings
    assert warning.startswith("the step changes own: every step of a run sees the value from before capture")
    assert fxpipe.capture(Net(lambda net, x: x * next(steady)), loss, data()).warnings == ()
    entropy = random.SystemRandom()
    assert fxpipe.capture(Net(lambda net, x: x if entropy.random() < 2 else -x), loss, data()).warnings == ()

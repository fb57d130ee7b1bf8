"""Measured times add up to the whole, and known ones are not measured again."""

from __future__ import annotations

import dataclasses
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cached import captured
from small_models import CASES
from torch import Tensor, nn

import fxpipe
from fxpipe.costs import node_times as clock
from fxpipe.costs import timer
from fxpipe.costs.node_times import measure
from fxpipe.costs.node_times import node_costs as found
from fxpipe.costs.timer import Rounds
from fxpipe.errors import CaptureError
from fxpipe.ir.program import Program, info
from fxpipe.ir.transform import run_passes
from fxpipe.passes.fold import Fold
from fxpipe.passes.units import Units

aten = torch.ops.aten


def folded(name: str) -> Program:
    return run_passes(captured(name)[2], [Fold(), Units()])


def made(model: nn.Module, step: Callable[[nn.Module, Any], Tensor], batch: Any, **options: Any) -> Program:
    return run_passes(fxpipe.capture(model, step, batch, **options), [Fold(), Units()])


def phase_sums(program: Program, seconds: dict[str, float]) -> dict[str, float]:
    return {p: sum(seconds[n.name] for n in program if info(n).phase == p) for p in ("F", "B")}


class TickTock:
    """A clock that goes on by one second whenever it is looked at."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


SEEN: list[tuple[str, Any]] = []


def slow_tanh(x: Tensor) -> Tensor:
    time.sleep(0.05)
    return aten.tanh.default(x)


def watched_tanh(x: Tensor) -> Tensor:
    result = aten.tanh.default(x)
    SEEN.append(("made", weakref.ref(result)))
    return result


def counting_view(x: Tensor, shape: list[int]) -> Tensor:
    """Notes how many values of `watched_tanh` are alive."""
    SEEN.append(("alive", sum(made() is not None for kind, made in SEEN if kind == "made")))
    return aten.view.default(x, shape)


def two_layers() -> Program:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    return made(model, lambda m, x: m(x).square().mean(), torch.randn(8, 4))


def test_nodes_are_scaled_to_add_up_to_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two looks at this clock lies a second: a plain phase takes one, and so does each node between ticks."""
    monkeypatch.setattr(timer, "perf_counter", TickTock())
    program = folded("gpt")
    seconds, ratios, _ = measure(program, repeats=3)
    counts = {p: sum(info(n).phase == p for n in program) for p in ("F", "B")}
    assert min(counts.values()) > 50
    assert ratios == pytest.approx({p: 1 / n for p, n in counts.items()})
    assert phase_sums(program, seconds) == pytest.approx({"F": 1.0, "B": 1.0})
    assert len(set(seconds.values())) == 2


def test_disturbed_runs_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timer, "perf_counter", TickTock())
    run, runs = clock._run, iter(range(100))

    def disturbed(*arguments: Any) -> Any:
        times = run(*arguments)
        return [[t * 1000 for t in row] for row in times] if next(runs) in (2, 3, 4) else times

    monkeypatch.setattr(clock, "_run", disturbed)
    program = folded("function")
    assert phase_sums(program, measure(program, repeats=3)[0]) == pytest.approx({"F": 1.0, "B": 1.0})


@pytest.mark.parametrize("name", CASES)
def test_every_node_of_every_program_is_measured(name: str) -> None:
    program = folded(name)
    seconds, ratios, _ = measure(program, repeats=1)
    assert seconds.keys() == {n.name for n in program}
    assert min(seconds.values()) > 0
    assert set(ratios) == {"F", "B"}


def test_a_slow_node_is_found() -> None:
    program = two_layers()
    (node,) = (n for n in program if n.target is aten.tanh.default)
    node.target = slow_tanh
    seconds, *_ = measure(program, repeats=3)
    assert max(seconds, key=seconds.__getitem__) == node.name
    assert 0.04 < seconds[node.name] < 2.0


def test_measuring_leaves_threads_random_numbers_and_values_alone() -> None:
    program = folded("gpt-dropout")
    torch.manual_seed(3)
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    values = {name: value.clone() for name, value in program.values.items()}
    measure(program, threads=threads + 1, repeats=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    assert all(torch.equal(program.values[name], value) for name, value in values.items())


def test_backward_lets_go_of_what_it_has_used() -> None:
    """Else a backward's new values would never find the memory of old ones, as they do in an emitted stage."""
    program = two_layers()
    (node,) = (n for n in program if n.target is aten.tanh.default)
    node.target = watched_tanh
    last = [n for n in program if info(n).phase == "B"][-1]
    assert last.target is aten.view.default
    last.target = counting_view
    SEEN.clear()
    measure(program, repeats=1)
    assert [kind for kind, _ in SEEN].count("alive") == 4, "twice as it is and twice with ticks"
    assert [reference for kind, reference in SEEN if kind == "alive"] == [0] * 4


class Planted:
    """Runs of phases that take what they are given, with the rounds of one measurement after those of another.

    A round is a plain forward and backward, then the sum of what their nodes take.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, first: list[Any], again: list[Any]) -> None:
        self.rounds, self.ran = [first[0], *first, *again], list[tuple[str, ...]]()
        monkeypatch.setattr(clock, "_run", self.run)
        monkeypatch.setattr(clock, "ROUNDS", Rounds.exactly(len(first)))
        monkeypatch.setattr(clock, "AGAIN", Rounds.exactly(max(len(again), 1)))

    def run(self, codes: list[Any]) -> list[list[float]]:
        place, ticks = divmod(len(self.ran), 2)
        if place == 0:
            ticks = not ticks  # the first of all has ticks
        self.ran.append(tuple(code.phase for code in codes))
        found = []
        for code in codes:
            whole, of_nodes = self.rounds[place][code.phase]
            found.append([of_nodes / len(code.nodes)] * len(code.nodes) if ticks else [whole])
        return found


def planted(forward: float, backward: float) -> dict[str, tuple[float, float]]:
    """A round whose phases take 0.1 s each, and their nodes so many times that."""
    return {"F": (0.1, 0.1 * forward), "B": (0.1, 0.1 * backward)}


def test_what_contradicts_itself_is_measured_again_once(monkeypatch: pytest.MonkeyPatch) -> None:
    program = two_layers()
    good, bad, other = planted(1.0, 1.0), planted(1.0, 0.16), planted(3.0, 1.0)
    runs = Planted(monkeypatch, [good] * 3, [bad] * 3)
    assert measure(program)[1:] == (pytest.approx({"F": 1.0, "B": 1.0}), pytest.approx(0.0))
    assert len(runs.ran) == 2 + 2 * 3, "nothing contradicts anything"
    runs = Planted(monkeypatch, [bad] * 3, [other] * 2)
    assert measure(program)[1] == pytest.approx({"F": 1.0, "B": 1.0}), "the first forward, the second backward"
    assert len(runs.ran) == 2 + 2 * (3 + 2)
    runs = Planted(monkeypatch, [other] * 3, [good] * 2)
    assert measure(program)[1] == pytest.approx({"F": 1.0, "B": 1.0})
    assert runs.ran[-4:] == [("F",)] * 4, "a forward needs no backward"
    runs = Planted(monkeypatch, [bad] * 3, [bad] * 2)
    (warning,) = found(program).warnings
    assert warning.startswith("the times of backward's nodes add up to 0.16 times what it takes as a whole")
    monkeypatch.setattr(clock, "SHORT", 0.5)
    runs = Planted(monkeypatch, [bad] * 3, [good])
    assert measure(program)[1]["B"] == pytest.approx(1 / 0.16)
    assert len(runs.ran) == 2 + 2 * 3, "that would take too long"


def test_two_halves_of_the_rounds_say_how_far_times_spread() -> None:
    even, early = [1.0, 1.0, 1.0, 1.0], [3.0, 1.0, 0.0, 0.0]
    assert clock._phase_times([4.0] * 4, [even] * 4).spread == 0.0
    assert clock._phase_times([4.0] * 4, [even, [2 * t for t in even]] * 2).spread == 0.0, "all slower alike"
    assert clock._phase_times([4.0] * 4, [even, early] * 2).spread == pytest.approx(0.5)
    assert clock._phase_times([4.0], [early]).spread == 0.0


def test_a_ratio_far_from_one_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    program = folded("function")
    even = dict.fromkeys([n.name for n in program], 1e-3)
    monkeypatch.setattr(clock, "measure", lambda *_: (even, {"F": 1.2, "B": 2.0}, 0.0))
    (warning,) = found(program).warnings
    assert warning.startswith("the times of backward's nodes add up to 0.50 times what it takes as a whole")


def test_a_step_that_does_not_fit_the_device() -> None:
    def step(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).sum() * torch.ones(1 << 50, dtype=torch.float64).sum()

    program = made(nn.Linear(2, 2), step, torch.ones(1, 2))
    with pytest.raises(CaptureError, match="the whole step does not fit this device") as caught:
        found(program)
    assert "--cost analytic" in str(caught.value)
    assert "test_node_costs.py" in str(caught.value)


def never(*_: Any) -> Any:
    raise AssertionError("measured again")


def test_known_costs_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, path = folded("function"), tmp_path / "node_costs.json"
    measured = dataclasses.replace(found(program, repeats=1), ratios={"F": 1.0, "B": 0.9}, warnings=())
    path.write_text(measured.to_json())
    monkeypatch.setattr(clock, "measure", never)
    assert found(program, known=path) == measured
    with pytest.raises(AssertionError, match="measured again"):
        found(program, known=path, threads=7)
    with pytest.raises(AssertionError, match="measured again"):
        found(folded("dict"), known=path)


def test_doubtful_costs_are_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, path = folded("function"), tmp_path / "node_costs.json"
    path.write_text(dataclasses.replace(found(program, repeats=1), ratios={"F": 1.0, "B": 2.0}).to_json())
    monkeypatch.setattr(clock, "measure", never)
    with pytest.raises(AssertionError, match="measured again"):
        found(program, known=path)


def test_a_corrupt_file_costs_a_warning(tmp_path: Path) -> None:
    program, path = folded("function"), tmp_path / "node_costs.json"
    path.write_text("{")
    costs = found(program, repeats=1, known=path)
    assert costs.warnings[0].startswith("node_costs.json cannot be read: ")
    assert costs.warnings[0].endswith(f"({path}:1); they are measured again")
    path.write_text(dataclasses.replace(costs, ratios={"F": 0.0, "B": 1.0}).to_json())
    (warning, *_) = found(program, repeats=1, known=path).warnings
    assert (
        warning
        == f"node_costs.json cannot be read: F and B need a ratio each ({path}, $.ratios); they are measured again"
    )

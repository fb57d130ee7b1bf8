"""Checkpoints that worker 0 decides on are known to all workers early enough, and to all the same."""

from __future__ import annotations

import itertools

import pytest

from fxpipe.runtime.wires.board import ASKED, MOVE, DictBoard
from fxpipe.runtime.worker import captures as module
from fxpipe.runtime.worker.captures import Agenda


class Clock:
    """Time that passes as the test says."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module, "monotonic", made)
    return made


def play(
    clock: Clock, steps: int, pace: float, seconds: float | None, asks_at: int | None, worker: int = 0
) -> tuple[Agenda, Agenda, list[int]]:
    """Two workers begin minibatches; the steps that both know, three steps before, are saved."""
    board, asked = DictBoard(), [False, False]
    first = Agenda(board, 0, 3, seconds, True, lambda: asked[0])
    second = Agenda(board, 0, 3, seconds, False, lambda: asked[1])
    known = []
    for minibatch in range(steps):
        asked[worker] |= minibatch == asks_at
        first.begin(minibatch, max(0, minibatch - 3))
        second.begin(minibatch, 0)
        assert len(board._texts) <= 5
        for agenda in (first, second):
            assert (minibatch + 3 in agenda) == (minibatch + 3 in first)
        known += [minibatch + 3] if minibatch + 3 in first else []
        clock.now += pace
    return first, second, known


def test_by_the_clock(clock: Clock) -> None:
    _, _, known = play(clock, 400, pace=0.1, seconds=10.0, asks_at=None)
    assert len(known) == 3  # 40 seconds, entries once a second
    assert all(90 <= after - before <= 120 for before, after in itertools.pairwise(known))


def test_slow_steps_have_an_entry_each(clock: Clock) -> None:
    _, _, known = play(clock, 40, pace=10.0, seconds=25.0, asks_at=None)
    assert [after - before for before, after in itertools.pairwise(known)] == [3] * (len(known) - 1)


@pytest.mark.parametrize("worker", [0, 1])
def test_a_request_is_the_last(clock: Clock, worker: int) -> None:
    first, second, known = play(clock, 200, pace=0.1, seconds=None, asks_at=57, worker=worker)
    assert known == [first.stop] == [second.stop]
    assert 57 <= known[0] <= 57 + (1 + worker) * 10 + 3  # another process notes it at one entry, for the next


def test_nothing_without_reason(clock: Clock) -> None:
    first, _, known = play(clock, 200, pace=0.1, seconds=None, asks_at=None)
    assert known == []
    assert first.stop is None


def test_a_run_that_cannot_move_goes_on(clock: Clock) -> None:
    """And stops for a later request, at a step that both know."""
    board, stopping = DictBoard(), False
    first = Agenda(board, 0, 3, None, True, lambda: stopping)
    second = Agenda(board, 0, 3, None, False, lambda: False)
    board.set(ASKED, f"{MOVE} 1")
    for minibatch in range(200):
        for agenda in (first, second):
            agenda.begin(minibatch, max(0, minibatch - 3))
        clock.now += 0.1
        if minibatch == 40:
            board.forget([ASKED])
            assert first.stop == second.stop == 3
            for agenda in (first, second):
                agenda.go_on(3)
        if minibatch == 80:
            assert first.stop is None
            stopping = True
    assert first.stop == second.stop
    assert 80 < first.stop < 100

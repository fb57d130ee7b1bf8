"""Updates a minibatch late: which action makes them, and what every action then sees."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpipe.policy import make as make_policy
from fxpipe.policy.picture import sight
from fxpipe.schedule import Action, AsyncLate, Schedule, Versions, make
from fxpipe.schedule.order import play, read
from fxpipe.schedule.versions import most_missed


def test_the_next_minibatch_ends_with_the_update() -> None:
    schedule = AsyncLate(2, 3)
    assert schedule.update_of(4) == Action.parse("B5.2")
    assert schedule.updated_by(Action.parse("B5.2")) == 4
    assert schedule.updated_by(Action.parse("B5.1")) is None
    assert schedule.updated_by(Action.parse("F5.2")) is None
    assert schedule.updated_by(Action.parse("B0.2")) is None
    assert schedule.updated_by(Action.parse("B5.2"), start=5) is None  # what a flush has made already
    assert schedule.ends(Action.parse("B0.2"))


def _counted(schedule: Schedule, minibatches: int) -> dict[tuple[int, Action], list[int]]:
    """By reader and action, how many updates of each owner happen before it, if updates are those of `async`; by sets
    of events, and beyond the minibatch's own."""
    before: dict[tuple[int, Action], frozenset[tuple[int, Action]]] = {}
    last: dict[int, frozenset[tuple[int, Action]]] = {}
    found = {}
    for step in play(schedule, read(schedule, minibatches)):
        known = last.get(step.worker, frozenset()).union(*(before[event] for event in step.after))
        found[step.worker, step.action] = [
            sum(worker == owner and schedule.ends(action) for worker, action in known)
            for owner in range(schedule.workers)
        ]
        last[step.worker] = before[step.worker, step.action] = known | {(step.worker, step.action)}
    return found


@pytest.mark.parametrize(("workers", "microbatches"), list(product([1, 2, 3, 4], [1, 2, 3])))
def test_every_lag_is_one_more(workers: int, microbatches: int) -> None:
    """But for a backward before the owner: with `async` it may not see its own minibatch's update, here it need not."""
    versions, plain = Versions(AsyncLate(workers, microbatches)), Versions(make("async", workers, microbatches))
    last = 3 * workers + 4
    for (reader, action), ended in _counted(make("async", workers, microbatches), last + workers + 1).items():
        if action.minibatch != last:
            continue
        for owner, count in enumerate(ended):
            place = action.phase, reader, owner, action.microbatch
            assert versions.lag(*place) == last - (count - 1)
            assert plain.lag(*place) == max(0, last - count)
            assert versions.lag(*place) == plain.lag(*place) + (count <= last)


@given(st.integers(1, 6), st.integers(1, 6))
def test_a_worker_misses_one_more(workers: int, microbatches: int) -> None:
    assert most_missed(AsyncLate(workers, microbatches)) == most_missed(make("async", workers, microbatches)) + 1


@pytest.mark.parametrize("name", ["spectrain", "pipeoptim", "lwp", "xpipe"])
@pytest.mark.parametrize(("workers", "microbatches"), [(1, 1), (2, 1), (3, 1), (4, 2), (3, 4)])
def test_predictions_reach_one_further(name: str, workers: int, microbatches: int) -> None:
    """For the same version: that which the minibatch's update meets, or the policy's own moment."""
    policy, minibatch = make_policy(name), 20
    late, plain = Versions(AsyncLate(workers, microbatches)), Versions(make("async", workers, microbatches))
    for worker, phase, j in product(range(workers), ("F", "B"), range(microbatches)):
        action = Action(phase, minibatch, j)  # type: ignore[arg-type]
        (version, ahead), (newer, fewer) = (sight(policy, known, action, worker) for known in (late, plain))
        if name == "xpipe" and workers == 1:
            newer, fewer = minibatch, 0
        assert (version, ahead) == (newer - 1, fewer + 1)

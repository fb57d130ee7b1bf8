"""What waits its turn on a link, worked out by hand."""

from __future__ import annotations

import pytest

from fxpipe.plan.cost_records import StageTime
from fxpipe.plan.urgency import CHUNK, SAVED, URGENT, WEIGHTS, turn_of
from fxpipe.planner.links import Links
from fxpipe.schedule import make
from fxpipe.simulator.scenario import Message, Scenario, WeightCopy
from fxpipe.simulator.simulate import Simulation, simulate

ONE_A_SECOND = Links(bandwidth=CHUNK)
ONES = (StageTime(1, 1), StageTime(1, 1))


def begins(simulation: Simulation, worker: int, action: str) -> float:
    return next(span.start for span in simulation.spans[worker] if str(span.action) == action)


@pytest.mark.parametrize(
    ("kind", "turn"),
    [("saved", SAVED), ("weights", WEIGHTS), ("activation", URGENT), ("gradient", URGENT), ("input", URGENT)],
)
def test_large_saved_values_and_weights_wait(kind: str, turn: int) -> None:
    assert turn_of(kind, CHUNK) == URGENT
    assert turn_of(kind, CHUNK + 1) == turn


def test_a_weight_copy_lets_a_gradient_pass() -> None:
    """Worker 1 sends its weights after B0, at 3, and the gradient of the next microbatch at 5."""
    gradient = Message(1, "B", 0, "B", CHUNK / 2)
    weights = WeightCopy(1, 0, (("F", (4,)),), 4.5 * CHUNK, WEIGHTS)
    costs = (StageTime(1, 1), StageTime(1, 1.25))
    found = simulate(make("async", 2), Scenario(costs, (gradient,), (weights,), ONE_A_SECOND), 6)
    assert begins(found, 0, "B1") == 6.25  # sent at 5.5, behind the chunk that is on its way
    urgent = WeightCopy(1, 0, (("F", (4,)),), 4.5 * CHUNK)
    found = simulate(make("async", 2), Scenario(costs, (gradient,), (urgent,), ONE_A_SECOND), 6)
    assert begins(found, 0, "B1") == 8.75


def test_saved_values_go_before_weights_and_activations_before_both() -> None:
    """Two microbatches: the weights of the first minibatch are still on their way when the next forward sends."""
    messages = (Message(0, "F", 1, "B", 2 * CHUNK, turn=SAVED), Message(0, "F", 1, "F", CHUNK))
    weights = WeightCopy(0, 1, (("F", (1,)),), 3 * CHUNK, WEIGHTS)
    found = simulate(make("1f1b", 2), Scenario(ONES, messages, (weights,), ONE_A_SECOND), 3)
    assert [begins(found, 1, name) for name in ("F0", "B0", "F1", "B1", "F2")] == [2, 4, 8, 10, 14]


def test_a_worker_that_waits_for_weights_has_them_when_the_last_chunk_has_come() -> None:
    weights = WeightCopy(1, 0, (("F", (0,)),), 2.5 * CHUNK, WEIGHTS)
    links = Links(bandwidth=CHUNK, latency=0.25)
    found = simulate(make("1f1b", 2), Scenario(ONES, weight_copies=(weights,), links=links), 2)
    sent = found.spans[1][1].end
    assert next(span.start for span in found.spans[0] if str(span.action) == "F1") == sent + 2.75

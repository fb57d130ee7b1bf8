"""Messages between workers of one process: the same tensors, in the order of their tags, and never waited for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fxpipe.errors import RunError
from fxpipe.observe.watch import Watch
from fxpipe.plan.build_folder import read_plan
from fxpipe.plan.mesh import Mesh
from fxpipe.planner.links import Links
from fxpipe.policy.recipe import choose
from fxpipe.runtime.wires.addresses import Addresses, ProcessLine
from fxpipe.runtime.wires.one_process import Loopback
from fxpipe.runtime.wires.throttled import ThrottledWires
from fxpipe.runtime.wires.wired import WiredTransport

PLACEMENT = (0, 1, 0)


def test_a_receive_may_come_before_its_send_and_be_waited_for_last() -> None:
    loopback = Loopback()
    first, second, other = loopback.expect(7), loopback.expect(7), loopback.expect(8)
    sent = [torch.tensor([number]) for number in range(3)]
    assert not first.here
    loopback.send(7, sent[0])
    loopback.send(8, sent[2])
    loopback.send(7, sent[1])
    assert second.take() is sent[1]
    assert other.take() is sent[2]
    assert loopback.left
    assert first.here
    assert first.take() is sent[0]
    assert not loopback.left


def transports(folder: Path) -> dict[int, WiredTransport]:
    """Those of the workers of rank 0, whose links are so slow that a message would take hours."""
    plan = read_plan(folder)
    recipe = choose(plan)
    addresses = Addresses(plan, recipe.demand)
    wires = ThrottledWires(Links(1e-3), 0.0, 0, "gloo", addresses.channels, torch.device("cpu"), Mesh(PLACEMENT))
    found = {w: WiredTransport.of_training(plan, w, wires, addresses, recipe.schedule) for w in plan.hosted(0)}
    for transport in found.values():
        transport.watch = Watch()
    return found


def test_it_takes_no_time_and_no_copy(toy: Any, tmp_path: Path) -> None:
    """Over any links: values and notes."""
    folder = toy(forward=(0, 1, 2), backward=(0, 1, 2), schedule="1f1b", placement=PLACEMENT).save(tmp_path / "build")
    zero, two = (of_worker := transports(folder))[0], of_worker[2]
    edge = next(e for e in read_plan(folder).edges if (e.src, e.dst) == (0, 2))
    value = torch.randn(edge.tensor.shape, dtype=torch.float64)
    two.expect(edge, 0, 0)
    zero.send(edge, 0, 0, value)
    found = two.recv(edge, 0, 0)
    assert (found.data_ptr(), found.shape, found.stride()) == (value.data_ptr(), value.shape, value.stride())
    zero.send(edge, 0, 1, value.t().contiguous().t())
    two.expect(edge, 0, 1)
    assert two.recv(edge, 0, 1).stride() == edge.tensor.stride, "a value comes in the form of the plan"
    two.expect_note(0, ("down", 3), 1)
    zero.expect_note(2, ("down", 3), 1)
    zero.send_note(2, ("down", 3), torch.tensor([1.0]))
    two.send_note(0, ("down", 3), torch.tensor([2.0]))
    assert [two.recv_note(0, ("down", 3)).item(), zero.recv_note(2, ("down", 3)).item()] == [1.0, 2.0]
    for transport in (zero, two):
        transport.finish()
        assert transport.watch.waits == []


def test_what_was_not_sent_is_an_error(toy: Any, tmp_path: Path) -> None:
    """No other process could send it meanwhile."""
    folder = toy(forward=(0, 1, 2), backward=(0, 1, 2), schedule="1f1b", placement=PLACEMENT).save(tmp_path / "build")
    two = transports(folder)[2]
    edge = next(e for e in read_plan(folder).edges if (e.src, e.dst) == (0, 2))
    two.expect(edge, 0, 0)
    with pytest.raises(RunError, match=f"stuck: worker 2 waits for {edge.name} of worker 0"):
        two.recv(edge, 0, 0)


def test_the_first_worker_of_a_rank_speaks_for_it(toy: Any, tmp_path: Path) -> None:
    folder = toy(forward=range(5), backward=range(5), schedule="1f1b", placement=(0, 2, 1, 2, 0)).save(tmp_path / "b")
    lines = [ProcessLine.of(read_plan(folder), rank) for rank in range(3)]
    assert [line.own for line in lines] == [0, 2, 1]
    assert [(line.before, line.after) for line in lines] == [(None, 1), (1, None), (0, 2)]
    assert lines[1].others == (0, 1)

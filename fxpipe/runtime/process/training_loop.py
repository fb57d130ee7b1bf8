"""Runs one process's actions one after the other, with receives posted ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from fxpipe.observe.record import OnStep
from fxpipe.plan.spec import Plan
from fxpipe.runtime.wires.distributed import DistTransport
from fxpipe.runtime.worker.executor import Executor
from fxpipe.schedule.action import LOOKAHEAD, Action
from fxpipe.task.metrics import named_numbers


def train(
    plan: Plan,
    executor: Executor,
    transport: DistTransport,
    actions: Iterator[Action],
    feed: Callable[[int], list[tuple[Any, ...]]] | None = None,
    report: OnStep | None = None,
    between: Callable[[int], None] | None = None,
    reach: Callable[[int, int], None] | None = None,
    tell: Callable[[int, Tensor], None] | None = None,
) -> None:
    """Run all actions of one worker.

    Args:
        feed: on worker 0, the microbatches of a minibatch.
        report: on worker 0, called when it ends a minibatch (see `OnStep`).
        reach: called before the first forward of each minibatch, with the number of updates made so far.
        tell: on the loss worker, called with each minibatch and its loss, with its metrics after it.
        between: called between actions, after any update that waited, with the number of updates made so far.
    """
    window: deque[Action] = deque()
    leaves: list[tuple[Any, ...]] = []
    losses: dict[int, Tensor] = {}
    first, remote_loss = executor.worker == 0, plan.loss_worker != 0
    while True:
        while len(window) <= LOOKAHEAD and (action := next(actions, None)) is not None:
            executor.expect(action)
            if first and remote_loss and executor.schedule.updates(action):
                transport.expect_loss(action.minibatch)
            window.append(action)
        executor.settle()
        if between is not None:
            between(executor.store.version)
        if not window:
            return
        action = window.popleft()
        mine = None
        if reach is not None and action.phase == "F" and action.microbatch == 0:
            executor.watch.at(action)
            reach(action.minibatch, executor.store.version)
        if feed is not None and action.phase == "F":
            if action.microbatch == 0:
                executor.watch.at(action)
                executor.watch.open("data")
                leaves = feed(action.minibatch)[::-1]
                executor.watch.close()
            mine = leaves.pop()
        updater = executor.store.updater
        loss = executor.execute(action, mine)
        if loss is not None and tell is not None:
            tell(action.minibatch, loss)
        if loss is not None and not first:
            transport.send_loss(loss)
        elif loss is not None:
            losses[action.minibatch] = loss
        if first and executor.schedule.updates(action):
            found = transport.recv_loss(action.minibatch) if remote_loss else losses.pop(action.minibatch)
            if report is not None:
                value, metrics = named_numbers(found, plan.metrics)
                report(action.minibatch, value, updater.lr, updater.norm, metrics)

"""Batches come in the same order whatever the pipeline does in between, epoch after epoch."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from fxpipe.errors import TaskError
from fxpipe.runtime.worker import feed as feeding
from fxpipe.runtime.worker.feed import Feed


@dataclass
class Task:
    data: Callable[[], Iterable[Any]]

    def train_data(self) -> Iterable[Any]:
        return self.data()

    def optimizer(self, named_parameters: Any) -> torch.optim.Optimizer:
        raise NotImplementedError

    def lr_scheduler(self, optimizer: torch.optim.Optimizer) -> None:
        raise NotImplementedError


def noise() -> Iterable[float]:
    for _ in range(3):
        yield float(torch.rand(())) + random.random()


def test_epochs_and_isolation() -> None:
    first, second = Feed(Task(noise), 5), None
    a = [first.next_batch() for _ in range(6)]
    second = Feed(Task(noise), 5)
    assert second.total(None, 2) == 6
    b = []
    for _ in range(6):
        b.append(second.next_batch())
        torch.manual_seed(0)  # a stage
    assert a == b
    assert len(set(a)) == 6
    outside = torch.get_rng_state()
    second.next_batch()
    assert torch.equal(torch.get_rng_state(), outside)


@pytest.mark.parametrize(("steps", "epochs", "total"), [(7, None, 7), (None, None, 3), (None, 4, 12)])
@pytest.mark.parametrize("data", [noise, lambda: [1, 2, 3]])
def test_total(data: Callable[[], Any], steps: int | None, epochs: int | None, total: int) -> None:
    assert Feed(Task(data), 0).total(steps, epochs) == total


def test_endless_data_need_a_number_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeding, "COUNTING_SECONDS", 0.05)
    feed = Feed(Task(itertools.count), 0)
    assert feed.total(9, None) == 9
    with pytest.raises(TaskError, match=r"--steps"):
        feed.total(None, None)


@pytest.mark.parametrize("ask", [lambda f: f.next_batch(), lambda f: f.total(None, None)])
def test_empty_data(ask: Callable[[Feed], Any]) -> None:
    with pytest.raises(TaskError, match="gave no batch"):
        ask(Feed(Task(list), 0))


def test_data_that_can_be_iterated_once() -> None:
    data = iter([1, 2])
    feed = Feed(Task(lambda: data), 0)
    assert [feed.next_batch(), feed.next_batch()] == [1, 2]
    with pytest.raises(TaskError, match="new iterable at every call"):
        feed.next_batch()


def test_an_error_in_the_data() -> None:
    def broken() -> Iterable[int]:
        yield 1
        raise KeyError("image")

    feed = Feed(Task(broken), 0)
    feed.next_batch()
    with pytest.raises(TaskError, match=r"train_data\(\) raised KeyError: 'image'"):
        feed.next_batch()

"""Batches come in the same order whatever the pipeline does in between, epoch after epoch."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from fxpipe.errors import FxpipeError, TaskError
from fxpipe.runtime.options import RunOptions
from fxpipe.runtime.worker import feed as feeding
from fxpipe.runtime.worker.feed import Feed, counted, in_steps


@dataclass
class Task:
    path = None
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
    assert second.epoch() == 3
    b = []
    for _ in range(6):
        b.append(second.next_batch())
        torch.manual_seed(0)  # a stage
    assert a == b
    assert len(set(a)) == 6
    outside = torch.get_rng_state()
    second.next_batch()
    assert torch.equal(torch.get_rng_state(), outside)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> torch.Generator:
    """What draws on a CUDA device, as far as the feed looks at it."""
    generator = torch.Generator()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", generator.get_state)
    monkeypatch.setattr(torch.cuda, "set_rng_state", generator.set_state)
    monkeypatch.setattr(torch.cuda, "manual_seed", generator.manual_seed)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", generator.manual_seed)
    return generator


@pytest.mark.parametrize("stateful", [False, True])
def test_batches_that_are_drawn_on_a_device(device: torch.Generator, stateful: bool) -> None:
    """Stages reseed its generator; batches came from theirs."""

    class OnDevice(Counted):
        def __iter__(self) -> Iterable[float]:
            while self.at < 4:
                self.at += 1
                yield float(torch.rand((), generator=device))
            self.at = 0

    def drawn() -> Iterable[float]:
        for _ in range(4):
            yield float(torch.rand((), generator=device))

    data = OnDevice if stateful else drawn
    whole = Feed(Task(data), 5)
    batches = [whole.next_batch(number == 2) for number in range(6)]
    assert len(set(batches)) == 6
    mark = whole.mark(2)
    apart = Feed(Task(data), 5)
    for batch in batches:
        device.manual_seed(0)  # a stage
        outside = device.get_state()
        assert apart.next_batch() == batch
        assert torch.equal(device.get_state(), outside)
    again = Feed(Task(data), 5)
    again.go_on(2, mark)
    device.manual_seed(1)
    assert [again.next_batch() for _ in range(4)] == batches[2:]


def test_a_device_that_is_used_only_later(device: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = Feed(Task(lambda: iter([float(torch.rand((), generator=device))])), 5).next_batch()
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: False)
        feed = Feed(Task(lambda: iter([float(torch.rand((), generator=device))])), 5)
    device.manual_seed(1)
    assert feed.next_batch() == expected


@pytest.mark.parametrize(("steps", "epochs", "total"), [(7, None, 7), (None, None, 3), (None, 4, 12)])
@pytest.mark.parametrize("data", [noise, lambda: [1, 2, 3]])
def test_total(data: Callable[[], Any], steps: int | None, epochs: int | None, total: int) -> None:
    options = RunOptions(build="build", steps=steps, epochs=epochs)
    assert counted(options, Feed(Task(data), 0), epochs=False) == (total, None)


@pytest.mark.parametrize("every", [2, "2"])
def test_steps_are_a_number_or_its_text(every: int | str) -> None:
    assert in_steps(RunOptions(build="build", eval_every=every, checkpoint_every=every)).eval_every == 2
    epoch = in_steps(RunOptions(build="build", eval_every="epoch", checkpoint_every="epoch", steps_per_epoch=3))
    assert (epoch.eval_every, epoch.checkpoint_every) == (3, 3)
    for wrong in (0, -1, "0", "often", True):
        with pytest.raises(FxpipeError, match=r"is not a (whole )?number"):
            in_steps(RunOptions(build="build", eval_every=wrong))


def test_endless_data_need_a_number_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeding, "COUNTING_SECONDS", 0.05)
    feed = Feed(Task(itertools.count), 0)
    assert counted(RunOptions(build="build", steps=9), feed, epochs=False) == (9, None)
    with pytest.raises(TaskError, match=r"--steps"):
        feed.epoch()


@pytest.mark.parametrize("ask", [lambda f: f.next_batch(), lambda f: f.epoch()])
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


class Counted:
    """An iterable that says where it stands, as torchdata's StatefulDataLoader."""

    made = 0

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterable[float]:
        while self.at < 4:
            self.at += 1
            Counted.made += 1
            yield self.at + float(torch.rand(())) + random.random()
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@pytest.mark.parametrize("data", [noise, Counted])
@pytest.mark.parametrize("step", [1, 3, 4, 6])
def test_goes_on_where_it_stood(data: Callable[[], Any], step: int) -> None:
    whole = Feed(Task(data), 5)
    batches = [whole.next_batch(number == step) for number in range(10)]
    mark = whole.mark(step)
    assert (mark is None) == (data is noise)
    torch.manual_seed(9)
    random.seed(9)
    again = Feed(Task(data), 5)
    Counted.made = 0
    again.go_on(step, mark)
    assert Counted.made == 0, "data that say where they stand are not made again"
    assert [again.next_batch() for _ in range(10 - step)] == batches[step:]


@pytest.mark.parametrize("step", [3, 4, 6])
def test_the_end_of_a_run_is_marked_too(step: int) -> None:
    """A longer run that went on from there skipped all its data."""
    whole = Feed(Task(Counted), 5)
    batches = [whole.next_batch() for _ in range(10)]
    ended = Feed(Task(Counted), 5)
    assert [ended.next_batch() for _ in range(step)] == batches[:step]
    mark = ended.mark(step)
    again = Feed(Task(Counted), 5)
    Counted.made = 0
    again.go_on(step, mark)
    assert Counted.made == 0
    assert [again.next_batch() for _ in range(10 - step)] == batches[step:]


def test_no_mark_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a flush a checkpoint is taken before the next batch is read, else after."""
    feed = Feed(Task(Counted), 5)
    for number in range(1, 9):
        feed.next_batch(number % 2 == 1)
        if number % 2 == 0:
            assert feed.mark(number) is not None
    for number in range(9, 13):
        feed.next_batch(number % 2 == 1)
        if number % 2:
            assert (feed.mark(number - 1) is None) == (number == 9)
    assert not feed._marks


def test_nothing_is_marked_of_what_is_skipped() -> None:
    feed = Feed(Task(Counted), 5)
    feed.go_on(3, None)
    assert [feed.mark(batches) for batches in (1, 2)] == [None] * 2
    feed.next_batch(True)
    assert feed.mark(3) is not None


def test_says_when_skipping_takes_long(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(feeding, "SAY_SECONDS", -1.0)
    Feed(Task(noise), 0).go_on(2, None)
    assert "skipping the data of the first 2 steps: 1 so far" in capsys.readouterr().err


@pytest.mark.parametrize(("shuffle", "anew", "warned"), [(True, True, 1), (True, False, 0), (False, True, 0)])
def test_a_generator_that_is_made_anew_for_every_epoch_is_told(
    shuffle: bool, anew: bool, warned: int, capsys: pytest.CaptureFixture[str]
) -> None:
    once = torch.Generator().manual_seed(7)

    def data() -> Any:
        generator = torch.Generator().manual_seed(7) if anew else once
        return torch.utils.data.DataLoader(range(8), 2, shuffle=shuffle, generator=generator)  # type: ignore[arg-type]

    feed = Feed(Task(data), 0)
    epochs = [[feed.next_batch().tolist() for _ in range(4)] for _ in range(3)]
    assert (epochs[0] == epochs[1] == epochs[2]) == anew or not shuffle
    assert capsys.readouterr().err.count("every epoch has the same order") == warned

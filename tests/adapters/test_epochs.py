"""`fxpipe.adapters.epochs`: epochs count where they are iterated, and where a checkpoint goes on."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Sampler

from fxpipe.adapters.epochs import Epochs, StatefulEpochs, epochs
from fxpipe.adapters.trainer import Updates
from fxpipe.task.first_batches import batch_sizes


class Counted(Sampler[int]):
    epoch = 0

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Any:
        return iter(range(10 * self.epoch, 10 * self.epoch + 6))


class Same(torch.utils.data.Dataset[int]):
    def __getitem__(self, number: int) -> int:
        return number


def counting(kind: type, exhausts: bool = True) -> Epochs:
    loader = kind(Same(), 2, sampler=Counted())

    def ask(epoch: int) -> Any:
        loader.sampler.epoch = epoch
        return loader

    return epochs(ask, exhausts)


def read(data: Any) -> list[list[int]]:
    return [batch.tolist() for batch in data]


def test_each_iteration_is_the_next_epoch() -> None:
    data = counting(DataLoader)
    assert (len(data), read(data)[0], len(data), read(data)[0]) == (3, [0, 1], 3, [10, 11])
    assert data.sampler.epoch == 1
    assert not hasattr(data, "state_dict")
    assert not hasattr(data, "_absent")


@pytest.mark.parametrize("exhausts", [True, False])
def test_a_loader_is_asked_after_its_last_batch_or_not(exhausts: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    loader = DataLoader(Same(), 2, sampler=torch.utils.data.RandomSampler(range(6), generator=generator))
    data = epochs(lambda epoch: loader, exhausts)
    assert len(read(data)) == 3
    state = generator.get_state()
    generator.manual_seed(0)
    for _ in range(1 + exhausts):
        torch.randperm(6, generator=generator)
    assert torch.equal(generator.get_state(), state)


@pytest.mark.parametrize("exhausts", [True, False])
def test_a_state_has_the_epoch(exhausts: bool) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")
    data = counting(stateful.StatefulDataLoader, exhausts)
    assert isinstance(data, StatefulEpochs)
    read(data)
    present = iter(data)
    assert [batch.tolist() for batch in islice(present, 2)] == [[10, 11], [12, 13]]
    again = counting(stateful.StatefulDataLoader, exhausts)
    again.load_state_dict(data.state_dict())  # type: ignore[attr-defined]
    assert read(again) == [[14, 15]]
    assert read(again) == [[20, 21], [22, 23], [24, 25]]


@pytest.mark.parametrize("count", [1, 5, 16, 24, 29, 32])
@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("joined", [1, 2, 3])
def test_the_sizes_of_batches_are_those_that_come(count: int, drops: bool, joined: int) -> None:
    loader = DataLoader(range(count), batch_sampler=Updates(BatchSampler(range(count), 8, drops), joined))
    came = [len(batch) for batch in loader]
    found = epochs(lambda epoch: loader).batch_sizes()
    assert found == (8 * joined, came[-1] if len(came) > 1 and came[-1] < 8 * joined else None)
    if joined == 1:
        assert batch_sizes(DataLoader(range(count), 8, drop_last=drops)) == found

"""Data of torchdata's StatefulDataLoader go on where they stood: the same batches, and none is made again."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from fxpipe.checkpoint.tree import Decoder, Encoder
from fxpipe.runtime.worker.feed import Feed

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 calls it

BATCHES = 5
"""An epoch."""


class Numbers(Dataset[float]):
    """Counts, over all processes, how often it was asked."""

    def __init__(self) -> None:
        self.asked = multiprocessing.Value("i", 0)

    def __len__(self) -> int:
        return 4 * BATCHES

    def __getitem__(self, number: int) -> float:
        with self.asked.get_lock():
            self.asked.value += 1
        return float(number)


class Task:
    """`train_data()` gives a loader, a new one for each epoch or always the same."""

    def __init__(self, workers: int, shuffle: bool, generator: bool, always_one: bool) -> None:
        self.numbers = Numbers()
        self._make: Callable[[], Any] = lambda: StatefulDataLoader(
            self.numbers,
            batch_size=4,
            shuffle=shuffle,
            num_workers=workers,
            generator=torch.Generator().manual_seed(3) if generator else None,
        )
        self._one = self._make() if always_one and generator else None

    def train_data(self) -> Any:
        return self._make() if self._one is None else self._one


def read_back(mark: Any) -> Any:
    """As a checkpoint has it."""
    encoder = Encoder()
    text = json.dumps(encoder(mark, "data"))
    return Decoder(lambda key: encoder.tensors[key].clone())(json.loads(text))


WAYS = [  # shuffle, generator, always one loader
    (False, False, False),
    (True, False, False),
    (True, True, False),
    (True, True, True),
]


@pytest.mark.parametrize("way", WAYS, ids=["in order", "shuffled", "own generator", "one loader"])
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=[pytest.mark.slow, pytest.mark.multiproc])])
def test_goes_on_where_it_stood(workers: int, way: tuple[bool, bool, bool]) -> None:
    """In the first epoch, at its end, and in later ones."""
    for step in (1, 3, BATCHES, BATCHES + 2, 2 * BATCHES, 2 * BATCHES + 3):
        whole: Any = Feed(Task(workers, *way), 5)  # type: ignore[arg-type]
        batches = [whole.next_batch(number == step).tolist() for number in range(4 * BATCHES)]
        differ = way in (WAYS[1], WAYS[3])
        assert (batches[:BATCHES] != batches[BATCHES : 2 * BATCHES]) == differ, "the epochs' orders"
        task = Task(workers, *way)
        again = Feed(task, 5)  # type: ignore[arg-type]
        torch.manual_seed(9)
        again.go_on(step, read_back(whole.mark(step)))
        assert [again.next_batch().tolist() for _ in range(4 * BATCHES - step)] == batches[step:], step
        assert task.numbers.asked.value <= 4 * (4 * BATCHES - step) + 4 * 2 * workers, "data are made again"

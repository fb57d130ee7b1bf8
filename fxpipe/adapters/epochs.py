"""The loader that a training library keeps through all epochs, as what `train_data()` gives for each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxpipe.errors import TaskError
from fxpipe.task.batch import Batch
from fxpipe.task.first_batches import at_most, batch_sizes, joined_sizes, plain_sampler


class JoinedBatches(NamedTuple):
    """The joined batches of an update, and which share they are of as many as the others have."""

    batch: Any
    share: float


class Epochs:
    """The batches of epoch 0 where it is iterated first, of epoch 1 where it is iterated next, and so on.

    All else, such as `generator` or `sampler`, is asked of the present epoch's loader, which `ask` gives, ready to be
    iterated; often it is the same for all. If it `exhausts` a loader, that is asked for a batch after its last one:
    torch's RandomSampler then draws once more from its generator, and the next epoch has another order. An epoch has at
    most so many of a loader's batches, or such a share of them. So many of these are `joined` to one, along the first
    dimension, the last of an epoch perhaps of fewer; if it `shares`, it gives each as a `JoinedBatches`, unless all are
    of as many.
    """

    def __init__(
        self,
        ask: Callable[[int], Any],
        exhausts: bool = True,
        most: int | float | None = None,
        joined: int = 1,
        shares: bool = False,
    ) -> None:
        self._ask, self._exhausts, self._most, self._size, self._shares = ask, exhausts, most, joined, shares
        self._loader = ask(0)
        self._next = 0
        self._given = 0  # batches of the present epoch
        self._behind = 0  # those of the next one that a checkpoint has given already

    def __len__(self) -> int:
        return -(-self.batches // self._size)

    @property
    def batches(self) -> int:
        """How many batches an epoch takes from its loader.

        Raises:
            TypeError: the loader does not say how many it has.
        """
        return at_most(len(self._loader), self._most)

    def __iter__(self) -> Iterator[Any]:
        self._loader = self._ask(self._next)
        self._next += 1
        self._given, self._behind = self._behind, 0
        batches = self._counted(iter(self._loader))
        return batches if self._size == 1 else self._joined(batches)

    def _joined(self, batches: Iterator[Any]) -> Iterator[Any]:
        while several := list(islice(batches, self._size)):
            one = joined(several)
            yield JoinedBatches(one, len(several) / self._size) if self._ragged() else one

    def _ragged(self) -> bool:
        try:
            return self._shares and self.batches % self._size != 0
        except TypeError:
            return True

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches if (left := self._left()) is None else islice(batches, left):
            self._given += 1
            yield batch

    def _left(self) -> int | None:
        if self._exhausts:
            return None
        try:
            return self.batches - self._given
        except TypeError:
            return self._most - self._given if isinstance(self._most, int) else None

    def batch_sizes(self) -> tuple[int | None, int | None]:
        """See `fxpipe.task.first_batches.batch_sizes`."""
        if self._size == 1 and self._most is None:
            return batch_sizes(self._loader)
        sampler = plain_sampler(self._loader)
        return (None, None) if sampler is None else joined_sizes(sampler, self._size, self._most)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)


def joined(batches: Sequence[Any]) -> Any:
    """One batch of several, along the first dimension."""
    first, *others = [Batch.of(batch) for batch in batches]
    rows = list(zip(first.values, *(batch.values for batch in others), strict=False))
    try:
        if any(batch.tree != first.tree for batch in others):
            raise ValueError("they are built differently")
        values = [torch.cat(row) if isinstance(row[0], Tensor) and row[0].dim() else _alike(row) for row in rows]
    except (RuntimeError, ValueError) as error:
        raise TaskError(
            f"the batches of an update cannot be joined: {error}",
            hint="let the loader give larger batches, and compile with --microbatches",
        ) from error
    return first.of_values(values).given


def _alike(row: Sequence[Any]) -> Any:
    if any(not torch.equal(item, row[0]) if isinstance(item, Tensor) else item != row[0] for item in row[1:]):
        raise ValueError(f"{row[0]!r} is another one in each")
    return row[0]


class StatefulEpochs(Epochs):
    """The same, of loaders that know where they are, as torchdata's: the state says in which epoch, too."""

    def state_dict(self) -> dict[str, Any]:
        """Where the present epoch's loader is, and which epoch that is."""
        return {"epoch": max(self._next - 1, 0), "given": self._given, "loader": self._loader.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there, where it is iterated next."""
        self._next, self._behind = state["epoch"], state["given"]
        self._loader = self._ask(self._next)
        self._loader.load_state_dict(state["loader"])


def epochs(ask: Callable[[int], Any], exhausts: bool = True, **more: Any) -> Epochs:
    """An `Epochs` with the state that its loaders have, or none: those that have none are read again from the start."""
    kind = StatefulEpochs if hasattr(ask(0), "load_state_dict") else Epochs
    return kind(ask, exhausts, **more)

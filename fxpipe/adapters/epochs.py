"""The loader that a training library keeps through all epochs, as what `train_data()` gives for each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

from fxpipe.task.first_batches import batch_sizes


class Epochs:
    """The batches of epoch 0 where it is iterated first, of epoch 1 where it is iterated next, and so on.

    All else, such as `generator` or `sampler`, is asked of the present epoch's loader.

    Args:
        ask: gives the loader of an epoch, counted from 0, ready to be iterated; often the same for all.
        exhausts: whether a loader is asked for a batch after its last one. It makes a difference: torch's RandomSampler
            then draws once more from its generator, and the next epoch has another order.
    """

    def __init__(self, ask: Callable[[int], Any], exhausts: bool = True) -> None:
        self._ask, self._exhausts = ask, exhausts
        self._loader = ask(0)
        self._next = 0
        self._given = 0  # batches of the present epoch
        self._behind = 0  # those of the next one that a checkpoint has given already

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        self._loader = self._ask(self._next)
        self._next += 1
        self._given, self._behind = self._behind, 0
        return self._counted(iter(self._loader))

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches if (left := self._left()) is None else islice(batches, left):
            self._given += 1
            yield batch

    def _left(self) -> int | None:
        try:
            return None if self._exhausts else len(self._loader) - self._given
        except TypeError:
            return None

    def batch_sizes(self) -> tuple[int | None, int | None]:
        """See `fxpipe.task.first_batches.batch_sizes`."""
        return batch_sizes(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)


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


def epochs(ask: Callable[[int], Any], exhausts: bool = True) -> Epochs:
    """An `Epochs` with the state that its loaders have, or none: those that have none are read again from the start."""
    kind = StatefulEpochs if hasattr(ask(0), "load_state_dict") else Epochs
    return kind(ask, exhausts)

"""The loader that a training library keeps through all epochs, as what `train_data()` gives for each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any


class Epochs:
    """The batches of epoch 0 where it is iterated first, of epoch 1 where it is iterated next, and so on.

    All else, such as `generator` or `sampler`, is asked of the present epoch's loader. What begins it again from the
    first epoch, as a run that goes on from a checkpoint, makes another one.

    Args:
        ask: gives the loader of an epoch, counted from 0, ready to be iterated; often the same for all.
    """

    def __init__(self, ask: Callable[[int], Any]) -> None:
        self._ask, self._next, self._loader = ask, 0, ask(0)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        self._loader = self._ask(self._next)
        self._next += 1
        return iter(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)


class StatefulEpochs(Epochs):
    """The same, of loaders that know where they are, as torchdata's: the state says in which epoch, too."""

    def state_dict(self) -> dict[str, Any]:
        """Where the present epoch's loader is, and which epoch that is."""
        return {"epoch": max(self._next - 1, 0), "loader": self._loader.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there, where it is iterated next."""
        self._next = state["epoch"]
        self._loader = self._ask(self._next)
        self._loader.load_state_dict(state["loader"])


def epochs(ask: Callable[[int], Any]) -> Epochs:
    """An `Epochs` with the state that its loaders have, or none: those that have none are read again from the start."""
    made = Epochs(ask)
    return StatefulEpochs(ask) if hasattr(made, "load_state_dict") else made

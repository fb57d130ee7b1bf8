"""Several optimizers, each over its own parameters, in the form of a single one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fxpipe.torch_private import step_hooks


class SeveralOptimizers(torch.optim.Optimizer):
    """Steps its optimizers, of disjoint parameters, one after the other; its groups are their dictionaries, in that
    order.

    So a scheduler changes the rates of all of them. Its state is theirs as well, and loading a state loads theirs.

    Raises:
        ValueError: they have no parameters, or a parameter in common; as from any torch.optim.Optimizer.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = tuple(optimizers)  # as given
        first, *others = [optimizer.defaults for optimizer in self.optimizers] or [{}]
        common = {name: value for name, value in first.items() if all(name in other for other in others)}
        # torch checks for repeated parameters there; the groups themselves must not be touched.
        super().__init__([{"params": list(group["params"])} for group in self._groups()], {})
        self.defaults = common  # schedulers read them, such as momentum, which they may change in every group
        self.param_groups = self._groups()
        self.state = _StateOfAll(self.optimizers)  # type: ignore[assignment]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step of each. None would call a closure: a pipeline has made the gradients."""
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def load_state_dict(self, state_dict: Any) -> None:
        """Gives each optimizer its part of a state from `state_dict`."""
        super().load_state_dict(state_dict)
        groups, state = iter(self.param_groups), self.state
        for optimizer in self.optimizers:
            its_groups = [next(groups) for _ in optimizer.param_groups]
            held = {p: state[p] for group in its_groups for p in group["params"] if p in state}
            optimizer.__setstate__({"state": type(optimizer.state)(dict, held), "param_groups": its_groups})
        self.param_groups = self._groups()
        self.state = _StateOfAll(self.optimizers)  # type: ignore[assignment]

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "optimizers": self.optimizers}

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]


class _StateOfAll(Mapping[Tensor, Any]):
    """The optimizers' states in one, as they are now."""

    def __init__(self, optimizers: tuple[torch.optim.Optimizer, ...]) -> None:
        self._optimizers = optimizers

    def __getitem__(self, parameter: Tensor) -> Any:
        for optimizer in self._optimizers:
            if parameter in optimizer.state:  # checked first: reading a missing entry would make it
                return optimizer.state[parameter]
        raise KeyError(parameter)

    def __iter__(self) -> Iterator[Tensor]:
        for optimizer in self._optimizers:
            yield from optimizer.state

    def __len__(self) -> int:
        return sum(len(optimizer.state) for optimizer in self._optimizers)


def parts_of(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, ...]:
    """The optimizers that make its step: itself, or the several that it is made of."""
    return optimizer.optimizers if isinstance(optimizer, SeveralOptimizers) else (optimizer,)


def stepped_by(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> type[torch.optim.Optimizer]:
    """The type that makes the step of one of its groups."""
    return next(type(part) for part in parts_of(optimizer) if any(member is group for member in part.param_groups))


def name_of(optimizer: torch.optim.Optimizer) -> str:
    """What a message calls it: `AdamW`, `Muon and AdamW`."""
    return " and ".join(dict.fromkeys(type(part).__name__ for part in parts_of(optimizer)))


def may_draw(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step may use random numbers: it does more than those of torch's own optimizers."""
    return any(map(changes_torchs, parts_of(optimizer)))


def changes_torchs(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step differs from the step of torch's own optimizers."""
    of_torch = f"{type(optimizer).__module__}.".startswith("torch.optim.") and "step" not in vars(optimizer)
    return any(step_hooks(optimizer)) or not of_torch

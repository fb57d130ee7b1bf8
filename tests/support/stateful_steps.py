"""Steps that change Python state, each in a place of its own, and later compute something else for it."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import features
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH = 8


@dataclasses.dataclass
class Doubled:
    """Callable, as the clocks are that capture looks for among a module's names, but no key of a dictionary."""

    by: float = 2.0

    def __call__(self, x: Tensor) -> Tensor:
        return self.by * x


DOUBLED = Doubled()


class Net(nn.Module):
    def __init__(self, change: Callable[[Any, Tensor], Tensor], bank: list[Tensor] | None = None) -> None:
        super().__init__()
        self.first, self.change, self.last = nn.Linear(WIDTH, WIDTH), change, nn.Linear(WIDTH, WIDTH)
        self.hidden: Tensor | None = None
        self.calls = 0
        if bank is not None:
            self.bank = bank

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.change(self, torch.tanh(self.first(x))))


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(4, WIDTH), torch.randn(4, WIDTH)


@dataclasses.dataclass
class Fields:
    steps: int = 0


@dataclasses.dataclass(frozen=True)
class Frozen:
    steps: int = 0


class Derived(dict[str, int]):
    """A dictionary of the user's own class."""


class Slotted:
    __slots__ = ("steps",)

    def __init__(self) -> None:
        self.steps = 0


class Log:
    steps = 0  # of the class

    def __init__(self) -> None:
        self.own = 0
        self.losses: list[Any] = []
        self.state: Any = None

    def note(self, x: Tensor) -> None:
        self.own += 1
        self.losses.append(x.detach())


STEPS = 0
TABLE: dict[Any, Any] = {"steps": 0, "frozen": Frozen()}
DERIVED = Derived(steps=0)
BANK: list[Tensor] = []
QUEUE: collections.deque[Tensor] = collections.deque(maxlen=4)
FIELDS, SLOTTED, LOG, ARRAY = Fields(), Slotted(), Log(), np.zeros(3)
COUNTER: collections.Counter[str] = collections.Counter()


def state() -> Any:
    """All of the above, for a comparison."""
    plain = (STEPS, dict(TABLE), list(BANK), list(QUEUE), FIELDS.steps, SLOTTED.steps, Log.steps, ARRAY.tolist())
    return (*plain, dict(DERIVED), features.STEPS, dict(COUNTER), dict(vars(LOG)), list(LOG.losses))


def late_global(net: Net, x: Tensor) -> Tensor:
    global STEPS
    STEPS += 1
    return x * 2 if STEPS > 500 else x


def soon_global(net: Net, x: Tensor) -> Tensor:
    global STEPS
    STEPS += 1
    return x * 2 if STEPS > 2 else x


def in_a_dictionary(net: Net, x: Tensor) -> Tensor:
    TABLE["steps"] += 1
    return x * min(1.0, TABLE["steps"] / 1000)


def attribute(net: Net, x: Tensor) -> Tensor:
    net.calls += 1
    return x * net.calls


def dataclass(net: Net, x: Tensor) -> Tensor:
    FIELDS.steps += 1
    return x / FIELDS.steps


def slots(net: Net, x: Tensor) -> Tensor:
    SLOTTED.steps += 1
    return x * 2 if SLOTTED.steps >= 1000 else x


def class_attribute(net: Net, x: Tensor) -> Tensor:
    Log.steps += 1
    return x * 2 if Log.steps % 1000 == 0 else x


def array(net: Net, x: Tensor) -> Tensor:
    ARRAY[0] += 1
    return x * float(ARRAY[0])


def default(net: Net, x: Tensor, seen: list[int] = [0]) -> Tensor:  # noqa: B006 (it is the case)
    seen[0] += 1
    return x * seen[0]


def enclosed() -> Callable[[Net, Tensor], Tensor]:
    count = 0

    def change(net: Net, x: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return x * count

    return change


def growing(net: Net, x: Tensor) -> Tensor:
    BANK.append(x.detach())
    return x + torch.stack(BANK[-64:]).mean() if len(BANK) >= 64 else x


def queue(net: Net, x: Tensor) -> Tensor:
    x = x + torch.stack(list(QUEUE)).mean(0) if len(QUEUE) == 4 else x
    QUEUE.append(x.detach())
    return x


def recurrent(net: Net, x: Tensor) -> Tensor:
    x = x if net.hidden is None else x + net.hidden
    net.hidden = x.detach()
    return x


def shared_bank(net: Net, x: Tensor) -> Tensor:
    """All of its rows are one tensor at first, so capture cannot tell which of them are replaced."""
    net.bank = [*net.bank[1:], x.detach().mean(0)]
    return x + torch.stack(net.bank).sum(0)


def another_object(net: Net, x: Tensor) -> Tensor:
    old, LOG.state = LOG.state, Log()
    LOG.state.losses.append(x.detach())
    return x if old is None else x + old.losses[0]


def first_call(net: Net, x: Tensor) -> Tensor:
    if "ready" not in TABLE:
        TABLE["ready"] = True
        return x / x.std()
    return x


def one_draw(net: Net, x: Tensor) -> Tensor:
    """Eager draws it once; a graph would draw it in every step."""
    if "noise" not in TABLE:
        TABLE["noise"] = torch.randn(WIDTH)
    return x + TABLE["noise"]


def of_a_derived_dictionary(net: Net, x: Tensor) -> Tensor:
    DERIVED["steps"] += 1
    return x * 2 if DERIVED["steps"] > 300 else x


def of_a_numpy_number(net: Net, x: Tensor) -> Tensor:
    LOG.own = np.int64(LOG.own) + np.int64(1)
    return x * 2 if LOG.own > 300 else x


def of_another_tuple(net: Net, x: Tensor) -> Tensor:
    LOG.state = (*(LOG.state or ()), 1)
    return x * 2 if len(LOG.state) > 2 else x


def of_a_frozen_object(net: Net, x: Tensor) -> Tensor:
    TABLE["frozen"] = dataclasses.replace(TABLE["frozen"], steps=TABLE["frozen"].steps + 1)
    return x * 2 if TABLE["frozen"].steps > 300 else x


def annealed(net: Net, x: Tensor) -> Tensor:
    LOG.own += 0.001
    return F.dropout(x, min(LOG.own, 0.5))


def in_a_ring(net: Net, x: Tensor) -> Tensor:
    net.bank[net.calls % 4] = x.detach().mean(0)
    net.calls += 1
    return x + torch.stack(net.bank).sum(0)


def another_file(net: Net, x: Tensor) -> Tensor:
    features.STEPS += 1
    return x * 2 if features.STEPS > 700 else x


def through_a_view(net: Net, x: Tensor) -> Tensor:
    """Attributes such as x.T are no calls that capture sees."""
    net.calls += 1
    return (x * 2 if net.calls > 2 else x).T.contiguous().T


def in_place(net: Net, x: Tensor) -> Tensor:
    net.calls += 1
    y = x.clone()
    y[:, 0] *= 2 if net.calls > 2 else 1
    return y


REFUSED: dict[str, tuple[Callable[[Net, Tensor], Tensor], str]] = {
    "late_global": (late_global, "STEPS"),
    "soon_global": (soon_global, "STEPS"),
    "in_a_dictionary": (in_a_dictionary, r"TABLE\['steps'\]"),
    "attribute": (attribute, "calls"),
    "dataclass": (dataclass, r"FIELDS\.steps"),
    "slots": (slots, r"SLOTTED\.steps"),
    "class_attribute": (class_attribute, r"Log\.steps"),
    "array": (array, "ARRAY"),
    "default": (default, r"seen\[0\]"),
    "enclosed": (enclosed(), "count"),
    "growing": (growing, "BANK"),
    "queue": (queue, "QUEUE"),
    "recurrent": (recurrent, "hidden"),
    "another_object": (another_object, r"LOG\.state"),
    "first_call": (first_call, "TABLE"),
    "one_draw": (one_draw, "TABLE"),
    "of_a_derived_dictionary": (of_a_derived_dictionary, r"DERIVED\['steps'\]"),
    "of_a_numpy_number": (of_a_numpy_number, r"LOG\.own"),
    "of_another_tuple": (of_another_tuple, r"LOG\.state"),
    "of_a_frozen_object": (of_a_frozen_object, r"TABLE\['frozen'\]\.steps"),
    "annealed": (annealed, r"LOG\.own"),
    "in_a_ring": (in_a_ring, "calls"),
    "another_file": (another_file, r"features\.STEPS"),
    "through_a_view": (through_a_view, "calls"),
    "in_place": (in_place, "calls"),
}

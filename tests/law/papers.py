"""What a case trains where there is no flush: the rules of the papers, computed by hand for a chain of tanh layers.

Nothing of fxpipe is used. Workers take turns in the order of 1F1B without a flush, or of nF1B. Which version of another
worker's weights an action sees follows from what happened before it: every message says how many updates its sender
knows of, and minibatch m never sees more than m of them (docs/concepts/versions.md). A policy says which weights it
takes instead, each from the paper that its docstring in fxpipe/policy names.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

Rate = Callable[[int], float]
"""The learning rate of an update, by its number."""
Part = tuple[int, int]
"""A microbatch: its minibatch, and its number there."""


class Layer(NamedTuple):
    weight: Tensor
    bias: Tensor


# ── Optimizers, for one tensor ──────────────────────────────────────────────────────────────────────────────────────


class Rule(Protocol):
    rate: Rate

    @property
    def velocity(self) -> Tensor | None:
        """The mean of gradients that it moves along; None before the first update, or without momentum."""

    def update(self, w: Tensor, g: Tensor, rate: float) -> Tensor:
        """The weights after an update."""

    def ahead(self, w: Tensor, rate: float, steps: int) -> Tensor:
        """The weights so many updates later, as the optimizer's own direction has them."""


@dataclass
class Momentum:
    """torch.optim.SGD with momentum."""

    rate: Rate
    gamma: float = 0.9
    nesterov: bool = False
    weight_decay: float = 0.0
    buffer: Tensor | None = None

    @property
    def velocity(self) -> Tensor | None:
        return self.buffer

    def update(self, w: Tensor, g: Tensor, rate: float) -> Tensor:
        g = g + self.weight_decay * w
        self.buffer = g.clone() if self.buffer is None else self.gamma * self.buffer + g
        if self.nesterov:
            return w - rate * (g + self.gamma * self.buffer)
        return w - rate * self.buffer

    def ahead(self, w: Tensor, rate: float, steps: int) -> Tensor:
        assert self.buffer is not None
        return w - steps * rate * self.buffer


@dataclass
class Plain:
    """torch.optim.SGD without momentum: it goes on as it last went, at the present rate."""

    rate: Rate
    weight_decay: float = 0.0
    last: float = 0.0
    moved: Tensor | float = 0.0
    velocity: None = None

    def update(self, w: Tensor, g: Tensor, rate: float) -> Tensor:
        self.last, self.moved = rate, -rate * (g + self.weight_decay * w)
        return w + self.moved

    def ahead(self, w: Tensor, rate: float, steps: int) -> Tensor:
        return w + (steps * rate / self.last) * self.moved


@dataclass
class AdamW:
    rate: Rate
    weight_decay: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-3
    updates: int = 0
    m: Tensor | float = 0.0
    v: Tensor | float = 0.0

    @property
    def velocity(self) -> Tensor | None:
        return self.m if isinstance(self.m, Tensor) else None

    def update(self, w: Tensor, g: Tensor, rate: float) -> Tensor:
        w = w - rate * self.weight_decay * w
        self.updates += 1
        self.m = self.betas[0] * self.m + (1 - self.betas[0]) * g
        self.v = self.betas[1] * self.v + (1 - self.betas[1]) * g * g
        return w - rate * self.m / (1 - self.betas[0] ** self.updates) / self.scale()

    def scale(self) -> Tensor:
        return (torch.as_tensor(self.v) / (1 - self.betas[1] ** self.updates)).sqrt() + self.eps

    def ahead(self, w: Tensor, rate: float, steps: int) -> Tensor:
        moment = self.m / (1 - self.betas[0] ** self.updates)
        return w - steps * rate * (self.weight_decay * w + moment / self.scale())


@dataclass
class Softsign:
    """An optimizer that fxpipe does not know: it goes on as it last went, at the present rate."""

    rate: Rate
    last: float = 0.0
    moved: Tensor | float = 0.0
    velocity: None = None

    def update(self, w: Tensor, g: Tensor, rate: float) -> Tensor:
        self.last, self.moved = rate, -rate * g / (0.1 + g.abs())
        return w + self.moved

    def ahead(self, w: Tensor, rate: float, steps: int) -> Tensor:
        return w + (steps * rate / self.last) * self.moved


# ── A layer, and what a policy lets an action read of it ────────────────────────────────────────────────────────────


@dataclass
class Trained:
    """A layer with every version that it had, and the optimizer after each.

    Attributes:
        began: by version, the weights that its update was made from.
        feedback: updates of delay that error feedback makes up for (`latest+ef`); 0 for none.
        brakes: scales gradients by adaptive braking (`latest+brake`).
        plain: by version, the weights with every step of the optimizer once.
    """

    history: list[Layer]
    rules: list[tuple[Rule, Rule]]
    feedback: int = 0
    brakes: bool = False
    began: list[Layer] = field(default_factory=list)
    plain: list[Layer] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.began.append(self.history[0])
        self.plain.append(self.history[0])

    def update(self, gradients: Layer) -> None:
        """With error feedback, the weights are those of all steps, and of the last ones again."""
        number, rules = len(self.history) - 1, copy.deepcopy(self.rules[-1])
        began = self.history[-1]
        if self.brakes:
            gradients = Layer(*(braked(g, rule.velocity) for rule, g in zip(rules, gradients, strict=True)))
        parts = list(zip(rules, began, gradients, strict=True))
        made = Layer(*(rule.update(w, g, rule.rate(number)) for rule, w, g in parts))
        self.rules.append(rules)
        self.began.append(began)
        self.plain.append(Layer(*(p + (after - w) for p, after, w in zip(self.plain[-1], made, began, strict=True))))
        if self.feedback:
            made = self._fed_back()
        self.history.append(made)

    def _fed_back(self) -> Layer:
        before = self.plain[max(0, len(self.plain) - 1 - self.feedback)]
        return Layer(*(now + (now - then) for now, then in zip(self.plain[-1], before, strict=True)))

    def ahead(self, version: int, target: int) -> Layer:
        """Version `target` as the optimizer after `version` has it; there is no direction before the first update."""
        live, rules = self.history[version], self.rules[version]
        if not version or target <= version:
            return live
        return Layer(*(r.ahead(w, r.rate(version), target - version) for r, w in zip(rules, live, strict=True)))

    def line(self, version: int, target: int) -> Layer:
        """The same on the line through the last update."""
        live, steps = self.history[version], target - version
        if not version or steps <= 0:
            return live
        return Layer(*(now + steps * (now - was) for was, now in zip(self.began[version], live, strict=True)))


def braked(g: Tensor, velocity: Tensor | None) -> Tensor:
    """A gradient scaled by 1 minus its cosine with the velocity."""
    if velocity is None:
        return g
    return (1 - (g * velocity).sum() / (g * g).sum().sqrt() / (velocity * velocity).sum().sqrt()) * g


@dataclass(frozen=True)
class Action:
    """What reads weights.

    Attributes:
        version: of the layer that it reads: the newest that it can know of.
        entered: the version that this microbatch's forward on worker 0 found there.
    """

    phase: str
    part: Part
    reader: int
    owner: int
    version: int
    entered: int


class Policy:
    """What each action reads: as the policy of that name says."""

    def __init__(self, text: str, workers: int, microbatches: int, late: int) -> None:
        self.name, *options = text.split("+")
        self.keep, self.predict = "keep" in options, "predict" in options
        self.workers, self.microbatches, self.late = workers, microbatches, late
        self.kept: dict[Any, Layer] = {}

    def read(self, of: Trained, place: int, action: Action) -> Layer:
        """The weights of layer `place` for an action."""
        m, j = action.part
        if self.name == "xpipe" and self.workers > 1:
            key = (action.phase, m, place)
            if j == 0:
                self.kept[key] = of.ahead(action.version, self._xpipe_target(action))
            return self.kept[key]
        if self.name in ("stash", "xgrad") or self.keep:
            if action.phase == "F":
                self.kept[place, m, j] = self._own(of, action)
            return self.kept[place, m, j]
        return self._own(of, action)

    def _own(self, of: Trained, action: Action) -> Layer:
        (m, j), version = action.part, action.version
        if self.name in ("latest", "stash"):
            return of.history[version]
        if self.name == "vertical":
            return of.history[action.entered]
        if self.name == "2bw":
            older = max(0, m - self.late - min(1, self.workers - 1))
            return of.ahead(older, m) if self.predict else of.history[older]
        if self.name == "spectrain":
            return of.ahead(version, m + (j + action.owner // 2) // self.microbatches)
        if self.name == "lwp":
            return of.line(version, m)
        if self.name == "xgrad":
            return of.ahead(version, m + 1)
        assert self.name in ("pipeoptim", "xpipe")
        return of.ahead(version, m)

    def _xpipe_target(self, action: Action) -> int:
        n, t, k = self.workers, self.microbatches, action.owner
        if action.phase == "F":
            return action.part[0] - math.ceil(Fraction(n - 1 - k, t)) + _nearest((n + t - Fraction(k, 2) - 2) / t)
        return action.part[0] + _nearest(Fraction(t + k // 2 - 1, t))


def _nearest(x: Fraction) -> int:
    """The nearest integer, halves down."""
    return math.ceil(x - Fraction(1, 2))


# ── The pipeline ────────────────────────────────────────────────────────────────────────────────────────────────────


def order(schedule: str, k: int, workers: int, microbatches: int, count: int) -> list[tuple[str, int]]:
    """What worker k does with `count` flat microbatches: the order of forwards and backwards.

    - `async`: N−1−k forwards ahead, then one forward, one backward.
    - `nf1b`: M + 2(N−1−k) forwards, then the M backwards of a minibatch and M forwards take turns.
    - `wpipe`: 1F1B within each minibatch, of half as many workers; the first half does it with the forwards of the next
      minibatch and the backwards of this one.
    """
    forwards, backwards = ([(phase, i) for i in range(count)] for phase in "FB")
    turn, ahead, half = 1, workers - 1 - k, workers // 2
    if schedule == "wpipe":
        row: list[tuple[str, int]] = []
        begun, early = 0, microbatches * (k < half)
        for i, backward in enumerate(backwards):
            upto = i - i % microbatches + early + min(microbatches, i % microbatches + half - k % half)
            row += [*forwards[begun:upto], backward]
            begun = upto
        return row
    if schedule == "nf1b":
        turn, ahead = microbatches, min(2, microbatches) * ahead
    row = forwards[:ahead]
    for first in range(0, count, turn):
        row += forwards[first + ahead : first + ahead + turn] + backwards[first : first + turn]
    return row


def missed(schedule: str, k: int, workers: int, microbatches: int) -> int:
    """How many updates of its weights a forward of worker k misses at most, where none is late."""
    done = most = 0
    for phase, i in order(schedule, k, workers, microbatches, 3 * workers * microbatches):
        most = max(most, i // microbatches - done // microbatches) if phase == "F" else most
        done += phase == "B"
    return most


def train(
    policy: Policy,
    layers: Sequence[Trained],
    forward: Sequence[int],
    backward: Sequence[int],
    batches: Sequence[tuple[Tensor, Tensor]],
    schedule: str = "async",
    factors: Sequence[float] = (),
) -> list[float]:
    """Train a chain whose layer l is computed on worker forward[l] and owned, with its backward, by backward[l].

    Args:
        schedule: as `order` knows it.
        factors: on the values of the first layer and on the loss, of each minibatch; 1 if there are none.

    Returns:
        The loss of each minibatch; `layers` have all versions.
    """
    n, count, late = policy.workers, policy.microbatches, policy.late
    parts = {
        (m, j): part
        for m, sides in enumerate(batches)
        for j, part in enumerate(zip(*(side.chunk(count) for side in sides), strict=True))
    }
    keys = list(parts)
    factors = factors or [1.0] * len(batches)
    values: dict[tuple[int, Part], Tensor] = {(-1, key): x for key, (x, _) in parts.items()}
    slopes: dict[tuple[int, Part], Tensor] = {}
    pulls: dict[tuple[int, Part], Tensor] = {}
    entered: dict[Part, int] = {}
    losses: dict[Part, float] = {}
    known = [[0] * n for _ in range(n)]
    sent: dict[tuple[str, int, Part], list[int]] = {}
    waiting: list[list[dict[int, Layer]]] = [[] for _ in range(n)]
    sums: list[dict[int, list[Layer]]] = [{} for _ in range(n)]
    rows = [order(schedule, k, n, count, len(keys)) for k in range(n)]

    def weights(phase: str, key: Part, k: int, place: int) -> Layer:
        owner = backward[place]
        version = min(key[0], known[k][owner])
        return policy.read(layers[place], place, Action(phase, key, k, owner, version, entered[key]))

    def update(k: int) -> None:
        for place, gradients in waiting[k].pop(0).items():
            layers[place].update(gradients)
        known[k][k] += 1

    while any(rows):
        acted = False
        for k, row in enumerate(rows):
            if not row:
                continue
            phase, key = row[0][0], keys[row[0][1]]
            source = ("F", k - 1, key) if phase == "F" else ("B", k + 1, key) if k < n - 1 else ("F", k, key)
            if source[1] >= 0 and source not in sent:
                continue
            row.pop(0)
            acted = True
            if source in sent:
                known[k] = [max(pair) for pair in zip(known[k], sent[source], strict=True)]
            if phase == "F":
                if k == 0:
                    entered[key] = min(key[0], known[0][0])
                for place in (p for p, worker in enumerate(forward) if worker == k):
                    layer = weights("F", key, k, place)
                    y = torch.tanh(values[place - 1, key] @ layer.weight.t() + layer.bias)
                    factor = 1.0 if place else factors[key[0]]
                    values[place, key], slopes[place, key] = factor * y, factor * (1 - y * y)
                if k == n - 1:
                    error = values[len(layers) - 1, key] - parts[key][1]
                    losses[key] = factors[key[0]] * float((error * error).mean())
                    pulls[len(layers), key] = factors[key[0]] * 2 * error / error.numel()
            else:
                for place in reversed([p for p, worker in enumerate(backward) if worker == k]):
                    layer, pull = weights("B", key, k, place), pulls[place + 1, key] * slopes[place, key]
                    pulls[place, key] = pull @ layer.weight
                    sums[k].setdefault(place, []).append(Layer(pull.t() @ values[place - 1, key], pull.sum(0)))
                if key[1] == count - 1:
                    waiting[k].append({p: Layer(*(torch.stack(g).mean(0) for g in zip(*found, strict=True)))
                                       for p, found in sums[k].items()})  # fmt: skip
                    sums[k] = {}
                    if len(waiting[k]) > late:
                        update(k)
            sent[phase, k, key] = list(known[k])
        assert acted, "deadlock"
    for k in range(n):
        while waiting[k]:
            update(k)
    return [sum(losses[m, j] for j in range(count)) / count for m in range(len(batches))]

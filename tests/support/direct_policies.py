"""Training under each weight policy, straight from the papers: one layer a worker, gradients written by hand.

Layer k is y = tanh(x Wᵀ + b) on worker k, the loss the mean squared error. Nothing of fxpipe is used: the workers'
1F1B order is walked action by action, each reads the weights that are live at that moment, and what lies behind or
ahead of them follows from the policy's definition. Forward and backward may read different weights: what backward
needs of forward's pass (the layer's input and output) is kept, the weights are read again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

Batch = tuple[Tensor, Tensor]
Key = tuple[int, int]  # minibatch, microbatch
Rate = Callable[[int], float]  # of update i, from 0


class Layer(NamedTuple):
    weight: Tensor
    bias: Tensor


# ── Optimizers: one object for one tensor ───────────────────────────────────────────────────────────────────────────


class Rule(Protocol):
    """An optimizer's update of one tensor, and where it goes on to.

    `ahead` gives the weights after as many more updates as there are `rates`; with `decay`, if gradients were zero.
    """

    def update(self, w: Tensor, g: Tensor, rate: float) -> Tensor: ...
    def ahead(self, w: Tensor, rates: Sequence[float], decay: bool) -> Tensor: ...


@dataclass
class Momentum:
    """torch.optim.SGD with momentum."""

    gamma: float = 0.9
    nesterov: bool = False
    dampening: float = 0.0
    weight_decay: float = 0.0
    buffer: Tensor | None = None

    def update(self, w: Tensor, g: Tensor, rate: float) -> Tensor:
        g = g + self.weight_decay * w
        self.buffer = g if self.buffer is None else self.gamma * self.buffer + (1 - self.dampening) * g
        if self.nesterov:
            return w - rate * (g + self.gamma * self.buffer)
        return w - rate * self.buffer

    def ahead(self, w: Tensor, rates: Sequence[float], decay: bool) -> Tensor:
        assert self.buffer is not None
        if not decay:
            return w - sum(rates) * self.buffer
        carried = self.gamma * self.gamma if self.nesterov else self.gamma
        for rate in rates:
            w = w - rate * carried * self.buffer
            carried *= self.gamma
        return w


@dataclass
class Plain:
    """torch.optim.SGD without momentum."""

    weight_decay: float = 0.0
    gradient: Tensor | None = None

    def update(self, w: Tensor, g: Tensor, rate: float) -> Tensor:
        self.gradient = g
        return w - rate * (g + self.weight_decay * w)

    def ahead(self, w: Tensor, rates: Sequence[float], decay: bool) -> Tensor:
        assert self.gradient is not None
        assert not decay
        return w - sum(rates) * (self.gradient + self.weight_decay * w)


@dataclass
class Adam:
    """torch.optim.Adam, with `decoupled` AdamW."""

    betas: tuple[float, float] = (0.8, 0.9)
    eps: float = 1e-3
    weight_decay: float = 0.0
    decoupled: bool = False
    updates: int = 0
    m: Tensor | float = 0.0
    v: Tensor | float = 0.0

    def update(self, w: Tensor, g: Tensor, rate: float) -> Tensor:
        if self.decoupled:
            w = w - rate * self.weight_decay * w
        else:
            g = g + self.weight_decay * w
        self.updates += 1
        self.m = self.betas[0] * self.m + (1 - self.betas[0]) * g
        self.v = self.betas[1] * self.v + (1 - self.betas[1]) * g * g
        return w - rate * self.m / (1 - self.betas[0] ** self.updates) / self.scale()

    def scale(self) -> Tensor:
        return (torch.as_tensor(self.v) / (1 - self.betas[1] ** self.updates)).sqrt() + self.eps

    def ahead(self, w: Tensor, rates: Sequence[float], decay: bool) -> Tensor:
        beta, moment, moved = self.betas[0], self.m, torch.zeros_like(w)
        for i, rate in enumerate(rates, 1):
            if decay:
                moment = beta * moment
            moved = moved + rate * moment / (1 - beta ** (self.updates + (i if decay else 0)))
        if self.decoupled:
            w = w - sum(rates) * self.weight_decay * w
        return w - moved / self.scale()


@dataclass
class Softsign:
    """An optimizer that fxpipe does not know: it goes on as it last went, at the coming rates."""

    rate: float = 0.0
    moved: Tensor | float = 0.0

    def update(self, w: Tensor, g: Tensor, rate: float) -> Tensor:
        self.rate, self.moved = rate, -rate * g / (0.1 + g.abs())
        return w + self.moved

    def ahead(self, w: Tensor, rates: Sequence[float], decay: bool) -> Tensor:
        assert not decay
        return w + (sum(rates) / self.rate if self.rate else len(rates)) * self.moved


# ── One worker and what its policy lets it read ─────────────────────────────────────────────────────────────────────


@dataclass
class Worker:
    """A layer with all the versions it ever had.

    Attributes:
        known: whether the rates of later updates are known ahead of them.
        feedback: updates of delay that error feedback repairs; 0 for none.
        plain: the weights with every step of the optimizer once.
        moved: by update, what the optimizer alone subtracted.
        start: the minibatch that first found the pipeline empty: 0, or the first one after a flush.
        kept: what a policy keeps between the actions of a worker, by phase, minibatch and microbatch.
        late: how many minibatches after its own an update is made, but for those that a flush makes.
        summed: the gradients of minibatches whose updates are to come.
        saw: by action, the version it found live and the steps predicted from it, for tests of this file.
    """

    k: int
    workers: int
    microbatches: int
    history: list[Layer]
    rules: tuple[Rule, Rule]
    rate: Rate
    known: bool = True
    decay: bool = False
    feedback: int = 0
    plain: Layer | None = None
    began: Layer = field(init=False)
    moved: list[Layer] = field(default_factory=list)
    start: int = 0
    kept: dict[tuple[str, int, int], Any] = field(default_factory=dict)
    saw: dict[tuple[str, int, int], tuple[int, int]] = field(default_factory=dict)
    steps: int = 0
    late: int = 0
    summed: list[Layer] = field(default_factory=list)

    @property
    def version(self) -> int:
        return len(self.history) - 1

    @property
    def live(self) -> Layer:
        return self.history[-1]

    def update(self, gradients: Layer) -> None:
        """With error feedback, the weights are those of all steps and the last ones again."""
        rate = self.rate(self.version)
        self.began = live = self.live
        made = Layer(*(r.update(w, g, rate) for r, w, g in zip(self.rules, live, gradients, strict=True)))
        if self.feedback:
            self.moved.append(Layer(*(before - after for before, after in zip(live, made, strict=True))))
            self.plain = Layer(*(w - u for w, u in zip(self.plain or self.history[0], self.moved[-1], strict=True)))
            last = self.moved[-self.feedback :]
            made = Layer(*(w - sum(steps) for w, *steps in zip(self.plain, *last, strict=True)))
        self.history.append(made)

    def ahead(self, target: int) -> Layer:
        """The weights of version `target` as the optimizer's own direction has them."""
        steps = self.steps_to(target)
        if not steps:
            return self.live
        t = self.version
        rates = [self.rate(t + i if self.known else t) for i in range(steps)]
        return Layer(*(r.ahead(w, rates, self.decay) for r, w in zip(self.rules, self.live, strict=True)))

    def line(self, target: int) -> Layer:
        """The weights of version `target` on the line of the last update, which begins where it was made from."""
        steps = self.steps_to(target)
        if not steps:
            return self.live
        return Layer(*(now + steps * (now - was) for was, now in zip(self.began, self.live, strict=True)))

    def steps_to(self, target: int) -> int:
        """0 from version 0: nothing has a direction yet."""
        assert target >= self.version
        self.steps = target - self.version if self.version else 0
        return self.steps


class Policy:
    """`latest`: every pass reads what is live; the others say what they read instead."""

    def forward(self, at: Worker, m: int, j: int) -> Layer:
        return at.live

    def backward(self, at: Worker, m: int, j: int) -> Layer:
        return at.live

    def updated(self, at: Worker) -> None:
        """A worker has made an update."""

    def lag(self, at: Worker) -> int:
        """How many updates a forward in steady state is behind its backward, at most: counted, not looked up."""
        seen = [max(0, (i - (at.workers - 1 - at.k)) // at.microbatches) for i in range(50 * at.microbatches)]
        return max(i // at.microbatches - s for i, s in enumerate(seen)) + at.late


class Stash(Policy):
    """`stash`: backward reads what forward read."""

    def forward(self, at: Worker, m: int, j: int) -> Layer:
        at.kept["F", m, j] = layer = self.first(at, m, j)
        return layer

    def first(self, at: Worker, m: int, j: int) -> Layer:
        return at.live

    def backward(self, at: Worker, m: int, j: int) -> Layer:
        layer: Layer = at.kept.pop(("F", m, j))
        return layer


class Vertical(Policy):
    """`vertical`: a microbatch meets one version everywhere, the one that was live when it entered."""

    def __init__(self) -> None:
        self.entered: dict[Key, int] = {}

    def forward(self, at: Worker, m: int, j: int) -> Layer:
        if at.k == 0:
            self.entered[m, j] = at.version
        return at.history[self.entered[m, j]]

    def backward(self, at: Worker, m: int, j: int) -> Layer:
        return at.history[self.entered[m, j]]

    def lag(self, at: Worker) -> int:
        return -(-(at.workers - 1) // at.microbatches) + at.late


class TwoBuffered(Policy):
    """`2bw`: W(t+1) = W(t) − ν∇f(W(t−1)); without a pipeline there is no delay."""

    def forward(self, at: Worker, m: int, j: int) -> Layer:
        return at.history[max(at.start, m - self.lag(at))]

    backward = forward

    def lag(self, at: Worker) -> int:
        return min(1, at.workers - 1) + at.late


class TwoBufferedAhead(TwoBuffered):
    """`2bw+predict`: W(t+1) = W(t) − ν∇f(Ŵ(t)), predicted as soon as there was W(t−1)."""

    def __init__(self) -> None:
        self.predicted: dict[Key, Layer] = {}  # by worker and version

    def updated(self, at: Worker) -> None:
        self.predicted[at.k, at.version + 1] = at.ahead(at.version + 1)

    def forward(self, at: Worker, m: int, j: int) -> Layer:
        if m in (at.start, 1) or not self.lag(at):  # version 0 has no direction
            return super().forward(at, m, j)
        return self.predicted[at.k, m]

    backward = forward


class SpecTrain(Policy):
    """`spectrain`: both passes predict the weights of one moment, ⌊k/2⌋ microbatches after the minibatch."""

    def forward(self, at: Worker, m: int, j: int) -> Layer:
        return at.ahead(m + (j + at.k // 2) // at.microbatches)

    backward = forward


class PipeOptim(Policy):
    """`pipeoptim`: forward predicts what its update will find live; so does backward, if that is later."""

    def forward(self, at: Worker, m: int, j: int) -> Layer:
        return at.ahead(m)

    backward = forward


class Keep(Stash):
    """`pipeoptim+keep`: and backward reads the prediction instead."""

    def first(self, at: Worker, m: int, j: int) -> Layer:
        return at.ahead(m)


class Lwp(Policy):
    """`lwp`: as pipeoptim, on the line through the last two versions."""

    def forward(self, at: Worker, m: int, j: int) -> Layer:
        return at.line(m)

    backward = forward


class XPipe(Policy):
    """`xpipe`: the first microbatch predicts for all of its minibatch, each phase by its own closed form."""

    def forward(self, at: Worker, m: int, j: int) -> Layer:
        n, t = at.workers, at.microbatches
        steps = nearest((n + t - Fraction(at.k, 2) - 2) / t)
        behind = math.ceil(Fraction(n - 1 - at.k, t))
        return self.shared("F", at, m, j, m - behind + steps)

    def backward(self, at: Worker, m: int, j: int) -> Layer:
        t = at.microbatches
        return self.shared("B", at, m, j, m + nearest(Fraction(t + at.k // 2 - 1, t)))

    def shared(self, phase: str, at: Worker, m: int, j: int, target: int) -> Layer:
        if at.workers == 1:
            return at.live
        if j == 0:
            at.kept[phase, m, 0] = at.ahead(target)
        layer: Layer = at.kept[phase, m, 0]
        if j == at.microbatches - 1:
            del at.kept[phase, m, 0]
        return layer


def nearest(x: Fraction) -> int:
    """The nearest integer, halves down."""
    return math.ceil(x - Fraction(1, 2))


POLICIES: dict[str, type[Policy]] = {
    "latest": Policy,
    "stash": Stash,
    "vertical": Vertical,
    "2bw": TwoBuffered,
    "2bw+predict": TwoBufferedAhead,
    "spectrain": SpecTrain,
    "pipeoptim": PipeOptim,
    "pipeoptim+keep": Keep,
    "xpipe": XPipe,
    "lwp": Lwp,
}


def policy(text: str) -> tuple[Policy, list[str]]:
    """A policy from its text, and its options."""
    name, *options = text.split("+")
    for option in ("keep", "predict"):
        if option in options:
            name += f"+{option}"
    return POLICIES[name](), options


# ── The pipeline ────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Run:
    losses: list[float]
    layers: list[Layer]
    workers: list[Worker]


def train(
    text: str,
    initial: Sequence[Layer],
    batches: Sequence[Batch],
    microbatches: int,
    rule: Callable[[], Rule],
    rate: Rate,
    *,
    known: bool = True,
    flush_at: int | None = None,
    late: int = 0,
) -> Run:
    """Train the chain under policy `text`; each batch is one minibatch, the pipeline is emptied before `flush_at`.

    Updates are made `late` minibatches after their own.
    """
    chosen, options = policy(text)
    n = len(initial)
    workers = [
        Worker(k, n, microbatches, [layer], (rule(), rule()), rate, known, "decay" in options)
        for k, layer in enumerate(initial)
    ]
    for worker in workers:
        worker.late = late
        if "ef" in options:
            worker.feedback = chosen.lag(worker)
    losses: list[float] = []
    for start, end in pairwise(sorted({0, flush_at or 0, len(batches)})):
        losses += _between_flushes(chosen, workers, batches, range(start, end))
        for worker in workers:
            chosen.updated(worker)
    assert not any(worker.kept for worker in workers)
    return Run(losses, [worker.live for worker in workers], workers)


def order(k: int, workers: int, count: int) -> Iterator[tuple[str, int]]:
    """1F1B without a flush: N−1−k forwards ahead, then one forward, one backward; flat microbatches."""
    ahead = min(workers - 1 - k, count)
    yield from (("F", i) for i in range(ahead))
    for i in range(count):
        if i + ahead < count:
            yield "F", i + ahead
        yield "B", i


def _between_flushes(
    chosen: Policy, workers: Sequence[Worker], batches: Sequence[Batch], minibatches: range
) -> list[float]:
    n, count = len(workers), workers[0].microbatches
    parts = {
        (m, j): part
        for m in minibatches
        for j, part in enumerate(zip(*(side.chunk(count) for side in batches[m]), strict=True))
    }
    keys = list(parts)
    outputs: dict[tuple[int, Key], Tensor] = {(-1, key): x for key, (x, _) in parts.items()}
    pulls: dict[tuple[int, Key], Tensor] = {}
    losses: dict[Key, float] = {}
    sums: list[list[Layer]] = [[] for _ in workers]
    rows = [list(order(w.k, n, len(keys))) for w in workers]
    for worker in workers:
        worker.start = minibatches.start
    while any(rows):
        acted = False
        for worker, row in zip(workers, rows, strict=True):
            if not row:
                continue
            k, (phase, flat) = worker.k, row[0]
            key = keys[flat]
            if ((k - 1, key) not in outputs) if phase == "F" else ((k, key) not in pulls):
                continue
            row.pop(0)
            acted = True
            worker.steps, version = 0, worker.version
            layer = (chosen.forward if phase == "F" else chosen.backward)(worker, *key)
            worker.saw[phase, *key] = (version, worker.steps)
            x = outputs[k - 1, key]
            if phase == "F":
                outputs[k, key] = y = torch.tanh(x @ layer.weight.t() + layer.bias)
                if k == n - 1:
                    error = y - parts[key][1]
                    losses[key] = float((error * error).mean())
                    pulls[k, key] = 2 * error / error.numel()
                continue
            y = outputs[k, key]
            pull = pulls[k, key] * (1 - y * y)
            pulls[k - 1, key] = pull @ layer.weight
            sums[k].append(Layer(pull.t() @ x, pull.sum(0)))
            if len(sums[k]) == count:
                worker.summed.append(Layer(*(torch.stack(g).mean(0) for g in zip(*sums[k], strict=True))))
                sums[k].clear()
                if len(worker.summed) > worker.late:
                    worker.update(worker.summed.pop(0))
                    chosen.updated(worker)
        assert acted
    for worker in workers:
        while worker.summed:
            worker.update(worker.summed.pop(0))
    return [sum(losses[m, j] for j in range(count)) / count for m in minibatches]

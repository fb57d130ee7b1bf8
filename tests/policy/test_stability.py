"""The largest rate that a pipeline bears on a quadratic, against the spectral radius of its policy's update rule.

Worker k has parameters w_k, one for each of many curvatures a, and the loss is ½·Σ a·w². No parameter knows of another,
and the gradient a·w is made of what the forward read alone: so each is a quadratic of its own with its worker's delay,
and one training run tries all curvatures, which is all rates. Limits are rate · curvature / (1 − momentum).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import fxpipe

RATE = 0.1
CURVATURES = torch.logspace(-1.3, 1.1, 601, dtype=torch.float64)  # in (1 − momentum) / RATE: 0.9% apart
STEPS, WINDOW = 500, 120
SETTLED = 1e-100


class Kind(NamedTuple):
    """A group of parameters with SGD's momentum."""

    momentum: float
    nesterov: bool = False


HEAVY, LONG, NESTEROV = Kind(0.9), Kind(0.99), Kind(0.9, nesterov=True)
KINDS = {"heavy": HEAVY, "long": LONG, "nesterov": NESTEROV}


class Worker(nn.Module):
    """Adds its parameters' loss to what came before: a backward reads no weights, only what the forward made."""

    def __init__(self) -> None:
        super().__init__()
        for name in KINDS:
            setattr(self, name, nn.Parameter(torch.ones_like(CURVATURES)))

    def forward(self, ones: Tensor, loss: Tensor) -> Tensor:
        for name, kind in KINDS.items():
            seen = ones * getattr(self, name)
            loss = loss + 0.5 * (1 - kind.momentum) / RATE * (CURVATURES * seen * seen).sum(1)
        return loss


class Quadratics(nn.Module):
    def __init__(self, workers: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Worker() for _ in range(workers)])

    def forward(self, ones: Tensor) -> Tensor:
        loss = torch.zeros_like(ones[:, 0])
        for part in self.parts:
            loss = part(ones, loss)
        return loss.mean()


def optimizer(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    kinds = [(p, KINDS[name.rsplit(".", 1)[1]]) for name, p in named]
    groups = [{"params": [p], "momentum": kind.momentum, "nesterov": kind.nesterov} for p, kind in kinds]
    return torch.optim.SGD(groups, lr=RATE)


@functools.cache
def built(workers: int, microbatches: int) -> fxpipe.Build:
    at = [f"parts.{k}" for k in range(1, workers)]
    return fxpipe.compile(
        Quadratics(workers),
        lambda model, ones: model(ones),
        torch.ones(microbatches, len(CURVATURES), dtype=torch.float64),
        workers=workers,
        microbatches=microbatches,
        forward_at=at,
        backward_at=at,
        schedule="async",
        policy="latest",
        cost="analytic",
        optimizer=optimizer,
    )


@functools.cache
def found(policy: str, workers: int, microbatches: int) -> dict[tuple[int, str], float]:
    """The largest stable rate of each worker and kind, by training: above it, weights grow from window to window."""
    live: dict[str, Tensor] = {}

    def watched(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        live.update((name, p.detach()) for name, p in named)
        return optimizer(named)

    pipeline = built(workers, microbatches).local(optimizer=watched, policy=policy)
    ones = torch.ones(microbatches, len(CURVATURES), dtype=torch.float64)
    most = {name: [torch.zeros_like(CURVATURES) for _ in range(2)] for name in live}
    for step in range(STEPS):
        pipeline.step(ones)
        window = (step - STEPS) // WINDOW
        for name, values in live.items() if window in (-1, -2) else ():
            most[name][window] = torch.maximum(most[name][window], values.abs())
    limits = {}
    for name, (earlier, later) in most.items():
        worker, kind = name.split(".")[1:]
        grows = ~((later < earlier) | (later < SETTLED))  # also where they are no numbers any more
        assert not grows[0], f"{name}: lower curvatures would have to be tried"
        first = int(grows.int().argmax())
        limits[int(worker), kind] = math.sqrt(float(CURVATURES[first - 1] * CURVATURES[first])) if first else math.inf
    return limits


Reads = list[tuple[int, int]]
"""How many updates late the forward of each microbatch reads, and how many it predicts from there."""


def radius(curvature: float, kind: Kind, reads: Reads, feedback: int) -> float:
    """The spectral radius of one update, of rate · curvature / (1 − momentum), by the definitions alone.

    The state is the weights w_t, w_{t−1}, …, as far back as any forward reads, as many momentum buffers in steps, and
    the steps u_{t−1} … u_{t−τ} that feedback of τ updates takes back.
    """
    back = 1 + max(lag for lag, _ in reads)

    def update(state: Tensor) -> Tensor:
        w, buffers, steps = state.split([back, back, feedback])
        seen = sum(w[lag] - ahead * buffers[lag] for lag, ahead in reads) / len(reads)
        gradient = (1 - kind.momentum) * curvature * seen
        buffer = kind.momentum * buffers[0] + gradient
        step = gradient + kind.momentum * buffer if kind.nesterov else buffer
        new = w[0] - step if not feedback else w[0] - 2 * step + steps[-1]
        made = [new[None], w[:-1], buffer[None], buffers[:-1]]
        return torch.cat([*made, step[None], steps[:-1]] if feedback else made)

    columns = [update(unit) for unit in torch.eye(2 * back + feedback, dtype=torch.float64)]
    return float(torch.linalg.eigvals(torch.stack(columns, 1)).abs().max())


@functools.cache
def limit(kind: Kind, reads: tuple[tuple[int, int], ...], feedback: int = 0) -> float:
    def stable(curvature: float) -> bool:
        return radius(curvature, kind, list(reads), feedback) <= 1 + 1e-9

    tried = CURVATURES.tolist()[::20]
    first = next((i for i, c in enumerate(tried) if not stable(c)), None)
    if first is None:
        return math.inf
    low, high = tried[first - 1 : first + 1]
    while high / low > 1.0005:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if stable(middle) else (low, middle)
    return low


# ── The pipeline against the rule of its policy ─────────────────────────────────────────────────────────────────────


def late(workers: int, microbatches: int, k: int) -> list[int]:
    """Of each microbatch's forward on worker k, by docs/policies.md."""
    return [max(0, math.ceil((workers - 1 - k - j) / microbatches)) for j in range(microbatches)]


def plain(lags: list[int], k: int) -> Reads:
    return [(lag, 0) for lag in lags]


def predicted(lags: list[int], k: int) -> Reads:
    return [(lag, lag) for lag in lags]


def spectrain(lags: list[int], k: int) -> Reads:
    return [(lag, lag + (j + k // 2) // len(lags)) for j, lag in enumerate(lags)]


def double_buffer_predicted(lags: list[int], k: int) -> Reads:
    return [(1, 1)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "workers", "microbatches", "reads"),
    [
        ("stash", 8, 1, plain),
        ("pipeoptim+ef", 8, 1, predicted),
        ("spectrain+ef", 3, 3, spectrain),
        ("2bw+predict", 3, 3, double_buffer_predicted),
    ],
)
def test_it_is_where_the_spectral_radius_passes_1(
    policy: str, workers: int, microbatches: int, reads: Callable[[list[int], int], Reads]
) -> None:
    """Half a step of the curvatures is 0.46%."""
    for (k, name), measured in found(policy, workers, microbatches).items():
        seen = tuple(reads(late(workers, microbatches, k), k))
        feedback = max(lag for lag, _ in seen) if policy.endswith("+ef") else 0
        assert measured == pytest.approx(limit(KINDS[name], seen, feedback), rel=0.006), (k, name)


# ── Figures that are known ──────────────────────────────────────────────────────────────────────────────────────────

LITERATURE: dict[tuple[str, str], dict[int, float]] = {
    ("stash", "heavy"): {1: 0.99, 2: 0.50, 4: 0.25},
    ("pipeoptim", "heavy"): {1: 2.63, 2: 1.20, 4: 0.45},
    ("latest+ef", "heavy"): {1: 2.63, 2: 0.90, 4: 0.34},
    ("stash", "nesterov"): {1: 2.38, 2: 0.74, 4: 0.31},
    ("pipeoptim", "long"): {1: 9.37, 2: 3.89, 4: 1.61},
}
"""By delay. They were found among rates a tenth apart, and are the last stable ones: so the limit is up to 11% more."""


def of(kind: str, lag: int, ahead: int = 0, feedback: int = 0) -> float:
    """The limit where all forwards read and predict alike."""
    return limit(KINDS[kind], ((lag, ahead),), feedback)


@pytest.mark.parametrize(("policy", "kind"), LITERATURE)
def test_the_figures_of_a_coarser_search_are_just_below_it(policy: str, kind: str) -> None:
    for delay, figure in LITERATURE[policy, kind].items():
        found = of(kind, delay, delay if policy == "pipeoptim" else 0, delay if policy == "latest+ef" else 0)
        assert figure * 0.99 < found < figure * 1.11, delay


@pytest.mark.parametrize("kind", ["heavy", "long"])
def test_one_update_late_heavy_ball_bears_exactly_1(kind: str) -> None:
    """λ² − (1 + γ)·λ + γ + rate·curvature: the product of its roots is 1 where rate·curvature is 1 − γ."""
    assert of(kind, 1) == pytest.approx(1, rel=0.001)


def test_one_update_late_prediction_and_feedback_bear_the_same_and_together_a_little_more() -> None:
    assert of("heavy", 1, ahead=1) == pytest.approx(of("heavy", 1, feedback=1), rel=0.001)
    assert of("heavy", 1, ahead=1, feedback=1) == pytest.approx(2.87, rel=0.01)


def test_seven_updates_late_feedback_takes_back_what_prediction_has_gained() -> None:
    """So feedback goes with microbatches."""
    assert of("heavy", 7, ahead=7) > 1.4 * of("heavy", 7)
    assert of("heavy", 7, ahead=7, feedback=7) < 0.9 * of("heavy", 7)


def test_with_as_many_microbatches_as_workers_spectrain_with_feedback_bears_four_times_the_rate() -> None:
    lags = late(3, 3, 0)
    assert limit(HEAVY, tuple(spectrain(lags, 0)), max(lags)) > 4 * of("heavy", 1)

"""Every policy trains what its paper's update rule trains, in float64, against `direct_policies`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import direct_policies as direct
import pytest
import torch
from covering import covering
from direct_policies import Batch, Layer, Rate, Rule
from pipelines import pipeline_of
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.testing import assert_close

import fxpipe
from fxpipe.errors import PolicyError
from fxpipe.schedule import SCHEDULES

UPDATES = 20
WIDTHS = (4, 5)
Kind = Callable[..., Optimizer]
Built = Callable[[int, int], Path]


class Chain(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        pairs = [(WIDTHS[k % 2], WIDTHS[(k + 1) % 2]) for k in range(layers)]
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(i, o), nn.Tanh()) for i, o in pairs])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Softsign(Optimizer):
    """Not of torch.optim."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= group["lr"] * parameter.grad / (0.1 + parameter.grad.abs())


def mean_squared(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return ((model(x) - y) ** 2).mean()


def chain(layers: int) -> Chain:
    torch.manual_seed(layers)
    return Chain(layers).double()


def initial(layers: int) -> list[Layer]:
    values = [t.detach().clone() for t in chain(layers).parameters()]
    return [Layer(*pair) for pair in zip(values[::2], values[1::2], strict=True)]


def at_most(workers: int, text: str, microbatches: int) -> int:
    """2bw wants at least N−1 microbatches, so it gets fewer workers."""
    return min(workers, microbatches + 1) if text.startswith("2bw") else workers


def batches(layers: int, microbatches: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(3)

    def drawn(width: int) -> Tensor:
        return torch.randn(2 * microbatches, width, dtype=torch.float64, generator=generator)

    return [(drawn(WIDTHS[0]), drawn(WIDTHS[layers % 2]).tanh()) for _ in range(UPDATES)]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The saved build of a chain with one layer a worker."""

    @functools.cache
    def save(workers: int, microbatches: int) -> Path:
        at = [f"layers.{k}" for k in range(1, workers)]
        build = fxpipe.compile(
            chain(workers),
            mean_squared,
            batches(workers, microbatches)[0],
            workers=workers,
            microbatches=microbatches,
            forward_at=at,
            backward_at=at,
            schedule="async",
            policy="latest",
            cost="analytic",
        )
        folder = tmp_path_factory.mktemp("chain") / "build"
        build.save(folder)
        return folder

    return save


@pytest.fixture
def same(built: Built) -> Callable[..., None]:
    """Asserts that fxpipe's run is the direct simulation's: every loss, and the weights at the end."""

    def check(
        text: str,
        workers: int,
        microbatches: int,
        optimizer: str = "momentum",
        factor: Rate | None = None,
        flush_at: int | None = None,
        schedule: str = "async",
    ) -> None:
        kind, rule, lr = OPTIMIZERS[optimizer]
        workers = at_most(workers, text, microbatches)
        data = batches(workers, microbatches)
        folder = built(workers, microbatches)
        scheduler = partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=factor) if factor else None
        losses, state = piped(folder, text, data, partial(kind, lr=lr), scheduler, flush_at, schedule=schedule)
        rate = (lambda i: lr * factor(i)) if factor else (lambda _: lr)
        late = SCHEDULES[schedule].late
        expected = direct.train(text, initial(workers), data, microbatches, rule, rate, flush_at=flush_at, late=late)
        agree(losses, state, expected.losses, expected.layers)

    return check


def piped(
    folder: Path,
    text: str,
    data: Sequence[Batch],
    optimizer: Callable[[list[Tensor]], Optimizer],
    scheduler: Callable[[Optimizer], Any] | None = None,
    flush_at: int | None = None,
    **options: Any,
) -> tuple[list[float], list[Layer]]:
    """Losses and last weights of fxpipe."""
    pipeline = pipeline_of(folder, lambda named: optimizer([p for _, p in named]), scheduler, policy=text, **options)
    losses = []
    for m, batch in enumerate(data):
        if m == flush_at:
            pipeline.flush()
        losses.append(pipeline.step(batch))
    pipeline.flush()
    state = pipeline.state_dict()
    count = len(state) // 2
    return [float(x) for x in losses], [
        Layer(state[f"layers.{k}.0.weight"], state[f"layers.{k}.0.bias"]) for k in range(count)
    ]


def agree(losses: list[float], layers: list[Layer], wanted_losses: list[float], wanted: Sequence[Layer]) -> None:
    """Losses are reported in float32."""
    assert_close(torch.tensor(losses), torch.tensor(wanted_losses), rtol=1e-6, atol=0)
    assert_close([list(x) for x in layers], [list(x) for x in wanted], rtol=0, atol=1e-10)


# name: (torch's, the same by hand, learning rate); all other rules of prediction are in test_predict
OPTIMIZERS: dict[str, tuple[Kind, Callable[[], Rule], float]] = {
    "momentum": (partial(SGD, momentum=0.9), direct.Momentum, 0.05),
    "nesterov": (partial(SGD, momentum=0.9, nesterov=True), partial(direct.Momentum, nesterov=True), 0.05),
    "momentum-weight-decay": (
        partial(SGD, momentum=0.8, weight_decay=0.1),
        partial(direct.Momentum, 0.8, weight_decay=0.1),
        0.05,
    ),
    "dampening": (partial(SGD, momentum=0.9, dampening=0.5), partial(direct.Momentum, dampening=0.5), 0.05),
    "sgd": (partial(SGD, weight_decay=0.1), partial(direct.Plain, 0.1), 0.3),
    "adam": (
        partial(Adam, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.1),
        partial(direct.Adam, weight_decay=0.1),
        0.02,
    ),
    "adamw": (
        partial(AdamW, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.2),
        partial(direct.Adam, weight_decay=0.2, decoupled=True),
        0.02,
    ),
    "own": (Softsign, direct.Softsign, 0.01),
}  # fmt: skip
PREDICTING = ("spectrain", "pipeoptim", "lwp", "2bw+predict")
WITH_MOMENTUM = ("momentum", "nesterov", "momentum-weight-decay", "dampening", "adam", "adamw")
OPTIONS = (
    *(f"{name}+decay" for name in ("spectrain", "pipeoptim", "pipeoptim+keep", "xpipe")),
    *(f"{name}+ef" for name in direct.POLICIES),
    "pipeoptim+keep+decay+ef",
)


def warm_up(i: int) -> float:
    """The first update has rate 0."""
    return min(1.0, i / 6)


def wave(i: int) -> float:
    return 0.6 + 0.4 * math.cos(i)


# ── Every policy ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("name", "workers", "more"), covering(direct.POLICIES, [2, 3, 6], range(3)))
def test_update_rule(same: Any, name: str, workers: int, more: int) -> None:
    """Most of the tests below have four workers."""
    same(name, workers, more + (max(1, workers - 1) if name.startswith("2bw") else 1))


LATE = [name for name in direct.POLICIES if name != "2bw+predict"]


@pytest.mark.parametrize(
    ("name", "setting"),
    covering(
        [*LATE, "stash+ef", "pipeoptim+ef"],
        [(2, 1, None), (3, 1, 5), (4, 2, 6), (2, 3, None), (3, 2, None)],
    ),
)
def test_updates_a_minibatch_late(same: Any, name: str, setting: tuple[int, int, int | None]) -> None:
    """What is read and predicted follows from the schedule; a flush leaves nothing late."""
    workers, microbatches, flush_at = setting
    same(name, workers, microbatches, flush_at=flush_at, schedule="async-late")


@pytest.mark.parametrize("name", [*(name for name in LATE if name != "xpipe"), "spectrain+ef"])
def test_one_worker_is_late_too(same: Any, name: str) -> None:
    same(name, 1, 2, flush_at=5, schedule="async-late")


@pytest.mark.parametrize(
    ("name", "optimizer", "setting"),
    covering(PREDICTING, OPTIMIZERS, [(4, 1, wave), (3, 1, warm_up), (4, 2, warm_up), (4, 2, None)], strength=1),
)
def test_prediction_at_rates_that_are_known_ahead(
    same: Any, name: str, optimizer: str, setting: tuple[int, int, Rate | None]
) -> None:
    workers, microbatches, factor = setting
    same(name, workers, microbatches, optimizer, factor)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_two_buffers_of_predictions(same: Any, optimizer: str) -> None:
    """Each is made while its version is live, and read when a newer one is; the pipeline is emptied in between."""
    same("2bw+predict", 4, 3, optimizer, wave, flush_at=13)


@pytest.mark.parametrize(("name", "optimizer"), covering(PREDICTING, ["momentum", "adamw", "own"], strength=1))
def test_rates_that_are_not_known_ahead(built: Built, name: str, optimizer: str) -> None:
    """The rate of now is taken for all steps."""

    class Dial:
        def __init__(self, optimizer: Optimizer) -> None:
            self.optimizer = optimizer
            self.rates = (lr * wave(i) for i in range(UPDATES + 1))
            self.step()

        def step(self) -> None:
            self.optimizer.param_groups[0]["lr"] = next(self.rates)

    kind, rule, lr = OPTIMIZERS[optimizer]
    workers = at_most(4, name, 1)
    data = batches(workers, 1)
    made = piped(built(workers, 1), name, data, partial(kind, lr=lr), Dial)
    wanted = direct.train(name, initial(workers), data, 1, rule, lambda i: lr * wave(i), known=False)
    agree(*made, wanted.losses, wanted.layers)


@pytest.mark.parametrize(("name", "flush_at", "microbatches"), covering(direct.POLICIES, [2, 13], [1, 3], strength=1))
def test_a_flush_in_between(same: Any, name: str, flush_at: int, microbatches: int) -> None:
    same(name, 4, microbatches, flush_at=flush_at)


# ── Options ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("name", "optimizer", "setting"),
    covering(["spectrain", "pipeoptim", "pipeoptim+keep", "xpipe"], WITH_MOMENTUM, [(1, None), (2, wave)], strength=1),
)
def test_decay(same: Any, name: str, optimizer: str, setting: tuple[int, Rate | None]) -> None:
    microbatches, factor = setting
    same(f"{name}+decay", 4, microbatches, optimizer, factor)


@pytest.mark.parametrize(
    ("name", "setting"),
    covering(
        direct.POLICIES,
        [
            (2, 1, "momentum", wave),
            (4, 1, "adamw", warm_up),
            (5, 2, "nesterov", wave),
            (4, 3, "momentum-weight-decay", None),
            (4, 2, "adam", None),
        ],
        strength=2,
    ),
)
def test_error_feedback(same: Any, name: str, setting: tuple[int, int, str, Rate | None]) -> None:
    workers, microbatches, optimizer, factor = setting
    same(f"{name}+ef", workers, microbatches, optimizer, factor)


@pytest.mark.parametrize("microbatches", [1, 3])
def test_error_feedback_across_a_flush(same: Any, microbatches: int) -> None:
    """What is not yet taken back is taken back after it."""
    same("spectrain+ef", 4, microbatches, "adamw", flush_at=13)


def test_all_options_together(same: Any) -> None:
    same("pipeoptim+keep+decay+ef", 4, 1, "momentum-weight-decay", wave)


# ── What all have in common ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("text", "microbatches"), covering([*direct.POLICIES, *OPTIONS], [1, 2, 3], strength=1))
def test_one_worker_trains_plainly(built: Built, text: str, microbatches: int) -> None:
    data = batches(1, microbatches)
    made = piped(built(1, microbatches), text, data, partial(SGD, lr=0.05, momentum=0.9))
    model, losses = chain(1), []
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    for batch in data:
        optimizer.zero_grad()
        loss = mean_squared(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    weight, bias = (p.detach() for p in model.parameters())
    agree(*made, losses, [Layer(weight, bias)])


@pytest.mark.parametrize(("text", "microbatches"), covering([*direct.POLICIES, *OPTIONS], [1, 3], strength=1))
def test_at_rate_0_all_policies_are_one(built: Built, text: str, microbatches: int) -> None:
    workers = at_most(4, text, microbatches)
    data = batches(workers, microbatches)
    losses, layers = piped(built(workers, microbatches), text, data, partial(SGD, lr=0.0, momentum=0.9))
    model = chain(workers)
    with torch.no_grad():
        agree(losses, layers, [mean_squared(model, b).item() for b in data], initial(workers))


# ── Refusals: that the pipeline asks; which there are is in the tests of each ──────────────


@pytest.mark.parametrize(
    ("text", "schedule"), [("2bw", "async"), ("stash", "gpipe"), ("spectrain+keep", "async"), ("lwp+decay", "async")]
)
def test_refused(built: Built, text: str, schedule: str) -> None:
    with pytest.raises(PolicyError):
        pipeline_of(
            built(4, 2), lambda named: SGD([p for _, p in named], lr=0.1, momentum=0.9), schedule=schedule, policy=text
        )


@pytest.mark.parametrize(
    ("text", "optimizer"),
    [
        ("pipeoptim+decay", "sgd"),
        ("xpipe+decay", "own"),
        ("spectrain+ef", "sgd"),
        ("latest+ef", "own"),
    ],
)
def test_an_optimizer_that_does_not_fit_is_refused(built: Built, text: str, optimizer: str) -> None:
    kind, _, lr = OPTIMIZERS[optimizer]
    with pytest.raises(PolicyError):
        pipeline_of(built(4, 1), lambda named: kind([p for _, p in named], lr=lr), policy=text)


# ── The direct simulation itself ────────────────────────────────────────────────────────────────────────────────────


@functools.cache
def simulated(text: str, workers: int, microbatches: int) -> direct.Run:
    data = batches(workers, microbatches)
    return direct.train(text, initial(workers), data, microbatches, direct.Momentum, lambda i: 0.05 * wave(i))


@pytest.mark.parametrize("microbatches", [1, 2, 3])
@pytest.mark.parametrize("workers", range(1, 7))
def test_the_simulation_sees_the_versions_that_counting_gives(workers: int, microbatches: int) -> None:
    for worker in simulated("latest", workers, microbatches).workers:
        for (phase, m, j), (version, _) in worker.saw.items():
            ahead = workers - 1 - worker.k
            assert version == (max(0, (m * microbatches + j - ahead) // microbatches) if phase == "F" else m)


@pytest.mark.parametrize("workers", range(1, 7))
def test_the_simulation_predicts_as_far_as_the_papers_say(workers: int) -> None:
    for name in ("spectrain", "pipeoptim", "xpipe", "lwp"):
        for k, worker in enumerate(simulated(name, workers, 1).workers):
            forward, backward = workers - 1 - k, 0
            if name == "spectrain":
                forward, backward = forward + k // 2, k // 2
            if name == "xpipe" and workers > 1:
                forward, backward = math.ceil(workers - 1 - k / 2 - 0.5), k // 2
            assert {worker.saw["F", m, 0][1] for m in range(workers, UPDATES)} == {forward}
            assert {worker.saw["B", m, 0][1] for m in range(workers, UPDATES)} == {backward}


def test_no_two_policies_train_the_same() -> None:
    """Far more apart than the tolerance that the tests above allow."""
    texts = [*direct.POLICIES, *OPTIONS]
    ends = {t: torch.cat([x.weight.flatten() for x in simulated(t, 4, 4).layers]) for t in texts}
    assert all(end.isfinite().all() for end in ends.values())
    for a, b in combinations(texts, 2):
        assert (ends[a] - ends[b]).abs().max() > 1e-5, (a, b)

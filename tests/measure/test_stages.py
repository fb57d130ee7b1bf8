"""Each stage is timed alone: its own code, the prediction where it happens, the update apart, nothing else touched."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cached import captured, cuts, lowered
from commands import unchanged
from small_models import CASES

import fxpipe
from fxpipe.errors import BatchError
from fxpipe.measure import stages as stage_times
from fxpipe.measure.stages import measure_stages
from fxpipe.observe import watch
from fxpipe.plan.cost_records import StageTime
from fxpipe.planner.costs_file import BuildCosts
from fxpipe.policy.optimizers.predict import Predictor
from fxpipe.runtime.worker import executor

PAUSE = 0.05


def build_of(name: str = "gpt", workers: int = 2, shift: int = 0, **options: Any) -> fxpipe.Build:
    return lowered(name, options.get("microbatches", 1), workers=workers, **cuts(CASES[name], workers, shift),
                   **{k: v for k, v in options.items() if k != "microbatches"})  # fmt: skip


def batch_of(name: str = "gpt") -> Any:
    return CASES[name].batches(1)[0]


def slowed(build: fxpipe.Build, stage: str, function: str, pause: float = PAUSE) -> fxpipe.Build:
    """The build with a pause at the start of one function of one stage."""
    head = f"def {function}(weights, buffers, {'batch' if function == 'forward' else 'saved'}, comm):\n"
    source = build.files[stage]
    assert head in source
    slow = source.replace(head, f"{head}    __import__('time').sleep({pause})\n")
    return dataclasses.replace(build, files={**build.files, stage: slow})


class Clock:
    """Stands still but for sleep."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock by which stages are measured: only sleep moves it."""
    clock = Clock()
    monkeypatch.setattr(time, "sleep", clock.sleep)
    monkeypatch.setattr(stage_times, "clock_of", lambda device: clock)
    monkeypatch.setattr(watch, "perf_counter_ns", lambda: round(1e9 * clock()))
    return clock


@pytest.fixture
def sleepers(clock: Clock) -> Callable[..., list[dict[str, float]]]:
    """Measures a build's stages by that clock: what is not zero, by worker."""

    def measured(build: fxpipe.Build, name: str = "gpt", optimizer: Any = None, **plan: Any) -> list[dict[str, float]]:
        build = dataclasses.replace(build, plan=dataclasses.replace(build.plan, **plan))
        times = measure_stages(build, batch_of(name), optimizer=optimizer, threads=1, repeats=2)
        parts = [{"forward": t.forward, "backward": t.backward, "update": t.update} for t in times]
        return [{what: round(seconds, 9) for what, seconds in part.items() if seconds > 1e-9} for part in parts]

    return measured


@pytest.mark.parametrize(
    ("name", "workers", "options"),
    [
        ("gpt", 3, {"shift": 1}),
        ("function", 2, {"shift": -1, "policy": "stash"}),
        ("function", 2, {"shift": 1, "policy": "latest"}),
        ("gpt", 2, {"shift": 1, "schedule": "1f1b", "microbatches": 2}),
        ("gpt-dropout", 2, {"schedule": "gpipe"}),
        ("conv", 2, {"shift": -1}),
        ("dict", 3, {}),
        ("function", 1, {}),
    ],
)
def test_every_kind_of_build_is_timed(name: str, workers: int, options: dict[str, Any]) -> None:
    times = measure_stages(build_of(name, workers, **options), batch_of(name), threads=1, repeats=1)
    assert len(times) == workers
    assert all(t.forward > 0 and t.backward > 0 and t.update > 0 for t in times)


@pytest.mark.parametrize(
    "options",
    [
        {"dp": 2},
        {"dp": 3, "shard": "optimizer", "policy": "stash"},
        {"dp": 2, "shard": "optimizer", "schedule": "1f1b"},
        {"dp": 2, "outer": "diloco"},
    ],
    ids=str,
)
def test_one_replica_is_timed_alone(options: dict[str, Any]) -> None:
    program = captured("gpt", options["dp"], size=12)[2]
    build = fxpipe.lower(program, workers=2, microbatches=1, cost="analytic", **cuts(CASES["gpt"], 2, 0), **options)
    times = measure_stages(build, CASES["gpt"].batches(1, 12)[0], threads=1, repeats=2)
    assert all(t.forward > 0 and t.backward > 0 and t.update > 0 for t in times)


def test_weight_gradients_apart_are_timed() -> None:
    build = build_of("gpt", 2, schedule="zb-h1", microbatches=4)
    times = measure_stages(build, batch_of("gpt"), threads=1, repeats=1)
    assert all(time.forward > 0 and time.backward > 0 and time.weight > 0 and time.update > 0 for time in times)


def test_updates_that_wait_for_other_workers_are_timed() -> None:
    def made() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4))

    def loss(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).float().square().mean()

    options: dict[str, Any] = {"workers": 2, "microbatches": 2, "schedule": "1f1b", "autocast": "fp16"}
    build = fxpipe.compile(made(), loss, torch.randn(4, 4), cost="analytic", **options)
    times = measure_stages(build, torch.randn(4, 4), repeats=2)
    assert all(time.forward > 0 and time.backward > 0 and time.update > 0 for time in times)


def test_the_slow_forward_is_found(sleepers: Any) -> None:
    assert sleepers(slowed(build_of(), "stage_1.py", "forward")) == [{}, {"forward": PAUSE}]


def test_the_slow_backward_is_found(sleepers: Any) -> None:
    assert sleepers(slowed(build_of(), "stage_0.py", "backward")) == [{"backward": PAUSE}, {}]


def test_times_are_a_microbatchs(sleepers: Any) -> None:
    build = slowed(build_of(microbatches=2, schedule="1f1b"), "stage_1.py", "forward")
    assert sleepers(build) == [{}, {"forward": PAUSE}]


class SlowSGD(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        time.sleep(0.05)
        return super().step(closure)


def slow_sgd(named: Any) -> torch.optim.Optimizer:
    return SlowSGD([p for _, p in named], lr=0.1, momentum=0.9)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_the_update_is_apart_from_the_backward(sleepers: Any, microbatches: int) -> None:
    build = build_of(microbatches=microbatches, schedule="1f1b")
    found = sleepers(build, optimizer=slow_sgd)
    assert found == [{"update": 0.05}] * 2


def test_a_prediction_counts_where_it_is_read(sleepers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    predict = Predictor.predict

    def slow(self: Predictor, steps: int, subset: Any = None) -> Any:
        if steps:
            time.sleep(PAUSE)
        return predict(self, steps, subset)

    monkeypatch.setattr(Predictor, "predict", slow)
    own, tied = build_of("function", 3), build_of("gpt")
    assert sleepers(own, "function", policy="latest") == [{}] * 3
    assert sleepers(own, "function", policy="spectrain") == [{"forward": PAUSE}] * 3, "the last backward reads it again"
    assert sleepers(tied, policy="spectrain")[0] == {"forward": PAUSE, "update": PAUSE}, "copies are sent predicted"


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "microbatches"), [("1f1b", 32), ("gpipe", 32), ("async", 1)])
@pytest.mark.parametrize("pause", [0.001, 0.3, 5.0])
def test_measuring_takes_no_longer_than_it_must(clock: Clock, schedule: str, microbatches: int, pause: float) -> None:
    build = lowered("gpt", microbatches, 32, workers=2, schedule=schedule, **cuts(CASES["gpt"], 2, 0))
    build = slowed(slowed(build, "stage_1.py", "forward", pause), "stage_0.py", "backward", pause)
    said: list[str] = []
    times = measure_stages(build, CASES["gpt"].batches(1, 32)[0], optimizer=slow_sgd, threads=1, say=said.append)
    assert [round(t.forward, 9) for t in times] == [0.0, pause]
    assert [round(t.backward, 9) for t in times] == [pause, 0.0]
    assert [round(t.update, 9) for t in times] == [0.05, 0.05]
    assert said == ["timing stage 1 of 2", "timing stage 2 of 2"]
    assert clock.now < 1.5 * stage_times.BUDGET + 7 * pause + 1.0, "the budget, a warm-up, and what began within it"


def test_some_microbatches_stand_for_all() -> None:
    assert [stage_times._some(4, count) for count in (1, 2, 3, 4, 9)] == [
        {3}, {0, 3}, {0, 2, 3}, {0, 1, 2, 3}, {0, 1, 2, 3}
    ]  # fmt: skip
    assert stage_times._some(1, 1) == stage_times._some(1, 2) == {0}


def test_what_only_the_first_microbatch_does_counts_once(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    execute = executor.Executor.execute

    def slow(self: Any, action: Any, leaves: Any = None) -> Any:
        time.sleep(0.3 if action.microbatch == 0 else 0.1)
        return execute(self, action, leaves)

    monkeypatch.setattr(executor.Executor, "execute", slow)
    build = lowered("gpt", 8, 8, workers=2, schedule="1f1b", **cuts(CASES["gpt"], 2, 0))
    for found in measure_stages(build, batch_of(), threads=1):
        assert found.forward == pytest.approx((0.3 + 7 * 0.1) / 8)
        assert found.backward == pytest.approx((0.3 + 7 * 0.1) / 8)


def test_waiting_is_not_counted(sleepers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    recv = stage_times._Ready.recv

    def slow(self: Any, *arguments: Any) -> Any:
        time.sleep(PAUSE)
        return recv(self, *arguments)

    monkeypatch.setattr(stage_times._Ready, "recv", slow)
    assert sleepers(build_of()) == [{}, {}]


def test_the_learning_rate_is_too_small_to_move_the_weights() -> None:
    seen: list[torch.nn.Parameter] = []

    def optimizer(named: Any) -> torch.optim.Optimizer:
        seen.extend(p for _, p in named)
        return torch.optim.SGD([p for _, p in named], lr=1.0, momentum=0.9)

    build = build_of("function")
    measure_stages(build, batch_of("function"), optimizer=optimizer, threads=1, repeats=3)
    initial = [build.tensors[p.name] for k in range(2) for p in build.plan.owned(k) if p.trained]
    for now, before in zip(seen, initial, strict=True):
        assert torch.allclose(now, before, atol=1e-3)


def test_nothing_else_changes(tmp_path: Path) -> None:
    build = build_of("gpt-dropout").save(tmp_path / "build")
    before = {name: tensor.clone() for name, tensor in build.tensors.items()}
    batch = batch_of("gpt-dropout")
    kept = [t.clone() for t in batch]
    torch.manual_seed(7)
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    with unchanged(tmp_path):
        measure_stages(build, batch, threads=1, repeats=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    assert all(torch.equal(build.tensors[name], tensor) for name, tensor in before.items())
    assert all(torch.equal(a, b) for a, b in zip(batch, kept, strict=True))


def test_a_build_in_memory_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with unchanged(tmp_path):
        measure_stages(build_of("function"), batch_of("function"), threads=1, repeats=1)


def test_the_correction_compares_with_the_nodes() -> None:
    first, *_ = build_of().workers
    estimated = dataclasses.replace(first, forward=1.0, backward=2.0, weight=1.0)
    times = (StageTime(3.0, 5.0, 1.0),)
    assert BuildCosts((estimated,), times).correction(0) == 2.0
    assert BuildCosts((), times).correction(0) is BuildCosts((estimated,)).correction(0) is None
    nothing = dataclasses.replace(first, forward=0.0, backward=0.0, weight=0.0)
    assert BuildCosts((nothing,), times).correction(0) is None


def test_a_foreign_batch_is_refused() -> None:
    with pytest.raises(BatchError, match="does not fit"):
        measure_stages(build_of(), CASES["gpt"].batches(1, 4)[0])


def test_node_costs_and_stages_agree_roughly() -> None:
    """Both measured: a wide bound, but no factor of ten, and no milliseconds taken for seconds."""
    _, _, program = captured("gpt")
    build = fxpipe.lower(program, workers=2, cost="measured", threads=1)
    costs = dataclasses.replace(build.costs, times=measure_stages(build, batch_of(), threads=1, repeats=3))
    for worker in range(2):
        correction = costs.correction(worker)
        assert correction is not None
        assert 0.1 < correction < 10

"""A pipeline of a user's own loop is freed, with its workers, when nothing refers to it, however far it has come."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.runtime.process.pipeline import Pipeline

TOYS: dict[str, dict[str, Any]] = {
    "async": {"forward": (0, 1, 2), "backward": (0, 1, 2)},
    "1f1b": {"schedule": "1f1b", "microbatches": 2},
    "dropout": {"dropout": True},
}


class UserError(Exception):
    """Raised by the user's code."""


def failing(named: Any) -> torch.optim.Optimizer:
    """An optimizer whose third step fails."""
    optimizer, steps = torch.optim.SGD([p for _, p in named], lr=0.1), iter(range(3))

    def hook(*_: Any) -> None:
        if next(steps) == 2:
            raise UserError

    optimizer.register_step_pre_hook(hook)
    return optimizer


def trained(pipeline: Pipeline, batches: Any) -> None:
    for batch in batches:
        pipeline.step(batch)


def saved_and_loaded(pipeline: Pipeline, batches: Any, folder: Path) -> None:
    trained(pipeline, batches)
    pipeline.save(folder)
    pipeline.load(folder)
    trained(pipeline, batches)


def left(pipeline: Pipeline, batches: Any) -> None:
    """By an error of the loop."""
    with suppress(UserError), pipeline:
        trained(pipeline, batches)
        raise UserError


def freed(make: Callable[[], Pipeline], use: Callable[[Pipeline], None], at_once: bool = True) -> None:
    """Nothing of a pipeline is left after its use: at once, by counting references alone, or when collected."""
    torch.optim.SGD([torch.ones(1)])  # the first one imports modules, whose errors hold frames
    gc.collect()
    gc.disable()
    try:
        pipeline = make()
        use(pipeline)
        seen = [weakref.ref(thing) for thing in (pipeline, *pipeline.executors)]
        seen += [weakref.ref(value) for each in pipeline.executors for value in each.store.parameters.values()]
        del pipeline
        if not at_once:
            gc.collect()
        assert not [found for ref in seen if (found := ref()) is not None]
    finally:
        gc.enable()


@pytest.fixture
def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [tuple(torch.randn(2, 4, 6, dtype=torch.float64)) for _ in range(5)]  # type: ignore[misc]


@pytest.mark.parametrize("name", TOYS)
def test_it_is_freed(toy: Any, batches: Any, tmp_path: Path, name: str) -> None:
    build = fxpipe.load(toy(**TOYS[name]).save(tmp_path / "build"))
    freed(build.local, lambda pipeline: trained(pipeline, batches))
    freed(build.local, lambda pipeline: left(pipeline, batches))


def test_it_is_freed_after_a_failing_hook(toy: Any, batches: Any, tmp_path: Path) -> None:
    build = fxpipe.load(toy(**TOYS["async"]).save(tmp_path / "build"))

    def use(pipeline: Pipeline) -> None:
        with pytest.raises(Exception, match="UserError"):
            trained(pipeline, batches)

    freed(lambda: build.local(optimizer=failing), use, at_once=False)  # an optimizer with hooks is in a cycle


@pytest.mark.slow
def test_it_is_freed_after_loading(toy: Any, batches: Any, tmp_path: Path) -> None:
    build = fxpipe.load(toy(**TOYS["async"]).save(tmp_path / "build"))
    freed(build.local, lambda pipeline: saved_and_loaded(pipeline, batches, tmp_path / "saved"))


@pytest.mark.slow
def test_its_thread_writes_the_checkpoints_and_ends(toy: Any, batches: Any, tmp_path: Path) -> None:
    build, before = fxpipe.load(toy().save(tmp_path / "build")), threading.active_count()
    pipeline = build.local(out=str(tmp_path / "out"), checkpoint_every="2")
    trained(pipeline, batches)
    del pipeline
    gc.collect()
    deadline = time.monotonic() + 30
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before
    assert (tmp_path / "out" / "checkpoints" / "step-2").is_dir()
    with build.local(out=str(tmp_path / "out"), checkpoint_every="2", resume="newest") as again:  # it has the folder
        assert again.fed == 4


def test_another_thread_may_let_go_of_it(toy: Any, batches: Any, tmp_path: Path) -> None:
    build = fxpipe.load(toy().save(tmp_path / "build"))
    pipelines = [build.local()]
    trained(pipelines[0], batches)
    worker = weakref.ref(pipelines[0].executors[0])
    thread = threading.Thread(target=pipelines.clear)
    thread.start()
    thread.join()
    trained(build.local(), batches)  # a row that begins lets go of those that wait to be freed
    gc.collect()
    assert worker() is None


@pytest.mark.slow
def test_compiles_and_pipelines_that_are_not_closed_leave_no_tensor() -> None:
    """Of replicas and an evaluation, too."""
    batch = (torch.randn(4, 8), torch.randn(4, 8))

    def loss(model: Any, batch: Any) -> Any:
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    def tensors() -> int:
        gc.collect()
        return sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())

    def compiled() -> None:
        evaluation = (lambda model, batch: {"loss": loss(model, batch)}, [batch])
        net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        pipeline = fxpipe.compile(net, loss, batch, workers=2, dp=2, cost="analytic", evaluation=evaluation).local()
        trained(pipeline, [batch] * 3)
        pipeline.flush()
        pipeline.evaluate([batch])
        trained(pipeline, [batch] * 3)

    compiled()
    before = tensors()
    for _ in range(3):
        compiled()
    assert tensors() == before

"""Parts of a pipeline on engines of their own: eager's losses, what a build keeps of them, and what is refused."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import pytest
import torch
from cached import cuts, lowered
from engines import needs
from small_models import CASES
from torch import nn

import fxpipe
from fxpipe.builds.build import Build
from fxpipe.engines.attach import CheckedPart
from fxpipe.engines.kept_files import DIGEST
from fxpipe.errors import BackendError
from fxpipe.plan.build_folder import ENGINES

STEPS = 20


def momentum(named: list[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.02, momentum=0.9)


def trained(build: Build, name: str, backend: str | None, **options: object) -> list[float]:
    pipeline = build.local(optimizer=momentum, backend=backend, **options)  # type: ignore[arg-type]
    return pipeline.run(CASES[name].batches(STEPS))


def close(found: list[float], expected: list[float]) -> bool:
    return len(found) == len(expected) and all(abs(f / e - 1) <= 1e-4 for f, e in zip(found, expected, strict=True))


@functools.cache
def mixed() -> Build:
    """Worker 0 forward in onnxruntime and backward in eager; worker 1 the other way round; worker 2 all eager.

    The plan is told after the compile, so that no more than the two parts are translated.
    """
    build = lowered("gpt-dropout", workers=3, **cuts(CASES["gpt-dropout"], 3, 1))
    engines = (("onnxruntime", "eager"), ("eager", "onnxruntime"), ("eager", "eager"))
    stages = tuple(dataclasses.replace(s, engines=e) for s, e in zip(build.plan.stages, engines, strict=True))
    return dataclasses.replace(build, plan=build.plan.with_step(stages=stages))


def test_a_mixed_pipeline_trains_as_eager() -> None:
    needs("onnxruntime")
    assert close(trained(mixed(), "gpt-dropout", None), trained(mixed(), "gpt-dropout", "eager"))


@pytest.mark.slow
def test_engines_stay_in_the_plan_and_in_the_build(tmp_path: Path) -> None:
    needs("onnxruntime")
    build = lowered("gpt", workers=2, backend="onnxruntime", **cuts(CASES["gpt"], 2, 1))
    assert {t.part for t in build.costs.engines} == {f"stage_{k}.{f}" for k in (0, 1) for f in ("forward", "backward")}
    folder = tmp_path / "build"
    build.save(folder)
    made = {p.name: p.read_bytes() for p in (folder / ENGINES).iterdir()}
    assert sum(name.endswith(DIGEST) for name in made) == len(made) - 4 == 4
    loaded = fxpipe.load(folder)
    assert [s.engines for s in loaded.plan.stages] == [("onnxruntime", "onnxruntime")] * 2
    assert loaded.costs.engines == build.costs.engines
    pipeline = loaded.local(optimizer=momentum)
    assert all(isinstance(e.stages[0].functions["F"], CheckedPart) for e in pipeline.executors)
    pipeline.run(CASES["gpt"].batches(2))
    assert {p.name: p.read_bytes() for p in (folder / ENGINES).iterdir()} == made
    build.save(folder)  # replaces a build with engines


def test_an_engine_that_computes_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    needs("onnxruntime")
    from fxpipe.engines import onnxruntime as ort

    call = ort.Session.__call__

    def wrong(self, inputs):  # type: ignore[no-untyped-def]
        outputs = list(call(self, inputs))
        outputs[0] = outputs[0] * 1.001
        return outputs

    monkeypatch.setattr(ort.Session, "__call__", wrong)
    with pytest.raises(BackendError, match="onnxruntime does not compute what eager PyTorch computes") as caught:
        trained(mixed(), "gpt-dropout", None)
    assert "stage_0.forward" in str(caught.value)


@pytest.mark.slow
def test_a_gradient_that_is_rounding_alone_is_no_error(tmp_path: Path) -> None:
    """That of a bias before a batch norm: its terms cancel, and eager's sum is farther off than onnxruntime's."""
    needs("onnxruntime")
    from fxpipe.export.stages import export

    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16))
    batch = (torch.randn(32, 3, 48, 48), torch.randn(32, 16, 44, 44))

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    build = fxpipe.compile(model, loss, batch, workers=1, cost="analytic", backend="onnxruntime")
    assert all(t.error is not None and t.error <= 1e-4 for t in build.costs.engines)
    told: list[str] = []
    found = export(build, tmp_path / "onnx", batch, warn=told.append)
    assert [(file.name, file.worst) for file in found if file.error > 1e-4] == [], told

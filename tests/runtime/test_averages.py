"""Averaged weights: exactly torch's AveragedModel over the whole model; hooks that give averages of their own."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from evaluated import build_of, write_evaluated
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fxpipe
from fxpipe.errors import FxpipeError, RunError, TaskError
from fxpipe.plan.build_folder import read_plan
from fxpipe.runtime.options import RunOptions
from fxpipe.runtime.process.start import run_local
from fxpipe.task.evaluate_weights import evaluate
from fxpipe.task.model_file import load_task

WIDTH, STEPS, DECAY = 6, 5, 0.7


class Net(nn.Module):
    """A tied weight, one that is not trained, and a batch norm with statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.middle, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight
        self.middle.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(self.norm(self.first(x)))))


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def batches() -> list[Any]:
    torch.manual_seed(1)
    return [(torch.randn(8, WIDTH), torch.randn(8, WIDTH)) for _ in range(STEPS)]


def model() -> Net:
    torch.manual_seed(0)
    return Net()


def build(workers: int = 2, **options: Any) -> fxpipe.Build:
    return fxpipe.compile(model(), loss, batches()[0], workers=workers, cost="analytic", microbatches=1, **options)


def adamw(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in named], lr=0.05)


def eager(optimizer: Callable[[Any], torch.optim.Optimizer]) -> tuple[Net, AveragedModel, torch.optim.Optimizer]:
    trained = model()
    averaged = AveragedModel(trained, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    made = optimizer([(n, p) for n, p in trained.named_parameters() if p.requires_grad])
    for batch in batches():
        made.zero_grad()
        loss(trained, batch).backward()
        made.step()
        averaged.update_parameters(trained)
    return trained, averaged, made


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def asgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.ASGD([p for _, p in named], lr=0.05, t0=0)


def of_asgd(optimizer: torch.optim.Optimizer, named: Any) -> dict[str, Tensor]:
    return {name: optimizer.state[p]["ax"] for name, p in named}


def test_what_an_optimizer_keeps_of_its_own() -> None:
    pipeline = build(3, schedule="1f1b").local(optimizer=asgd, averaged=of_asgd)
    pipeline.run(batches())
    trained, _, made = eager(asgd)
    named = [(n, p) for n, p in trained.named_parameters() if p.requires_grad]
    kept = of_asgd(made, named)
    expected = {**trained.state_dict(), **kept, "last.weight": kept["first.weight"]}
    found = pipeline.averaged_state_dict()
    same(found, expected)
    assert not torch.equal(found["middle.weight"], trained.middle.weight)


class InPlaceOfTheWeights(torch.optim.SGD):
    """As schedule-free optimizers: to evaluate, averages are put in place of the weights."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for p in self.param_groups[0]["params"]:
            mean = self.state[p].setdefault("mean", p.detach().double())
            mean.lerp_(p.detach().double(), 0.3)

    def eval(self, named: Any, swap: bool) -> dict[str, Tensor]:
        for _, p in named:
            if swap:
                p.data = self.state[p]["mean"].to(p.dtype)
            else:
                p.copy_(self.state[p]["mean"])
        return dict(named)


@pytest.mark.parametrize("swap", [False, True])
def test_averages_in_place_of_the_weights(swap: bool) -> None:
    pipeline = build(schedule="1f1b").local(
        optimizer=lambda named: InPlaceOfTheWeights([p for _, p in named], lr=0.1),
        averaged=lambda made, named: made.eval(named, swap),
    )
    pipeline.run(batches())
    weights = pipeline.state_dict()
    found = pipeline.averaged_state_dict()
    same(pipeline.state_dict(), weights)
    assert not torch.equal(found["middle.weight"], weights["middle.weight"])
    assert found["middle.weight"].dtype == torch.float32
    pipeline.run(batches())
    same(pipeline.averaged_state_dict(), pipeline.averaged_state_dict())
    assert not torch.equal(pipeline.averaged_state_dict()["middle.weight"], found["middle.weight"]), "a copy"


def test_averages_lie_in_memory_as_the_weights() -> None:
    """The code of an evaluation was traced on these."""
    pipeline = build(schedule="1f1b").local(
        optimizer=adamw, averaged=lambda made, named: {n: p.t().contiguous().t() for n, p in named if p.dim() == 2}
    )
    pipeline.run(batches()[:1])
    assert pipeline.averaged_state_dict()["middle.weight"].is_contiguous()


def failing(made: torch.optim.Optimizer, named: Any) -> dict[str, Tensor]:
    return {name: made.state[p]["mean"] for name, p in named}


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (failing, "averaged\\(\\) raised KeyError: 'mean'"),
        (lambda made, named: None, "averaged\\(\\) returned NoneType, not a dictionary"),
        (lambda made, named: {"other": torch.ones(3)}, "do not match a parameter by name and shape: other"),
        (lambda made, named: {n: p[:1] for n, p in named if p.dim() > 1}, "do not match a parameter by name and shape"),
        (lambda made, named: dict.fromkeys((n for n, _ in named), 1.0), "do not match a parameter by name and shape"),
    ],
)
def test_what_the_hook_may_not_return(returned: Callable[..., Any], message: str) -> None:
    pipeline = build(1, schedule="1f1b").local(optimizer=adamw, averaged=returned)
    pipeline.run(batches()[:1])
    with pytest.raises(TaskError, match=message) as caught:
        pipeline.averaged_state_dict()
    assert caught.value.hint


def test_what_cannot_be_averaged_is_refused() -> None:
    made = build(1)
    for wrong in (0.0, 1.0, 1.5, float("nan")):
        with pytest.raises(FxpipeError, match="is not a number above 0 and below 1"):
            made.local(ema=wrong)
    with pytest.raises(FxpipeError, match="two averages of the weights"):
        made.local(ema=0.9, averaged=of_asgd)
    with pytest.raises(RunError, match="keeps no averages"):
        made.local().averaged_state_dict()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A build whose workers own other weights than they run, with an evaluation, and its model file."""
    folder = tmp_path_factory.mktemp("averaged")
    path = write_evaluated(folder, ("def eval_data():\n", "def eval_data():\n    torch.manual_seed(5)\n"))
    build_of(path, microbatches=2, schedule="async", policy="stash")[1].save(folder / "build", model_file=path)
    return folder


def run_of(home: Path, out: Path, **more: Any) -> RunOptions:
    return RunOptions(str(home / "build"), steps=STEPS, out=str(out), threads=1, ema=DECAY, **more)


def test_a_run_writes_and_evaluates_it(home: Path, tmp_path: Path) -> None:
    summary = run_local(run_of(home, tmp_path, schedule="1f1b"))
    weights, averages = (load_file(tmp_path / f"{name}.safetensors") for name in ("model", "ema"))
    assert weights.keys() == averages.keys()
    assert any(not torch.equal(value, averages[name]) for name, value in weights.items())
    assert summary["averaged_evaluation"].keys() == summary["evaluation"].keys()
    assert summary["averaged_evaluation"] != summary["evaluation"]
    assert json.loads((tmp_path / "run.json").read_text())["averaged_evaluation"] == summary["averaged_evaluation"]
    again = run_local(RunOptions(str(home / "build"), steps=1, out=str(tmp_path), threads=1))
    assert "averaged_evaluation" not in again
    assert not (tmp_path / "ema.safetensors").exists(), "that of an earlier run"


def test_every_evaluation_of_a_run_has_one_of_the_averages(home: Path, tmp_path: Path) -> None:
    asked = run_of(home, tmp_path / "whole", schedule="1f1b", eval_every=2)
    whole = run_local(asked)
    for row in whole["evaluations"]:
        short = run_local(replace(asked, steps=row["step"], eval_every=None, out=str(tmp_path / "short")))
        assert (row["metrics"], row["averaged"]) == (short["evaluation"], short["averaged_evaluation"])
    lines = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").open()]
    averaged = [(line["step"], line["averaged"]) for line in lines if "averaged" in line]
    assert averaged == [(row["step"], row["averaged"]) for row in whole["evaluations"]]


def test_the_evaluation_is_eagers_of_the_file(home: Path, tmp_path: Path) -> None:
    summary = run_local(run_of(home, tmp_path))
    task = load_task(next(home.glob("*.py")))
    found = evaluate(task, read_plan(home / "build"), tmp_path / "ema.safetensors")
    assert summary["averaged_evaluation"] == pytest.approx(found, rel=1e-5)


def test_the_guides_hooks_average() -> None:
    """The average of ASGD, and one that starts after 100 updates."""
    guide = (
        (Path(__file__).parents[2] / "docs" / "how-to" / "optimizers.md").read_text().split("## Averaged weights")[1]
    )
    codes = [part.split("```")[0] for part in guide.split("```python\n")[1:3]]
    made = build(2, schedule="1f1b")
    for code in codes:
        hooks: dict[str, Any] = {"torch": torch}
        exec(code, hooks)
        pipeline = made.local(optimizer=hooks["optimizer"], averaged=hooks["averaged"])
        history = []
        for batch in [*batches()] * 21:
            pipeline.step(batch)
            history.append(pipeline.state_dict()["middle.weight"])
        mean = torch.stack(history[-5:]).mean(0) if "lerp_" in code else history[-1]
        found = pipeline.averaged_state_dict()["middle.weight"]
        assert torch.allclose(found, mean, atol=1e-6) == ("lerp_" in code)
        assert found.isfinite().all()
        assert not torch.equal(found, history[-1])

"""Real architectures train as eager PyTorch does: a part of what `make zoo` checks, and the core cut in three."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import check
import pytest
import torch
from check import Row
from coverage_page import page, verdict
from families import CORE, ZOO, ZooModel
from torch import nn
from zoo_programs import MICROBATCHES, WORKERS, apart_cuts, captured_core, even_cuts

import fxpipe
from fxpipe.ir.program import Program
from fxpipe.lowering.compare_with_eager import compare_with_eager
from fxpipe.planner.cuts import Cuts

QUICK = ("gcn", "vq_vae", "squeezenet1_1", "gpt2", "retinanet_resnet50_fpn")
MORE = ("dlrm", "capsnet", "fourier_operator", "conv_lstm", "timm_lcnet")
QUICK_CORE = ("gpt2", "unet")


@pytest.mark.slow
@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)])
def test_zoo(name: str) -> None:
    entry = ZOO[name]
    if reason := entry.missing():
        pytest.skip(reason)
    row = check.check(entry)
    assert row.status == ("refused" if entry.refused else "passed"), row.reason


@pytest.mark.parametrize("choose", [even_cuts, apart_cuts])
@pytest.mark.parametrize(  # below, so that it changes last: see `captured_core`
    "name", [n if n in QUICK_CORE else pytest.param(n, marks=pytest.mark.slow) for n in CORE]
)
def test_distinct_cuts_train_as_eager(name: str, choose: Callable[[Program], Cuts], core_model: ZooModel) -> None:
    (model, loss, batch), program, numbered = captured_core(core_model.name)
    cuts = choose(numbered)
    assert cuts.forward != cuts.backward
    build = fxpipe.lower(
        program,
        workers=WORKERS,
        microbatches=MICROBATCHES,
        accept_microbatch_loss=True,
        schedule="1f1b",
        cost="analytic",
        cuts=cuts,
        split_backward=cuts.weights != cuts.backward,
    )
    agreement = compare_with_eager(build, model, loss, batch)
    assert set(agreement.gradients) == {n for n, p in model.named_parameters() if p.requires_grad}
    assert agreement.largest <= 1e-5, agreement.worst_gradient


class Faulty(nn.Module):
    """In eager mode it computes another thing than what is captured."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(6)])
        self.register_buffer("seen", torch.zeros(6))
        self.factor, self.step = 1.0, 0.1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        self.seen.add_(self.step * x.detach().mean(0))
        return x * self.factor


def _square(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch).square().mean()


FAULTY = ZooModel("faulty", Faulty, _square, lambda size: torch.randn(size, 6), kind="test")


def _changed_after_capture(monkeypatch: pytest.MonkeyPatch, **changes: float) -> None:
    lower = check._lowered

    def lowered(program: Program, cuts: Cuts) -> Any:
        for name, value in changes.items():
            setattr(made[0], name, value)
        return lower(program, cuts)

    made: list[nn.Module] = []
    monkeypatch.setattr(check, "_lowered", lowered)
    monkeypatch.setattr(check, "quiet", made.append)


def test_a_sound_model_passes_and_tells_what_it_took() -> None:
    row = check.check(FAULTY)
    assert row.status == "passed", row.reason
    assert row.nodes
    assert row.crossing
    assert row.error is not None
    assert row.error < 1e-6


@pytest.mark.parametrize(("changes", "wrong"), [({"factor": 1.01}, "the loss is off"), ({"step": 0.2}, "seen by")])
def test_a_wrong_value_is_found(monkeypatch: pytest.MonkeyPatch, changes: dict[str, float], wrong: str) -> None:
    _changed_after_capture(monkeypatch, **changes)
    row = check.check(FAULTY)
    assert row.status == "failed"
    assert "synchronous step" in row.reason
    assert wrong in row.reason


def test_a_loss_that_is_not_finite_is_found() -> None:
    batches = iter([torch.randn(4, 6)] * 4 + [torch.full((4, 6), torch.inf)] * 20)
    row = check.check(dataclasses.replace(FAULTY, batch=lambda size: next(batches)))
    assert row.status == "failed"
    assert row.reason.startswith("async"), row.reason


def test_what_is_captured_against_its_entry_fails() -> None:
    row = check.check(dataclasses.replace(FAULTY, refused=("depends", "it does not")))
    assert row.status == "failed"


def test_dropout_is_silenced_wherever_it_is_kept() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention_dropout, self.drop_path, self.layerdrop, self.rate = 0.1, 0.2, 0.3, 0.4

    own = Own()
    model = nn.Sequential(nn.Dropout2d(0.5), nn.LSTM(2, 2, 2, dropout=0.3), nn.AlphaDropout(0.2), own)
    check.quiet(model)
    assert (model[0].p, model[1].dropout, model[2].p) == (0, 0, 0)
    assert (own.attention_dropout, own.drop_path, own.layerdrop, own.rate) == (0, 0, 0, 0.4)


def test_the_table_is_whole() -> None:
    assert len(ZOO) >= 120
    assert sum(entry.random for entry in ZOO.values()) >= 10


def test_the_page_tells_failures_and_refusals_apart(tmp_path: Path) -> None:
    rows = [
        Row("a", "passed", "", 1.0, 10, 0.1, 2048, 1e-7, dropout=True),
        Row("b", "refused", "by nature"),
        Row("c", "failed", "capture: wrong"),
    ]
    kinds = {"a": "one", "b": "one", "c": "two"}
    assert verdict(rows) == ("2 of 3 (1 refused, with reasons)", False)
    assert verdict(rows[:2])[1]
    text = page(rows, kinds, {"torch": "2.13.0"})
    assert "**2 of 3 (1 refused, with reasons)**" in text
    assert "| a | passed, dropout | 1.0 | 10 | 0.1 | 2 | 1e-07 |" in text
    assert "## Failed\n\n- `c` (two): capture: wrong" in text
    assert "- `b` (one): by nature" in text

"""The check of a model finds what is wrong, and the page tells of it."""

from __future__ import annotations

import dataclasses
from typing import Any

import check
import pytest
import torch
from check import Row
from coverage_page import page, verdict
from families import ZOO, ZooModel
from torch import nn

from fxpipe.ir.program import Program
from fxpipe.planner.cuts import Cuts


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


def test_a_sound_model_passes_and_tells_what_it_took() -> None:
    row = check.check(FAULTY)
    assert row.status == "passed", row.reason
    assert row.nodes
    assert row.crossing
    assert row.error is not None
    assert row.error < 1e-6


@pytest.mark.parametrize(("changes", "wrong"), [({"factor": 1.01}, "the loss is off"), ({"step": 0.2}, "seen by")])
def test_a_wrong_value_is_found(monkeypatch: pytest.MonkeyPatch, changes: dict[str, float], wrong: str) -> None:
    lower, made = check.lowered, []

    def lowered(program: Program, cuts: Cuts) -> Any:
        for name, value in changes.items():
            setattr(made[0], name, value)
        return lower(program, cuts)

    monkeypatch.setattr(check, "lowered", lowered)
    monkeypatch.setattr(check, "quiet", made.append)
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
    assert len(ZOO) >= 439
    assert sum(entry.random for entry in ZOO.values()) >= 10


def test_the_page_tells_failures_and_refusals_apart() -> None:
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

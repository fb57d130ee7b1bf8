"""`fxpipe.fit`: what `compile` and a run make of the same objects, in processes of its own and in this one."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import fxpipe
from fxpipe.errors import FxpipeError, TaskError
from fxpipe.lowering.fit import Fitted

OPTIONS: dict[str, Any] = {"steps": 6, "cost": "analytic", "threads": 1, "progress": False}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))


def batches() -> list[Tensor]:
    return [torch.randn(12, 8, generator=torch.Generator().manual_seed(i)) for i in range(6)]


def fitted(folder: Path, **changes: Any) -> Fitted:
    scale = torch.tensor(2.0)  # what a hook holds travels with it

    def loss(net: nn.Module, x: Tensor) -> Tensor:
        return (net(x) - scale * x.sum(1, keepdim=True)).pow(2).mean()

    def optimizer(named: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for _, p in named], lr=0.01)

    data = {"eval_data": batches()[:2], "metrics": lambda net, x: {"mean": net(x).mean()}}
    made = fxpipe.fit(model(), loss, batches(), optimizer=optimizer, out=folder, **{**OPTIONS, **data, **changes})
    assert made is not None
    return made


def test_it_trains_the_callers_model_as_a_build_of_it_trains(tmp_path: Path) -> None:
    trained, summary = fitted(tmp_path, local=True)
    pipeline = fxpipe.load(tmp_path / "build").local(optimizer=lambda n: torch.optim.AdamW([p for _, p in n], lr=0.01))
    losses = [pipeline.step(batch) for batch in batches()]
    pipeline.flush()
    assert summary["losses"] == [float(loss) for loss in losses]
    own, expected = trained.state_dict(), pipeline.state_dict()
    assert own.keys() == expected.keys()
    assert all(torch.equal(own[name], expected[name]) for name in own)
    held_out = torch.stack([trained(x).mean() for x in batches()[:2]]).mean().item()
    assert summary["evaluation"]["mean"] == pytest.approx(held_out, rel=1e-5)


@pytest.mark.parametrize("local", [True, pytest.param(False, marks=[pytest.mark.slow, pytest.mark.multiproc])])
def test_a_loaders_own_generator_begins_with_the_run(local: bool, tmp_path: Path) -> None:
    """The example is read from the same loader, before."""
    rows = torch.randn(48, 8, generator=torch.Generator().manual_seed(0))

    def loader() -> DataLoader[Tensor]:
        return DataLoader(rows, batch_size=12, shuffle=True, generator=torch.Generator().manual_seed(1))

    def loss(net: nn.Module, x: Tensor) -> Tensor:
        return (net(x) - x.sum(1, keepdim=True)).pow(2).mean()

    made = fxpipe.fit(model(), loss, loader(), out=tmp_path, local=local, **{**OPTIONS, "steps": 1})
    assert made is not None
    assert made.summary["losses"][0] == pytest.approx(loss(model(), next(iter(loader()))).item(), rel=1e-6)


def test_a_smaller_last_batch_has_stages_of_its_own(tmp_path: Path) -> None:
    """It comes after the batches that are read for their shapes."""
    rows = torch.randn(12 * 10 + 6, 8, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(rows, batch_size=12)

    def loss(net: nn.Module, x: Tensor) -> Tensor:
        return (net(x) - x.sum(1, keepdim=True)).pow(2).mean()

    made = fxpipe.fit(model(), loss, loader, out=tmp_path, local=True, **{**OPTIONS, "steps": 12})
    assert made is not None
    assert made.summary["steps"] == 12
    assert fxpipe.load(tmp_path / "build").plan.shapes


@pytest.mark.multiproc
def test_processes_train_the_same_bits(tmp_path: Path) -> None:
    alone, processes = fitted(tmp_path / "alone", local=True), fitted(tmp_path / "processes")
    assert processes.summary["losses"] == alone.summary["losses"]
    assert processes.summary["evaluation"] == alone.summary["evaluation"]
    own, expected = processes.model.state_dict(), alone.model.state_dict()
    assert all(torch.equal(own[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"stepps": 3}, "no option 'stepps'"),
        ({"eval_data": iter([])}, "eval_data is a list_iterator, which gives its batches only once"),
        ({"metrics": None}, "only one of eval_data and metrics is given"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], what: str, tmp_path: Path) -> None:
    with pytest.raises(FxpipeError) as caught:
        fitted(tmp_path, local=True, **changes)
    assert what in caught.value.what


def test_what_does_not_travel_is_named(tmp_path: Path) -> None:
    file = (tmp_path / "open").open("w")
    with file, pytest.raises(FxpipeError, match="on_step cannot be sent to the worker processes: PicklingError"):
        fitted(tmp_path / "out", on_step=lambda step, loss, run: file.write(f"{loss}"))


def test_no_batch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="data has no batch"):
        fxpipe.fit(model(), lambda net, x: net(x).mean(), [], out=tmp_path, local=True)


@pytest.mark.slow
@pytest.mark.multiproc
def test_functions_may_come_from_a_module_called_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the README: processes import it by its name."""
    (tmp_path / "model.py").write_text(
        "from torch import nn\n\n\n"
        "def model():\n    return nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 1))\n\n\n"
        "def loss(net, x):\n    return (net(x) - x.sum(1, keepdim=True)).pow(2).mean()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "model", raising=False)
    users = importlib.import_module("model")
    try:
        made = fxpipe.fit(users.model(), users.loss, batches(), out=tmp_path / "out", **OPTIONS)
    finally:
        del sys.modules["model"]
    assert made is not None
    assert len(made.summary["losses"]) == 6

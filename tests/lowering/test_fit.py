"""`fxpipe.fit`: what `compile` and a run make of the same objects, in processes of its own and in this one."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import files
from torch import Tensor, nn
from torch.utils.data import DataLoader

import fxpipe
from fxpipe.errors import BuildError, FxpipeError, TaskError
from fxpipe.lowering.fit import Fitted
from fxpipe.plan.current import check_current
from fxpipe.plan.lock import locked, run_lock

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
    assert len(fxpipe.load(tmp_path / "build").plan.steps) > 1


@pytest.mark.multiproc
def test_processes_train_the_same_bits(tmp_path: Path) -> None:
    alone, processes = fitted(tmp_path / "alone", local=True), fitted(tmp_path / "processes")
    assert processes.summary["losses"] == alone.summary["losses"]
    assert processes.summary["evaluation"] == alone.summary["evaluation"]
    own, expected = processes.model.state_dict(), alone.model.state_dict()
    assert all(torch.equal(own[name], expected[name]) for name in expected)
    assert fxpipe.load(tmp_path / "alone" / "build").plan.model_file.path is None, "nothing there can be unpickled"
    build, written = tmp_path / "processes" / "build", tmp_path / "processes" / "fit" / "fitted_model.py"
    plan = fxpipe.load(build).plan
    check_current(plan, build)
    written.write_text(written.read_text() + "extra = 1\n")
    with pytest.raises(BuildError, match=r"the build is stale: since it was compiled, fitted_model.py: extra is new"):
        check_current(plan, build)


@pytest.mark.slow
@pytest.mark.multiproc
def test_one_fewer_takes_over(tmp_path: Path) -> None:
    """The workers' own compile meets the same model."""

    def on_step(step: int, loss: float, run: Any) -> None:
        time.sleep(0.01)
        if step == 30 and run.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    made = fitted(tmp_path, on_step=on_step, on_loss="replan", checkpoint_every=5, steps=40)
    assert made.summary["steps"] == 40
    assert [move["gain"] for move in made.summary["moves"]] == [None]
    assert len(made.summary["workers"]) == 1


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"stepps": 3}, "no option 'stepps'"),
        ({"eval_data": iter([])}, "eval_data is a list_iterator, which gives its batches only once"),
        ({"metrics": None}, "only one of eval_data and metrics is given"),
        (
            {"steps": -1, "stall_timeout": "x"},
            "steps=-1 is not a whole number of at least 1 or None; stall_timeout='x'",
        ),
        ({"workers": "2"}, "workers='2' is not a whole number"),
        ({"local": "no"}, "local='no' is not True or False"),
        ({"lr_scheduler": "cosine"}, "lr_scheduler is str, not a function"),
        ({"build": "elsewhere"}, "no option 'build'"),
        ({"settings": ["lr=1"]}, "no option 'settings'"),
        ({"on_loss": "replan", "checkpoint_every": 2}, "--on-loss replan starts workers again"),
        ({"local": False, "on_loss": "replan"}, "goes on from a checkpoint, and the run saves none"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], what: str, tmp_path: Path) -> None:
    with pytest.raises(FxpipeError) as caught:
        fitted(tmp_path / "out", **{"local": True, **changes})
    assert what in caught.value.what
    assert files(tmp_path) == {}


def test_the_model_and_the_folder_are_looked_at(tmp_path: Path) -> None:
    def loss(net: nn.Module, x: Tensor) -> Tensor:
        return net(x).mean()

    with pytest.raises(TaskError, match=r"the model is of type function, not a torch.nn.Module"):
        fxpipe.fit(model, loss, batches(), out=tmp_path)  # type: ignore[arg-type]
    with pytest.raises(FxpipeError, match="out=None is not a text"):
        fxpipe.fit(model(), loss, batches(), out=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("local", [True, False])
def test_a_folder_in_use_is_refused(local: bool, tmp_path: Path) -> None:
    """Also through a link to it, and before the first batch is read."""
    (tmp_path / "out").mkdir()
    (tmp_path / "link").symlink_to("out")
    with locked(run_lock(tmp_path / "out"), tmp_path / "out", "out"):
        before = files(tmp_path)
        with pytest.raises(BuildError, match="link is being written by this process, in another call"):
            fitted(tmp_path / "link", local=local)
        assert files(tmp_path) == before


SCRIPT = """
import sys
import torch
import fxpipe

try:
    fxpipe.fit(torch.nn.Linear(4, 1), lambda net, x: net(x).sum(), [torch.ones(2, 4)], out=sys.argv[1], cost="analytic")
except fxpipe.errors.FxpipeError as error:
    sys.stdout.write(f"{type(error).__name__} {error.what}\\n")  # in one piece: two processes write
"""


@pytest.mark.slow
@pytest.mark.multiproc
def test_all_processes_of_torchrun_learn_that_one_refuses(tmp_path: Path) -> None:
    (tmp_path / "fit.py").write_text(SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with locked(run_lock(tmp_path / "out"), tmp_path / "out", "out"):
        ended = subprocess.run([*torchrun, "fit.py", "out"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    said = sorted(line for line in ended.stdout.splitlines() if "Error" in line or "Refused" in line)
    assert [line.split(" on ")[0] for line in said] == [
        f"BuildError {tmp_path / 'out'} is being written by another process: {os.getpid()}",
        "PeerRefused worker 0",
    ], ended


def test_a_hook_that_fits_the_same_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="is being written by this process, in another call"):
        fitted(tmp_path, local=True, on_step=lambda step, loss, run: fitted(tmp_path, local=True))
    assert fitted(tmp_path, local=True).summary["steps"] == 6


def test_what_does_not_travel_is_named(tmp_path: Path) -> None:
    file = (tmp_path / "open").open("w")
    with file, pytest.raises(FxpipeError, match="on_step cannot be sent to the worker processes: PicklingError"):
        fitted(tmp_path / "out", on_step=lambda step, loss, run: file.write(f"{loss}"))
    assert files(tmp_path) == {"open": b""}


def test_an_error_leaves_an_earlier_fit_as_it_was(tmp_path: Path) -> None:
    def bad(net: nn.Module, x: Tensor) -> Tensor:
        raise OSError("no such thing")  # not one of writing the folder

    (tmp_path / "fit").mkdir()
    (tmp_path / "fit" / "model.pickle").write_text("earlier")
    before = files(tmp_path)
    with pytest.raises(FxpipeError, match="no such thing"):
        fxpipe.fit(model(), bad, batches(), out=tmp_path, **OPTIONS)
    assert files(tmp_path) == before


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

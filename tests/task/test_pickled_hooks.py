"""Hooks that travel as pickles: what is read is what was written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from fxpipe.errors import BuildError, TaskError
from fxpipe.task.hooks import Hooks
from fxpipe.task.model_file import load_task
from fxpipe.task.pickled_hooks import MODEL_FILE, write_hooks


def written(folder: Path) -> Path:
    scale = torch.tensor(3.0)
    hooks = Hooks(loss=lambda net, x: (scale * net(x)).sum(), train_data=lambda: [torch.ones(2, 4)], pad={"x": 0})
    write_hooks(folder, nn.Linear(4, 1), hooks)
    return folder / MODEL_FILE


def test_they_come_back(tmp_path: Path) -> None:
    task = load_task(written(tmp_path))
    net = task.model()
    assert task.hooks.pad == {"x": 0}
    assert task.hooks.optimizer is None
    assert torch.equal(task.loss(net, task.example()), 3 * net(task.example()).sum())


def test_a_compiled_one_comes_back_plain(tmp_path: Path) -> None:
    """What torch.compile returns holds what cannot be pickled."""
    squared = torch.compile(lambda y: y.square().mean(), fullgraph=True)

    @torch.compile(fullgraph=True)
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return squared(model(batch))

    write_hooks(tmp_path, nn.Linear(2, 2), Hooks(loss=loss, train_data=list))
    read = load_task(tmp_path / MODEL_FILE).loss
    assert read(torch.square, torch.full((3,), 2.0)) == 16


def test_an_error_in_one_names_the_users_line(tmp_path: Path) -> None:
    def bad(net: nn.Module) -> None:
        raise ValueError("no")  # this line

    write_hooks(tmp_path, nn.Linear(4, 1), Hooks(loss=lambda net, x: net(x).sum(), train_data=list, reset=bad))
    with pytest.raises(TaskError, match="reset\\(\\) raised ValueError: no") as caught:
        load_task(tmp_path / MODEL_FILE).reset_model(nn.Linear(4, 1))
    assert "test_pickled_hooks.py:" in str(caught.value.where)
    assert str(caught.value.where).endswith(': raise ValueError("no")  # this line')


def test_what_hooks_share_they_go_on_sharing(tmp_path: Path) -> None:
    settings = {"factor": 1.0}

    def on_step(step: int, loss: float, run: object) -> None:
        settings["factor"] = 0.5

    hooks = Hooks(loss=lambda net, x: settings["factor"] * net(x).sum(), train_data=list, on_step=on_step)
    write_hooks(tmp_path, nn.Linear(4, 1), hooks)
    read, x = load_task(tmp_path / MODEL_FILE).hooks, torch.ones(2, 4)
    net = nn.Linear(4, 1)
    assert read.loss is not None
    assert read.on_step is not None
    before = read.loss(net, x)
    read.on_step(1, 0.0, None)
    assert read.loss(net, x) == 0.5 * before


@pytest.mark.parametrize("name", ["model", "hooks"])
def test_a_changed_one_is_not_read(name: str, tmp_path: Path) -> None:
    file, pickle = written(tmp_path), tmp_path / f"{name}.pickle"
    ran = tmp_path / "ran"
    pickle.write_bytes(f"cpathlib\nPath.touch\n(cpathlib\nPath\n(V{ran}\ntRtR.".encode())
    with pytest.raises(BuildError, match=f"{name}.pickle changed after fxpipe.fit"):
        load_task(file)
    assert not ran.exists()
    pickle.unlink()
    with pytest.raises(BuildError, match=f"{name}.pickle changed after fxpipe.fit"):
        load_task(file)

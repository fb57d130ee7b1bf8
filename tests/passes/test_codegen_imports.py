"""A stage imports the installed modules that define the custom operators that it calls."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fxpipe

OPERATORS = """
import torch

@torch.library.custom_op("fxpipe_installed::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x

doubled.register_fake(torch.empty_like)
doubled.register_autograd(lambda ctx, gradient: 2 * gradient)
"""


class Doubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.fxpipe_installed.doubled(self.inner(x))


def mean(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).mean()


def test_the_module_of_a_custom_operator_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "site-packages" / "fxpipe_installed"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "operators.py").write_text(OPERATORS)
    monkeypatch.syspath_prepend(folder.parent)
    importlib.import_module("fxpipe_installed.operators")
    try:
        build = fxpipe.compile(
            nn.Sequential(nn.Linear(4, 4), Doubled()),
            mean,
            torch.randn(2, 4),
            cost="analytic",
            forward_at=["1"],
            backward_at=["1"],
        )
    finally:
        for name in ("fxpipe_installed.operators", "fxpipe_installed"):
            del sys.modules[name]
    imports = "import fxpipe_installed.operators  # defines operators that are called below"
    assert [imports in build.files[f"stage_{k}.py"] for k in range(2)] == [False, True]

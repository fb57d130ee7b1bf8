"""The emitted text, byte for byte, and that it computes what it says."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import golden_model
import pytest
import torch

import fxpipe
from fxpipe.builds.build import Build
from fxpipe.lowering.compare_with_eager import compare_with_eager
from fxpipe.tracing.torch_versions import standing

GOLDEN = Path(__file__).parent / "golden"
CUTS = {"forward_at": ["hidden"], "backward_at": ["head"]}


def build() -> tuple[golden_model.Golden, Build]:
    torch.manual_seed(0)
    model = golden_model.Golden()
    made = fxpipe.compile(model, golden_model.loss, golden_model.batch(), workers=2, cost="analytic", **CUTS)
    return model, made


@pytest.mark.skipif(standing(torch.__version__) != "yes", reason="another torch may trace other operators")
@pytest.mark.parametrize("name", ["stage_0.py", "stage_1.py"])
def test_emitted_stages_are_the_golden_ones(name: str, golden: Callable[[Path, str], None]) -> None:
    _, made = build()
    golden(GOLDEN / name, made.files[name])


def test_the_golden_stages_agree_with_eager() -> None:
    model, made = build()
    assert compare_with_eager(made, model, golden_model.loss, golden_model.batch()).largest < 1e-6


@pytest.mark.slow
def test_another_process_emits_the_same_bytes() -> None:
    """Hash seeds and import order must not show."""
    _, made = build()
    script = "import test_codegen as t; m, b = t.build(); print(b.plan.to_json()); print(b.files['stage_1.py'])"
    folders = os.pathsep.join([str(Path(__file__).parent), str(Path(golden_model.__file__).parent)])
    environment = {**os.environ, "PYTHONPATH": folders, "PYTHONHASHSEED": "77"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == f"{made.plan.to_json()}\n{made.files['stage_1.py']}\n"


def test_stages_drop_values_after_their_last_use() -> None:
    _, made = build()
    for source in made.files.values():
        for function in (n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef)):
            dropped: set[str] = set()
            for statement in function.body:
                if isinstance(statement, ast.Delete):
                    dropped |= {t.id for t in statement.targets if isinstance(t, ast.Name)}
                    continue
                read = {n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
                assert not read & dropped
            assert dropped


def test_no_machine_path_is_in_a_build() -> None:
    _, made = build()
    text = made.plan.to_json() + "".join(made.files.values())
    assert str(Path(golden_model.__file__).parent) not in text
    assert "golden_model.py:" in text


def test_saved_values_have_one_name() -> None:
    """Whatever their modules are called."""
    model = torch.nn.Sequential()
    model.add_module("LayerNorm", torch.nn.LayerNorm(4))
    model.add_module("OutHead", torch.nn.Linear(4, 2))
    made = fxpipe.compile(model, lambda m, x: m(x).square().mean(), torch.randn(3, 4), workers=1, cost="analytic")
    stage = made.plan.stages[0]
    assert any("LayerNorm" in name for name in stage.forward.saved)
    assert stage.forward.saved == stage.backward.saved

"""What onnxruntime cannot run is refused in words: the operator and the module; `auto` leaves it out for that part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cached import cuts
from engines import needs
from small_models import CASES
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe
from fxpipe.errors import BackendError
from fxpipe.lowering import choose_engines as choose
from fxpipe.plan.cost_records import EngineTime

OPERATOR = "aten.grid_sampler_2d_backward.default"
BATCH = (torch.randn(8, 3, 8, 8), torch.randint(0, 5, (8,)))


class Warp(nn.Module):
    """Moves pixels by a grid of their own: ONNX has it, but not its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Linear(4 * 64, 2)

    def forward(self, x: Tensor) -> Tensor:
        turn = torch.eye(2).expand(len(x), 2, 2)
        where = torch.cat([turn, self.shift(x.flatten(1)).unsqueeze(-1)], -1)
        grid = F.affine_grid(where, list(x.shape), align_corners=False)
        return F.grid_sample(x, grid, align_corners=False)


def warping() -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module("stem", nn.Conv2d(3, 4, 3, padding=1))
    model.add_module("warp", Warp())
    model.add_module("head", nn.Sequential(nn.Flatten(), nn.Linear(4 * 64, 5)))
    return model, lambda m, batch: F.cross_entropy(m(batch[0]), batch[1]), BATCH


WHERE = {"workers": 2, "cost": "analytic", "forward_at": ["head"], "backward_at": ["head"]}


@pytest.fixture
def only_onnxruntime(monkeypatch: pytest.MonkeyPatch) -> None:
    needs("onnxruntime")
    monkeypatch.setattr(choose, "MEASURED", ("eager", "onnxruntime"))
    monkeypatch.setattr(choose, "BUDGET", 0.0)


def reasons(times: tuple[EngineTime, ...]) -> dict[str, str]:
    return {t.part: t.reason for t in times if t.engine == "onnxruntime"}


@pytest.mark.slow
def test_an_operator_that_onnx_lacks_is_named_with_its_module(tmp_path: Path) -> None:
    needs("onnxruntime")
    from fxpipe.errors import ExportError
    from fxpipe.export.stages import export

    build = fxpipe.compile(*warping(), **WHERE)
    with pytest.raises(BackendError) as caught:
        build.local(backend="onnxruntime")
    with pytest.raises(ExportError, match=r"stage_0\.backward: ") as refused:
        export(build, tmp_path / "onnx", BATCH)
    for error in (caught, refused):
        text = str(error.value)
        assert OPERATOR in text
        assert "stage_0.py:" in text
        assert "warp" in text
        assert "test_refusals.py:" in text
    assert not (tmp_path / "onnx").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("only_onnxruntime")
def test_auto_leaves_it_out_for_that_part_alone() -> None:
    build = fxpipe.compile(*warping(), backend="auto", **WHERE)
    found = reasons(build.costs.engines)
    refused = found.pop("stage_0.backward")
    assert OPERATOR in refused
    assert "stage_0.py:" in refused
    assert "warp" in refused
    assert "\n" not in refused
    assert found == {"stage_0.forward": "", "stage_1.forward": "", "stage_1.backward": ""}
    assert build.plan.stages[0].engines[1] == "eager"
    assert len(build.local().run([BATCH])) == 1


@pytest.mark.usefixtures("only_onnxruntime")
@pytest.mark.parametrize("name", [pytest.param("gpt", marks=pytest.mark.slow), "conv"])
def test_bfloat16_is_left_out_on_the_cpu(name: str) -> None:
    case = CASES[name]
    options = {"autocast": "bf16", "cost": "analytic", "workers": 2, **cuts(case, 2, 1)}
    step = (case.make(), case.loss, case.batches(1)[0])
    build = fxpipe.compile(*step, backend="auto", **options)
    assert set(reasons(build.costs.engines).values()) == {
        "onnxruntime's CPU provider has too few operators in bfloat16"
    }
    assert {s.engines for s in build.plan.stages} == {("eager", "eager")}
    for refused in (
        lambda: build.local(backend="onnxruntime"),
        lambda: fxpipe.compile(*step, backend="onnxruntime", **options),
    ):
        with pytest.raises(BackendError, match="too few operators in bfloat16\n  hint: compile a model in float32"):
            refused()

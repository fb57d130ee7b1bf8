"""Random module graphs with skips, random cuts of every kind: the stages still compute what eager computes."""

from __future__ import annotations

from typing import Any

import torch
from fxpipe.passes.fold import Fold
from fxpipe.passes.units import Units
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from random_cuts import legal_cuts
from torch import Tensor, nn

import fxpipe
from fxpipe.ir.transform import run_passes
from fxpipe.lowering.agreement import compare_with_eager
from fxpipe.task.batch import split

WIDTH = 4


class RandomNet(nn.Module):
    """Node i reads one or two earlier values; some nodes share a layer with an earlier one."""

    def __init__(self, plan: list[tuple[str, int, int, int]]) -> None:
        super().__init__()
        self.plan = plan
        self.nodes = nn.ModuleList()
        for i, (kind, _, _, shared) in enumerate(plan):
            layer: nn.Module = {
                "linear": lambda: nn.Linear(WIDTH, WIDTH),
                "norm": lambda: nn.LayerNorm(WIDTH),
                "batchnorm": lambda: nn.BatchNorm1d(WIDTH),
                "dropout": lambda: nn.Dropout(0.3),
                "tied": lambda: nn.Linear(WIDTH, WIDTH),
            }[kind]()
            earlier = [j for j in range(i) if plan[j][0] in ("linear", "tied")]
            if kind == "tied" and earlier:
                other = self.nodes[earlier[shared % len(earlier)]]
                assert isinstance(layer, nn.Linear)
                layer.weight = other.weight  # type: ignore[assignment]
            self.nodes.append(layer)

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for layer, (_, a, b, _) in zip(self.nodes, self.plan, strict=True):
            first, second = values[-1 - a % len(values)], values[-1 - b % len(values)]
            values.append(torch.tanh(layer(first)) + 0.5 * second)
        return values[-1]


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


KINDS = st.sampled_from(["linear", "norm", "batchnorm", "dropout", "tied"])
NODES = st.lists(st.tuples(KINDS, st.integers(0, 5), st.integers(0, 5), st.integers(0, 5)), min_size=5, max_size=9)


@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    phases=(Phase.explicit, Phase.generate),  # shrinking would take minutes: each example is a capture
    suppress_health_check=[HealthCheck.too_slow],
)
@given(plan=NODES, data=st.data())
def test_random_graphs_agree_with_eager(plan: list[tuple[str, int, int, int]], data: st.DataObject) -> None:
    plan = [("linear", 0, 0, 0), *plan, ("linear", 0, 1, 0)]
    torch.manual_seed(0)
    model = RandomNet(plan)
    batch = (torch.randn(6, WIDTH), torch.randn(6, WIDTH))
    workers = data.draw(st.integers(2, 4), label="workers")
    microbatches = data.draw(st.sampled_from([1, 2]), label="microbatches")
    paths = reached(model, batch)
    workers = min(workers, len(paths))
    positions = st.lists(st.integers(1, len(paths) - 1), min_size=workers - 1, max_size=workers - 1, unique=True).map(
        sorted
    )
    forward, backward = (data.draw(positions, label=label) for label in ("forward cuts", "backward cuts"))
    program = fxpipe.capture(model, loss, split(batch, microbatches)[0])
    options: dict[str, Any] = {"microbatches": microbatches, "schedule": "gpipe", "cost": "analytic"}
    at = {"forward_at": [paths[p] for p in forward], "backward_at": [paths[p] for p in backward]}
    build = fxpipe.lower(program, workers=workers, **options, **at)
    assert compare_with_eager(build, model, loss, batch).largest < 1e-5
    cuts = legal_cuts(run_passes(program, [Fold(), Units()]), workers, f"{forward}/{backward}")
    build = fxpipe.lower(program, workers=workers, cuts=cuts, **options)
    assert compare_with_eager(build, model, loss, batch).largest < 1e-5, cuts


def reached(model: RandomNet, batch: tuple[Tensor, Tensor]) -> list[str]:
    """Paths of the modules that can be cut at, in order."""
    program = run_passes(fxpipe.capture(model, loss, batch), [Fold(), Units()])
    return [path for path in dict.fromkeys(program.units) if path.startswith("nodes.")]

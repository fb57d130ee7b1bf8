"""defer: weight gradients get a phase of their own, and their stage a function."""

from __future__ import annotations

import torch
from program_text import placed
from torch import nn
from two_layers import two_layers

import fxpipe
from fxpipe.ir.program import info
from fxpipe.ir.transform import run_passes
from fxpipe.passes.comm import Comm
from fxpipe.passes.defer import Defer
from fxpipe.passes.split import Split


def test_what_makes_weight_gradients_alone_comes_last() -> None:
    before = placed(two_layers(), 2)
    after = run_passes(before, [Defer()])
    found = [(node.name, info(node).phase) for node in after]
    weights = [name for name, phase in found if phase == "W"]
    assert weights == [node.name for node in before if info(node).weight]
    assert [name for name, _ in found[-len(weights) :]] == weights
    assert after.phases == ("F", "B", "W")
    for expected, made in zip(before.run(), after.run(), strict=True):
        assert torch.equal(expected, made)


def test_backward_leaves_what_weight_gradients_read() -> None:
    split = run_passes(placed(two_layers(), 2), [Defer(), Comm(), Split()])
    for stage in split.stages:
        forward, backward, weights = stage.parts.values()
        assert forward.spec.saved == backward.spec.saved
        assert backward.spec.deferred == weights.spec.deferred
        assert not backward.spec.gradients
    first, second = split.stages
    assert first.parts["B"].spec.deferred == ("batch", "d__1_tanh_backward")
    assert second.parts["B"].spec.deferred == ("_1_tanh", "d_expand")
    assert first.parts["W"].spec.gradients == ("0.weight",)


class Wide(nn.Module):
    """A convolution, whose backward makes both gradients, and a norm, whose backward cannot be taken apart."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(6, 6)
        self.conv = nn.Conv1d(1, 2, 3)
        self.norm = nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(self.enter(x).tanh()[:, None]))


def test_the_stage_has_three_functions() -> None:
    build = fxpipe.compile(
        Wide(), lambda m, x: m(x).square().mean(), torch.randn(2, 6), workers=1, schedule="zb-h1", cost="analytic"
    )
    (stage,) = build.plan.stages
    code = build.files["stage_0.py"]
    assert [line for line in code.splitlines() if line.startswith("def ")] == [
        "def forward(weights, buffers, batch, comm):",
        "def backward(weights, buffers, saved, comm):",
        "def weights(weights, buffers, deferred, comm):",
    ]
    _, backward, weights = code.split("\ndef ")[1:]
    assert "saved.clear()" in backward
    assert "deferred.clear()" in weights
    assert [part.count("aten.convolution_backward.default") for part in (backward, weights)] == [1, 1]
    assert "aten.native_layer_norm_backward.default" in backward
    assert "aten.native_layer_norm_backward.default" not in weights
    assert stage.weights is not None
    assert set(stage.gradients) == {name for p in build.plan.parameters for name in p.names}
    assert stage.gradients == stage.weights.gradients


def test_what_another_worker_adds_up_stays_in_backward() -> None:
    """A tied weight: its gradient is made on two workers, and worker 0 adds it up."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter = nn.Embedding(5, 4)
            self.middle = nn.Linear(4, 4)
            self.leave = nn.Linear(4, 5, bias=False)
            self.leave.weight = self.enter.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.leave(self.middle(self.enter(x)).tanh())

    build = fxpipe.compile(
        Tied(), lambda m, x: m(x).square().mean(), torch.randint(5, (4,)), workers=2, schedule="zb-h1",
        microbatches=2, cost="analytic", forward_at=["leave"],
    )  # fmt: skip
    partial = [edge for edge in build.plan.edges if edge.dst_phase == "W"]
    assert [(edge.src, edge.src_phase, edge.dst, edge.kind) for edge in partial] == [(1, "B", 0, "gradient")]
    sends = [line for line in build.files["stage_1.py"].splitlines() if "comm.send" in line]
    assert partial[0].name in sends[-1]
    assert build.plan.stages[1].gradients == ()

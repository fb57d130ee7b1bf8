"""Which backward nodes make weight gradients alone."""

from __future__ import annotations

import pytest
import torch
from cached import captured
from covering import covering
from random_cuts import numbered
from small_models import CASES
from torch import fx, nn

import fxpipe
from fxpipe.errors import VerifyError
from fxpipe.ir.law import verify
from fxpipe.ir.program import Program, info
from fxpipe.ir.transform import run_passes
from fxpipe.passes.cost import Cost
from fxpipe.passes.fold import Fold
from fxpipe.passes.split_backward import SplitBackward
from fxpipe.passes.units import Units

aten = torch.ops.aten


def weight_nodes(program: Program) -> set[str]:
    return {n.name for n in program if info(n).weight}


def calls(nodes: dict[fx.Node, None]) -> list[fx.Node]:
    return [n for n in nodes if n.op == "call_function"]


@pytest.mark.parametrize(("name", "split"), covering(CASES, [False, True], strength=1))
def test_nothing_but_weight_gradients_comes_of_them(name: str, split: bool) -> None:
    program = run_passes(captured(name)[2], [Fold(), *([SplitBackward()] if split else []), Units()])
    assert weight_nodes(program)
    gradients = set(program.gradients().values())
    for node in program:
        if info(node).weight:
            assert info(node).phase == "B"
            assert all(info(user).weight for user in node.users if user.op == "call_function")
            assert calls(node.users) or node in gradients
    for node in program:  # and B does serve an earlier unit, or is one operator with what does
        if info(node).phase == "B" and not info(node).weight and node not in gradients:
            assert any(not info(user).weight or info(user).unit < info(node).unit for user in calls(node.users)), node


def test_of_a_linear_layer_two_products_and_a_sum_are_told_apart() -> None:
    program = numbered("function")
    middle = [n for n in program if info(n).phase == "B" and info(n).module == "layers.3"]
    assert [n.name for n in middle if not info(n).weight] == ["d_layers_3_mm"]
    weight = [n.target for n in middle if info(n).weight]
    assert weight == [aten.t.default, aten.mm.default, aten.sum.dim_IntList, aten.view.default]
    first = [n for n in program if info(n).phase == "B" and info(n).module == "layers.0" and "_mm" in n.name]
    assert all(info(n).weight for n in first), "nothing stands before the first layer"


def test_gradients_of_a_tied_weight_and_their_sum_are_weight_gradients() -> None:
    program = numbered("gpt")
    total = program.gradients()["tok_weight"]
    assert total.target is aten.add.Tensor
    assert info(total).weight
    assert all(info(n).weight for n in total.all_input_nodes)
    assert {info(n).unit for n in total.all_input_nodes} == {0, max(info(n).unit for n in total.all_input_nodes)}


def test_an_operator_that_makes_both_is_backward_with_all_that_works_on_its_elements() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.scale = nn.Parameter(torch.ones(4))
            self.last = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = nn.functional.layer_norm(self.first(x), (4,), self.scale.exp())
            return self.last(x)

    captured_program = fxpipe.capture(Scaled(), lambda m, x: m(x).square().mean(), torch.randn(3, 4))
    program = run_passes(captured_program, [Fold(), Units()])
    gradients = program.gradients()
    scale = gradients["scale"]
    assert not info(scale).weight
    assert not any(info(n).weight for n in scale.all_input_nodes if n.op == "call_function" and info(n).phase == "B")
    assert all(info(gradients[n]).weight for n in ("first_weight", "first_bias", "last_weight", "last_bias"))


def test_the_law_knows_a_node_that_is_wrongly_marked() -> None:
    program = Cost()(numbered("function"))
    verify(program)
    wrong = program.copy()
    node = next(n for n in wrong if n.name == "d_layers_3_mm")
    info(node).weight = True
    with pytest.raises(VerifyError, match="d_layers_3_mm, which makes only weight gradients"):
        verify(wrong)
    info(node).weight = False
    info(next(n for n in wrong if info(n).phase == "F")).weight = True
    with pytest.raises(VerifyError, match="but is forward"):
        verify(wrong)

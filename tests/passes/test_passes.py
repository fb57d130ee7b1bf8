"""Every pass keeps what the program computes, and keeps the program it was given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cached import captured, cuts
from fxpipe.passes import Options, default_passes
from fxpipe.passes.cost import Cost
from fxpipe.passes.cut import Cut
from fxpipe.passes.fold import Fold
from fxpipe.passes.units import Units
from small_models import CASES

from fxpipe.errors import CutError
from fxpipe.ir.printer import print_program
from fxpipe.ir.program import info
from fxpipe.ir.transform import Applied, run_passes
from fxpipe.ir.wire import is_recv, is_send


@pytest.mark.parametrize("shift", [0, 1, -1])
@pytest.mark.parametrize("name", CASES)
def test_no_pass_changes_a_bit_of_what_is_computed(name: str, shift: int) -> None:
    case, _, program = captured(name)
    options = Options(workers=3, cost="analytic", **cuts(case, 3, shift))
    torch.manual_seed(0)
    expected = program.run()
    before = print_program(program)

    def same(applied: Applied) -> None:
        torch.manual_seed(0)
        for found, wanted in zip(applied.program.run(), expected, strict=True):
            assert torch.equal(found, wanted), applied.step.name

    run_passes(program, default_passes(options), [same])
    assert print_program(program) == before


def test_measured_costs_are_positive_and_leave_the_generator_alone() -> None:
    _, _, program = captured("gpt-dropout")
    torch.manual_seed(3)
    state = torch.get_rng_state()
    measured = run_passes(program, [Fold(), Units(), Cost(repeats=2)])
    assert torch.equal(torch.get_rng_state(), state)
    assert all(info(n).seconds > 0 for n in measured)
    assert all(info(n).bytes is not None for n in measured)


def test_backward_units_never_run_towards_later_units() -> None:
    for name in CASES:
        _, _, program = captured(name)
        program = run_passes(program, [Fold(), Units()])
        for node in program:
            for source in node.all_input_nodes:
                if source.op == "call_function" and info(source).phase == info(node).phase:
                    early, late = (source, node) if info(node).phase == "F" else (node, source)
                    assert info(early).unit <= info(late).unit, (name, source, node)


def test_every_edge_has_one_send_and_one_recv() -> None:
    case, _, program = captured("unet")
    wired = run_passes(program, default_passes(Options(workers=3, cost="analytic", **cuts(case, 3, 1))))
    sends = [wired.wires[n.name] for n in wired if is_send(n)]
    recvs = [wired.wires[n.name] for n in wired if is_recv(n)]
    assert sorted(e.name for e in sends) == sorted(e.name for e in recvs)
    assert len({e.name for e in sends}) == len(sends)
    jumps = [e for e in sends if e.kind == "activation" and e.dst - e.src == 2]
    assert jumps, "a skip over a stage goes straight to its reader"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"forward_at": ("layers.9",)}, "no module of that path runs in the forward pass, did you mean 'layers"),
        ({"forward_at": ("layers.3", "layers.1")}, "2 workers need 1 cuts, --fp-cut gives 2"),
        ({"workers": 3, "forward_at": ("layers.3", "layers.1")}, "--fp-cut layers.1 does not come after layers.3"),
        ({"workers": 3, "forward_at": ("layers.2",) * 2}, "--fp-cut layers.2 does not come after layers.2"),
        ({"workers": 3, "forward_at": ("layers.1",) * 2, "backward_at": ("layers.2", "layers.1")}, "--bp-cut layers.1"),
        ({"forward_at": ("layers.0",)}, "worker 0 would have nothing to do"),
        ({"workers": 500}, "500 workers, but the step has only"),
    ],
)  # fmt: skip
def test_impossible_cuts_are_explained(options: dict[str, Any], message: str) -> None:
    program = run_passes(captured("function")[2], [Fold(), Units(), Cost("analytic")])
    with pytest.raises(CutError) as caught:
        Cut(**options)(program)
    assert message in str(caught.value)


def test_a_cut_may_not_part_a_buffer_from_its_update() -> None:
    class Shared(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
            self.norm = torch.nn.BatchNorm1d(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.b(self.norm(self.a(x))))

    import fxpipe

    program = fxpipe.capture(Shared(), lambda m, x: m(x).square().mean(), torch.randn(8, 4))
    with pytest.raises(CutError, match="parts the readers of buffer norm_running_mean"):
        fxpipe.lower(program, workers=2, cost="analytic", forward_at=["b"])
    build = fxpipe.lower(program, workers=2, cost="analytic")  # finds a place where it may
    assert build.plan.stages[0].forward_units[1] > 0

"""keep_layouts: no program depends on a kernel's layout that is not certain, and a buffer keeps its own."""

from __future__ import annotations

import pytest
import torch
from program_text import text
from torch import nn
from two_layers import two_layers
from wrong_layouts import WRONG, Differs, Fails, Middle, Remembers, series, squared

import fxpipe
from fxpipe.ir.program import Program, value
from fxpipe.ir.transform import run_passes
from fxpipe.lowering.compare_with_eager import compare_with_eager
from fxpipe.lowering.eager_step import eager_step
from fxpipe.passes.fold import Fold
from fxpipe.passes.keep_layouts import KeepLayouts


def folded(make: type[Middle]) -> Program:
    torch.manual_seed(0)
    return run_passes(fxpipe.capture(make(), squared, series()), [Fold()])


def lines(program: Program, *names: str) -> list[str]:
    return [line for line in text(program).splitlines() if line.startswith(names)]


def test_an_uncertain_value_is_laid_out_as_it_was_captured() -> None:
    found = lines(run_passes(folded(Differs), [KeepLayouts()]), "turned", "tanh", "raw")
    assert found == [
        "turned = torch.ops.fxpipe_test.turned.default(transpose)  # f32[4, 8, 5]",
        "turned_kept = aten.contiguous.default(turned)  # f32[4, 8, 5]",
        "tanh = aten.tanh.default(turned_kept)  # f32[4, 8, 5]",
        "raw = torch.ops.fxpipe_test.raw.default(tanh)  # f32[4, 8, 5]",
        "raw_kept = aten.contiguous.default(raw)  # f32[4, 8, 5]",
    ]


def test_dimensions_keep_the_order_in_which_they_were_foretold() -> None:
    found = lines(run_passes(folded(Fails), [KeepLayouts()]), "packed", "tanh")
    assert found == [
        "packed = torch.ops.fxpipe_test.packed.default(transpose)  # f32[4, 8, 5]",
        "packed_in_order = aten.permute.default(packed, [0, 2, 1])  # f32[4, 5, 8]",
        "packed_kept = aten.contiguous.default(packed_in_order)  # f32[4, 5, 8]",
        "packed_kept_back = aten.permute.default(packed_kept, [0, 2, 1])  # f32[4, 8, 5]",
        "tanh = aten.tanh.default(packed_kept_back)  # f32[4, 8, 5]",
    ]


def test_a_buffer_gets_its_new_value_in_its_own_layout() -> None:
    program = run_passes(folded(Remembers), [KeepLayouts()])
    (new,) = program.updates().values()
    held = value(program.placeholders["seen"])
    assert new.target is torch.ops.aten.contiguous.default
    assert value(new).stride() == held.stride()


@pytest.mark.parametrize("make", WRONG)
def test_every_captured_call_reads_values_laid_out_as_captured(make: type[Middle]) -> None:
    before = folded(make)
    captured = {node.name for node in before}
    program = run_passes(before, [KeepLayouts()])
    wrong: list[str] = []

    class Watched(torch.fx.Interpreter):
        def run_node(self, n: torch.fx.Node) -> object:
            made = super().run_node(n)
            read = isinstance(made, torch.Tensor) and any(user.name in captured for user in n.users)
            if read and made.stride() != value(n).stride():
                wrong.append(f"{n}: {made.stride()}, predicted {value(n).stride()}")
            return made

    feed = {**program.values, **program.example}
    with torch.no_grad():
        Watched(torch.fx.GraphModule(nn.Module(), program.graph)).run(*(feed[n] for n in program.placeholders))
    assert not wrong


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("make", WRONG)
def test_models_compute_what_eager_computes(make: type[Middle], workers: int) -> None:
    torch.manual_seed(0)
    model = make()
    options = {"workers": workers, "schedule": "1f1b", "microbatches": 2, "cost": "analytic"}
    state = make is Remembers  # which each microbatch changes
    build = fxpipe.compile(model, squared, series(), accept_microbatch_loss=state, **options)
    assert bool(build.plan.step.differs_from_whole) == state
    assert compare_with_eager(build, model, squared, series()).largest < 1e-6


def test_without_the_pass_they_do_not() -> None:
    """Or the tests above could not fail: one computes something else, the others fail."""
    plan = fxpipe.compile(Differs(), squared, series(), workers=1, cost="analytic").plan
    torch.manual_seed(0)
    eager = eager_step(plan, Differs(), squared, series())
    loss = folded(Differs).run()[0]
    assert abs(loss - eager.loss) > 1e-3
    for make in set(WRONG) - {Differs, Remembers}:
        with pytest.raises(RuntimeError, match="view size is not compatible"):
            folded(make).run()
    program = folded(Remembers)
    (name, after) = next(iter(program.updates().items()))
    place = program.output_nodes.index(after)
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        program.run({name: program.run()[place]})


def test_ordinary_programs_stay_as_they_are() -> None:
    program = run_passes(two_layers(), [Fold()])
    assert text(run_passes(program, [KeepLayouts()])) == text(program)

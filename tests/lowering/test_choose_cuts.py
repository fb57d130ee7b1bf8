"""The cuts that are asked for, and what is said of impossible ones."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from cached import lowered
from random_cuts import numbered
from torch import nn
from torch.distributed.pipelining import SplitPoint, pipe_split
from torch.distributed.pipelining._IR import annotate_split_points

import fxpipe
from fxpipe.errors import CutError, FxpipeError
from fxpipe.ir.program import Program, info
from fxpipe.lowering.choose_cuts import choose_cuts
from fxpipe.lowering.compare_with_eager import compare_with_eager
from fxpipe.lowering.option_rules import check, setting_of
from fxpipe.lowering.options import CompileOptions
from fxpipe.passes.analysis.profile import profile_of
from fxpipe.passes.cost import Cost
from fxpipe.planner.cuts import Cuts
from fxpipe.planner.links import NCCL_NODE, Links
from fxpipe.planner.profile import read_profile_json
from fxpipe.planner.separate_cuts import why_shared

FREE = Links()


def chosen(program: Program, **asked: Any) -> Cuts:
    options = CompileOptions(**asked)
    return choose_cuts(program, profile_of(program), options, setting_of(options)).cuts


def test_cuts_for_another_program_are_refused() -> None:
    program = Cost()(numbered("function"))
    count = len(program.units)
    cuts = Cuts((0, 3, count), (0, 3, count))
    with pytest.raises(CutError, match="for 2 workers and"):
        chosen(program, workers=3, cuts=cuts)
    with pytest.raises(CutError, match=f"2 workers and {count - 1} units, the step for 2 and {count}"):
        chosen(program, cuts=Cuts((0, 3, count - 1), (0, 3, count - 1)))


def test_given_cuts_may_not_part_a_buffer_from_its_update() -> None:
    program = Cost()(numbered("conv"))
    # Each batch norm has statistics of its own: let the last one read the first one's.
    first, middle, *_, last = (program.placeholders[b.node] for b in program.buffers if "running_mean" in b.node)
    between = info(next(iter(middle.users))).unit
    next(iter(last.users)).replace_input_with(last, first)
    count = len(program.units)
    with pytest.raises(CutError, match=f"separates readers of buffer {first.name}"):
        chosen(program, cuts=Cuts((0, between, count), (0, between, count)))


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
    with pytest.raises(CutError) as caught:
        chosen(Cost()(numbered("function")), **options)
    assert message in str(caught.value)


def test_a_pin_may_be_repeated_where_the_other_phase_gives_the_worker_work() -> None:
    where = {"forward_at": ("layers.2", "layers.2"), "backward_at": ("layers.1", "layers.3")}
    plan = lowered("function", workers=3, **where).plan
    first, end = plan.stages[1].forward_units
    assert first == end
    assert plan.stages[1].backward_units[0] < first < plan.stages[1].backward_units[1]
    for falling in (("layers.3", "layers.2"), ("layers.2", "layers.1")):
        with pytest.raises(CutError, match="does not come after"):
            lowered("function", workers=3, **{**where, "forward_at": falling})


def test_a_cut_may_not_part_a_buffer_from_its_update() -> None:
    class Shared(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
            self.norm = torch.nn.BatchNorm1d(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.b(self.norm(self.a(x))))

    program = fxpipe.capture(Shared(), lambda m, x: m(x).square().mean(), torch.randn(8, 4))
    with pytest.raises(CutError, match="separates readers of buffer norm_running_mean"):
        fxpipe.lower(program, workers=2, cost="analytic", forward_at=["b"])
    build = fxpipe.lower(program, workers=2, cost="analytic")  # finds a place where it may
    assert build.plan.stages[0].forward_units[1] > 0


def test_options_that_do_not_exist() -> None:
    with pytest.raises(FxpipeError, match="no option 'worker', did you mean 'workers'"):
        lowered("function", worker=3)
    with pytest.raises(FxpipeError, match=r"'three_way' is not one of .*, did you mean 'three-way'"):
        check(CompileOptions(cuts="three_way"))  # type: ignore[arg-type]
    with pytest.raises(CutError, match="chosen or pinned, not both"):
        check(CompileOptions(cuts="same", forward_at=("a",)))


def test_separate_cuts_must_gain_more_than_the_noise() -> None:
    """Two workers: shared cuts take 14 ms at best, separate ones 12."""
    costs = [(1, 9), (6, 2), (5, 1)]
    units = [{"name": f"u{i}", "forward_ms": f, "backward_ms": b, "saved_bytes": 3e7} for i, (f, b) in enumerate(costs)]
    profile = read_profile_json(json.dumps({"units": units}), "planted", error=FxpipeError)

    def found(links: Links = FREE, **noise: float) -> tuple[str, str]:
        options, noisy = CompileOptions(links=links), replace(profile, **noise)
        choice = choose_cuts(Cost()(numbered("function")), noisy, options, setting_of(options))
        return choice.partitions[-1].mode, why_shared(choice.partitions, noisy)

    assert found() == found(spread=0.05, doubt=0.1) == ("bidirectional", "")
    moved = "for 28.6 MiB a minibatch more between workers"
    said = f"separate ones would gain 14.3% {moved}, within the noise of the measured times"
    assert found(spread=0.08) == ("same", f"{said} (16%)")
    assert found(doubt=0.84) == ("same", f"{said} (84%)")
    assert found(spread=3.0) == ("same", f"{said} (100%)")
    # What they move, 30 MB a unit, costs half a millisecond over 20 GB/s, and all of the gain over a third of it.
    assert found(NCCL_NODE) == ("same", f"separate ones would gain 10.7% {moved}, but not over slower links")
    assert found(replace(NCCL_NODE, latency=11e-6)) == ("bidirectional", ""), "measured links are believed"


class Marked(nn.Module):
    """Six layers, with marks of torch's pipeline before two of them; one has two, and views follow the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            for _ in range({2: 1, 4: 2}.get(number, 0)):
                pipe_split()
            x = layer(x.view(-1, 4)).tanh()
        return x


@pytest.mark.parametrize(
    ("workers", "cuts", "expected", "note"),
    [
        (3, "auto", ["layers.0", "layers.2", "layers.4"], "it is cut there"),
        (3, "given", ["layers.0", "layers.2", "layers.4"], ""),
        (2, "auto", None, "--cuts given -n 3 cuts it there"),
        (3, "same", None, "--cuts given -n 3 cuts it there"),
        (2, "given", "2 workers need 1 cuts, the model marks 2", ""),
    ],
)
def test_marks_of_torchs_pipeline(workers: int, cuts: Any, expected: Any, note: str) -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean()

    torch.manual_seed(0)
    model, batch = Marked(), torch.rand(4, 4)
    options: Any = {"workers": workers, "microbatches": 2, "schedule": "1f1b", "cost": "analytic", "cuts": cuts}
    if isinstance(expected, str):
        with pytest.raises(CutError, match=expected):
            fxpipe.compile(model, loss, batch, **options)
        return
    build = fxpipe.compile(model, loss, batch, **options)
    assert [note in warning for warning in build.warnings if "pipe_split" in warning] == [True] * bool(note)
    if expected:
        position = [s.forward_units[0] for s in build.plan.stages]
        assert [build.plan.step.units[p] for p in position] == expected
        assert [s.backward_units[0] for s in build.plan.stages] == position
    assert compare_with_eager(build, model, loss, batch).largest < 1e-5


def test_marks_on_modules() -> None:
    """torch marks a module by another forward, which calls `pipe_split` before or after the module's own."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    annotate_split_points(model, {"1": SplitPoint.BEGINNING, "2": SplitPoint.END})
    build = fxpipe.compile(
        model, lambda m, b: m(b).mean(), torch.rand(4, 4), workers=3, cuts="given", cost="analytic", microbatches=1
    )
    assert [build.plan.step.units[s.forward_units[0]] for s in build.plan.stages] == ["0", "1", "3"]

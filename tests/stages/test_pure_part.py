"""Pure parts: the emitted code's values to the bit, dropout and its masks included; trimmed parts likewise."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from cached import captured, cuts, lowered
from covering import a_few_quick
from random_cuts import random_cuts
from small_models import CASES
from torch import Tensor, nn

import fxpipe
from fxpipe.builds.build import Build
from fxpipe.engines.engine import Engine, EnginePart, kept_as
from fxpipe.errors import BackendError
from fxpipe.stages.derived_outputs import trim
from fxpipe.stages.loaded import LoadedStage, load_stage, load_stages
from fxpipe.stages.microbatch import record_calls
from fxpipe.stages.minibatch import Minibatches
from fxpipe.stages.part_call import PartCall
from fxpipe.stages.pure_function import Compute, in_float64
from fxpipe.stages.pure_part import PurePart, trace_stage
from fxpipe.stages.random_inputs import PLACE

SUM = re.compile(r"    \w+ = \w+ \+ \w+ ")
"""A line of a stage."""


class Interpreter(Engine):
    """Runs parts operator by operator with torch; notes what it was given to build."""

    name = "interpreter"

    def __init__(self) -> None:
        self.built: list[PurePart] = []

    def missing(self, device: str) -> str | None:
        return None

    def version(self) -> str:
        return "1"

    def build(self, part: PurePart, cache: Path | None) -> Compute:
        self.built.append(part)
        return part


def opened(build: Build, name: str, folder: Path | None = None) -> tuple[list[LoadedStage], dict[Any, PartCall]]:
    """The stages of a build of a case, and what their parts are called with on its first batch."""
    if folder is not None:
        build.save(folder)
    stages = load_stages(build.plan, folder or build.files)
    program = captured(name)[2]
    leaves = {b.leaf.name: program.example[b.node] for b in program.batch if b.node}
    with torch.no_grad():
        return stages, record_calls(build.plan, stages, build.tensors, leaves)


def called(function: Any, call: PartCall) -> list[Tensor]:
    """What a stage's function gives and sends."""
    with torch.no_grad():
        return call.run(function, seed=5).flat()


def equal(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return all(torch.equal(f, e) and f.stride() == e.stride() for f, e in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", a_few_quick(sorted(CASES), "conv", "gpt", "checkpoint"))
def test_parts_equal_the_emitted_code(name: str) -> None:
    """Operator by operator a part is the emitted function; so is the trimmed part with the rest put back."""
    build = lowered(name, workers=3, cuts=random_cuts(name, 3, 1))
    stages, calls = opened(build, name)
    for worker, stage in enumerate(stages):
        for part in trace_stage(build.plan, worker, stage):
            engine = Interpreter()
            call = calls[worker, part.phase]
            expected = called(stage.functions[part.phase], call)
            found = called(EnginePart(part, engine), call)
            kept = [row.name not in part.left for row in part.outputs]  # a kernel leaves what no one has set, too
            assert equal([*itertools.compress(found, kept)], [*itertools.compress(expected, kept)])
            for inner in engine.built:
                made = list(inner.graph.graph.output_node().args[0])
                assert len(set(made)) == len(made)
                assert not [n for n in made if n.op == "placeholder"]
                assert all(n.users for n in inner.graph.graph.nodes if n.op == "placeholder")


def test_masks_are_inputs_and_drawn_as_the_code_draws_them() -> None:
    build = lowered("gpt-dropout", workers=2, **cuts(CASES["gpt-dropout"], 2, 1))
    stages, _ = opened(build, "gpt-dropout")
    part, _ = trace_stage(build.plan, 0, stages[0])
    masks = [i for i in part.inputs if i.kind == "mask"]
    assert masks
    assert [d.tensor for d in part.draws] == [m.tensor for m in masks]
    assert {m.tensor.dtype for m in masks} == {"bool"}
    torch.manual_seed(3)
    first = [draw("cpu") for draw in part.draws]
    torch.manual_seed(3)
    x = torch.randn(())  # another position of the generator
    assert not all(torch.equal(a, draw("cpu")) for a, draw in zip(first, part.draws, strict=True)), x


def test_every_call_knows_its_place() -> None:
    build = lowered("gpt", workers=2, **cuts(CASES["gpt"], 2, 0))
    stages, _ = opened(build, "gpt")
    for part in trace_stage(build.plan, 1, stages[1]):
        places = [n.meta.get(PLACE, "") for n in part.graph.graph.nodes if n.op == "call_function"]
        assert all(p.startswith("stage_1.py:") for p in places)
        assert any("blocks.3" in p and "small_models.py" in p for p in places)


def test_saved_values_stay_views() -> None:
    """What eager keeps as a view of another saved value costs no memory of its own on an engine either."""
    build = lowered("gpt", workers=1)
    stages, calls = opened(build, "gpt")
    part, _ = trace_stage(build.plan, 0, stages[0])
    made = called(EnginePart(part, Interpreter()), calls[0, "F"])
    expected = called(stages[0].functions["F"], calls[0, "F"])

    def memory(values: Sequence[Tensor | None]) -> int:
        storages = [v.untyped_storage() for v in values if v is not None]
        return sum({s.data_ptr(): s.nbytes() for s in storages}.values())

    assert memory(made) <= memory(expected)


def test_edited_stages_are_followed(tmp_path: Path) -> None:
    """A part is what the file says now."""
    build = lowered("gpt", workers=1)
    stages, calls = opened(build, "gpt", tmp_path / "build")
    path = tmp_path / "build" / "stage_0.py"
    text = path.read_text()
    lines = text.splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("def forward("))
    place = next(i for i, line in enumerate(lines) if i > begin and line.startswith("    return "))
    loss = lines[place].split()[1].rstrip(",")
    lines[place] = lines[place].replace(f"return {loss},", f"return {loss} * 2,")
    path.write_text("\n".join(lines) + "\n")
    stage = load_stage(path, build.plan.stages[0])
    part, _ = trace_stage(build.plan, 0, stage)
    twice = called(EnginePart(part, Interpreter()), calls[0, "F"])[0]
    once = called(stages[0].functions["F"], calls[0, "F"])[0]
    assert twice is not None
    assert once is not None
    assert torch.equal(twice, 2 * once)


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        ("    if float({name}.sum()) > 0: pass", "cannot be traced"),
        ("    {name}.add_(1)", "changes a tensor in place"),
        (
            "    {name} = {name} * torch.bernoulli({name}.sigmoid())",
            "random numbers that may depend on",
        ),
    ],
)
def test_edits_that_only_eager_can_run_are_refused(edit: str, why: str, tmp_path: Path) -> None:
    build = lowered("gpt", workers=1)
    opened(build, "gpt", tmp_path / "build")
    path = tmp_path / "build" / "stage_0.py"
    lines = path.read_text().splitlines()
    place = next(i for i, line in enumerate(lines) if SUM.match(line))
    name = lines[place].split()[0]
    lines.insert(place + 1, edit.format(name=name))
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(BackendError, match=why) as caught:
        trace_stage(build.plan, 0, load_stage(path, build.plan.stages[0]))
    assert f"stage_0.py:{place + 2}" in str(caught.value)


def test_a_part_that_passes_values_on_needs_no_engine() -> None:
    """A worker without units has parts without outputs or with inputs as outputs."""
    name = "gpt"
    build = lowered(name, workers=6, cuts=random_cuts(name, 6, 3))
    stages, _ = opened(build, name)
    for worker, stage in enumerate(stages):
        for part in trace_stage(build.plan, worker, stage):
            inner = trim(part).inner
            assert {o.kind for o in inner.outputs} <= {o.kind for o in part.outputs}


@pytest.mark.slow
def test_the_cache_knows_constants_by_their_values(tmp_path: Path) -> None:
    """An edit of a literal changes nothing but a constant; what an engine made before must not be used."""
    build = lowered("gpt", workers=1)
    opened(build, "gpt", tmp_path / "build")
    path = tmp_path / "build" / "stage_0.py"
    text = path.read_text()
    line = next(line for line in text.splitlines() if SUM.match(line))
    name = line.split()[0]
    names = set()
    for number in ("2.0", "3.0", "2.0"):
        path.write_text(text.replace(line, f"{line}\n    {name} = {name} * torch.tensor([{number}])", 1))
        part, _ = trace_stage(build.plan, 0, load_stage(path, build.plan.stages[0]))
        names.add(kept_as(trim(part).inner, Interpreter()))
    assert len(names) == 2


def test_in_float64_a_quotient_of_counts_is_float64() -> None:
    """The share of a microbatch in a mean: torch gives it the default dtype, and the loss's backward takes no other."""
    torch.manual_seed(0)
    batch = torch.randn(4, 6), torch.randint(3, (4,))
    build = fxpipe.compile(
        nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)),
        lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        batch,
        workers=1,
        microbatches=2,
        cost="analytic",
    )
    stages = load_stages(build.plan, build.files)
    parts = Minibatches(build.plan, build.files, build.tensors, None)(batch, 0)
    leaves = dict(zip([leaf.name for leaf in build.plan.step.batch], parts[0], strict=True))
    with torch.no_grad():
        call = record_calls(build.plan, stages, build.tensors, leaves)[0, "B"]
        (part,) = [p for p in trace_stage(build.plan, 0, stages[0]) if p.phase == "B"]
        assert any("nll_loss_backward" in str(node.target) for node in part.graph.graph.nodes)
        exact, emitted = (called(f, call) for f in (in_float64(part), stages[0].functions["B"]))
    for precise, value in zip(exact, emitted, strict=True):
        assert precise.dtype == torch.float64
        torch.testing.assert_close(precise.float(), value)

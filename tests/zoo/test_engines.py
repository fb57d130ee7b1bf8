"""Real architectures and the suite's own, cut in three with forward and backward apart, on onnxruntime and as ONNX."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cached import captured
from engines import needs
from families import CORE
from random_cuts import with_units
from small_models import CASES
from zoo_programs import MICROBATCHES, WORKERS, apart_cuts, captured_core, even_cuts

import fxpipe
from fxpipe import engines as backend
from fxpipe.build.build import Build
from fxpipe.engines.attach import check_outputs
from fxpipe.engines.engine import EnginePart
from fxpipe.ir.program import Program
from fxpipe.planner.cuts import Cuts
from fxpipe.stages.compare import EXACT, Expected, compare
from fxpipe.stages.loaded import load_stages
from fxpipe.stages.microbatch import record_calls
from fxpipe.stages.minibatch import Minibatches
from fxpipe.stages.part_call import PartCall
from fxpipe.stages.pure_function import in_float64
from fxpipe.stages.pure_part import PurePart, trace_stage

pytestmark = pytest.mark.slow  # translation takes its time
STEPS = 20
SMALL = [f"case:{name}" for name in CASES]  # the models of CORE are compared where they are exported


def lowered(name: str, choose: Callable[[Program], Cuts], size: int | None = None) -> tuple[Build, list[Any]]:
    """A build in three, and minibatches for it."""
    needs("onnxruntime")
    prefix, _, case = name.rpartition(":")
    if prefix:
        _, _, program = captured(case)
        numbered = with_units(program)
        batches = CASES[case].batches(STEPS)
    else:
        if reason := CORE[name].missing():
            pytest.skip(reason)
        _, program, numbered = captured_core(name, size)
        batches = dataclasses.replace(CORE[name], size=size or CORE[name].size).batches(STEPS)
    cuts = choose(numbered)
    assert cuts.forward != cuts.backward
    options: dict[str, Any] = {"split_backward": cuts.weights != cuts.backward}
    if not prefix:
        options["microbatches"] = MICROBATCHES
    return fxpipe.lower(program, workers=WORKERS, schedule="1f1b", cost="analytic", cuts=cuts, **options), batches


def errors(build: Build, batch: Any, folder: Path) -> Iterator[tuple[str, float]]:
    """Every part with its largest error on onnxruntime against the emitted code, on real values."""
    plan = build.plan
    stages = load_stages(plan, build.files)
    leaves = Minibatches(plan, build.files, build.tensors, None)(batch, 0)[0]
    calls = record_calls(plan, stages, build.tensors, dict(zip([x.name for x in plan.batch], leaves, strict=True)))
    for worker, stage in enumerate(stages):
        for part in trace_stage(plan, worker, stage):
            made = EnginePart(part, backend.make("onnxruntime"), folder)
            call = calls[worker, part.phase]
            found, expected = (call.run(f, seed=0).flat() for f in (made, stage.functions[part.phase]))
            exact = functools.partial(exactly, call, part)
            yield part.name, check_outputs(made, expected, found, exact)


def exactly(call: PartCall, part: PurePart) -> list[torch.Tensor]:
    return call.run(in_float64(part), seed=0).flat()


@pytest.mark.parametrize("name", SMALL)
def test_every_part_agrees_on_onnxruntime(name: str, tmp_path: Path) -> None:
    build, batches = lowered(name, apart_cuts)
    with torch.no_grad():
        found = dict(errors(build, batches[0], tmp_path))
    assert len(found) == 2 * WORKERS
    assert max(found.values()) <= EXACT, found


@pytest.mark.parametrize("name", CORE)
def test_every_part_is_exported(name: str, tmp_path: Path) -> None:
    """`export` writes nothing that onnx.checker refuses or that onnxruntime computes otherwise."""
    from fxpipe.export.stages import export

    build, batches = lowered(name, even_cuts)
    told: list[str] = []
    found = export(build, tmp_path / "onnx", batches[0], warn=told.append)
    assert {f.name for f in found} == {p.name for p in (tmp_path / "onnx").iterdir()}
    empty = sum("computes nothing" in text for text in told)
    assert len(found) == 2 * WORKERS + 1 - empty
    *parts, whole = found
    assert max(f.error for f in parts) <= EXACT
    # Batch norm over few values, layer after layer: there the stages' own code moves as far by rounding.
    assert whole.error <= EXACT or any(f"off by {whole.error:.1e}" in text for text in told)


@pytest.mark.parametrize(
    ("name", "size", "lr"),
    [
        # Batch norm: at larger steps the last bits of the initial weights alone move eager's losses by more.
        ("resnet18", 16, 3e-5),
        ("vit", None, 0.01),
        ("llama", None, 0.01),
        ("residual-lstm", None, 0.01),
    ],
)
def test_onnxruntime_trains_as_eager(name: str, size: int | None, lr: float) -> None:
    build, batches = lowered(name, even_cuts, size)
    found, expected = (
        build.local(backend=engine, optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=lr))
        for engine in ("onnxruntime", "eager")
    )
    losses = found.run(batches)
    assert len(losses) == STEPS
    assert losses == pytest.approx(expected.run(batches), rel=1e-4)
    state, right = found.state_dict(), expected.state_dict()
    rows = {n: Expected(v.float(), "state", summed=True) for n, v in right.items()}
    worst = max(compare({n: v.float() for n, v in state.items()}, rows), key=lambda d: d.error)
    assert worst.error <= 1e-3, worst

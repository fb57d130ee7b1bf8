"""The core's models with forward, backward and weight gradients cut apart against eager PyTorch, and as ONNX."""

from __future__ import annotations

import itertools
from pathlib import Path

import check
import pytest
from engines import needs
from families import CORE, ZooModel
from random_cuts import legal_cuts, with_units

import fxpipe
from fxpipe.export.stages import export
from fxpipe.lowering.compare_with_eager import compare_with_eager
from fxpipe.stages.compare import EXACT

WORKERS = 3


@pytest.mark.parametrize("name", CORE)
def test_three_kinds_of_cuts_train_as_eager(core_model: ZooModel) -> None:
    model, loss, batch = core_model.make()
    program = check.captured(core_model, model, loss, batch)
    found = (legal_cuts(with_units(program, check.MICROBATCHES), WORKERS, str(seed)) for seed in itertools.count())
    cuts = next(c for c in found if len({c.forward, c.backward, c.weights}) == 3 and c.recompute)
    build = fxpipe.lower(
        program,
        workers=WORKERS,
        microbatches=check.MICROBATCHES,
        accept_microbatch_loss=True,
        schedule="1f1b",
        cost="analytic",
        cuts=cuts,
        split_backward=True,
    )
    agreement = compare_with_eager(build, model, loss, batch)
    assert set(agreement.gradients) == {n for n, p in model.named_parameters() if p.requires_grad}
    assert agreement.largest <= 1e-5, agreement.worst_gradient


@pytest.mark.parametrize("name", CORE)
def test_every_part_is_exported(core_model: ZooModel, tmp_path: Path) -> None:
    """`export` writes nothing that onnx.checker refuses or that onnxruntime computes otherwise."""
    needs("onnxruntime")
    model, loss, batch = core_model.make()
    program = check.captured(core_model, model, loss, batch)
    build = check.lowered(program, check.both_cuts(program)[1])
    told: list[str] = []
    found = export(build, tmp_path / "onnx", batch, warn=told.append)
    assert {f.name for f in found} == {p.name for p in (tmp_path / "onnx").iterdir()}
    empty = sum("computes nothing" in text for text in told)
    assert len(found) == 2 * check.WORKERS + 1 - empty
    *parts, whole = found
    assert max(f.error for f in parts) <= EXACT
    # Batch norm over few values, layer after layer: there the stages' own code moves as far by rounding.
    assert whole.error <= EXACT or any(f"off by {whole.error:.1e}" in text for text in told)

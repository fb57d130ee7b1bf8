"""Every dtype and layout on the wires between real processes, and operators of the user's own in them."""

from __future__ import annotations

import functools
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import wire_model
from features import Feature, check

import fxpipe
from fxpipe.errors import BuildError
from fxpipe.runtime.options import RunOptions
from fxpipe.runtime.process.launch import launch
from fxpipe.runtime.process.start import run_local
from fxpipe.task.batch import split

STEPS = 4
FEATURE = Feature("wires", wire_model.Model, wire_model.loss, lambda size: wire_model.train_data()[0], alone=True)


def test_wires() -> None:
    check(FEATURE)


@functools.cache
def built() -> fxpipe.Build:
    """Backward is cut earlier than forward at one place and later at the other."""
    microbatch = split(wire_model.train_data()[0], 2)[0]
    program = fxpipe.capture(wire_model.model(), wire_model.loss, microbatch)
    return fxpipe.lower(
        program,
        workers=3,
        microbatches=2,
        schedule="1f1b",
        cost="analytic",
        forward_at=["layers.2", "layers.3"],
        backward_at=["layers.1", "layers.4"],
    )


@pytest.mark.slow
@pytest.mark.multiproc
def test_all_dtypes_and_layouts_arrive_as_in_one_process(tmp_path: Path) -> None:
    file = Path(shutil.copy(wire_model.__file__, tmp_path / "model.py"))
    build = built()
    crossing = {edge.tensor.dtype for edge in build.plan.edges}
    assert crossing >= {"float32", "float64", "float16", "bfloat16", "int8", "int64", "bool", "complex64"}
    assert {0, 1, 2, 4} <= {len(edge.tensor.shape) for edge in build.plan.edges}
    assert any(0 in edge.tensor.shape for edge in build.plan.edges)
    build.save(tmp_path / "build", model_file=file)
    options = RunOptions(str(tmp_path / "build"), steps=STEPS, seed=3, out=str(tmp_path / "local"), threads=1)
    local = run_local(options)
    real = launch(replace(options, out=str(tmp_path / "real")), 3)
    assert local["losses"] == real["losses"]
    assert len(set(local["losses"])) == STEPS
    one, other = ((tmp_path / out / "model.safetensors").read_bytes() for out in ("local", "real"))
    assert one == other


def test_an_expanded_value_travels_as_what_it_repeats() -> None:
    edges = {edge.name: edge.tensor.shape for edge in built().plan.edges}
    assert edges["expand_2:1"] == edges["expand_2:2"] == (4, 1)
    assert edges["expand_4:1"] == edges["expand_4:2"] == (1, 1, 6)


def test_an_operator_that_no_one_registered_is_refused_before_the_run(tmp_path: Path) -> None:
    build = built()
    files = {name: text.replace("wire_model.bent", "nobodys.bent") for name, text in build.files.items()}
    assert files != build.files
    with pytest.raises(BuildError, match=r"the operator nobodys::bent, which is not registered") as caught:
        replace(build, files=files).local(optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1))
    assert "stage_" in str(caught.value.where)
    assert "torch.ops.nobodys.bent.default(" in str(caught.value.where)
    assert "import what registers it" in str(caught.value.hint)

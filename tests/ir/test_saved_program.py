"""Programs in a file: with the passes that they went through, they give the files of the build."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small_models import CASES

import fxpipe
from fxpipe.errors import BuildError
from fxpipe.ir.saved_program import file_of, read_programs, texts_of
from fxpipe.ir.transform import run_passes
from fxpipe.passes import every_pass

OPTIONS = {
    "gpt-dropout": {"schedule": "zb-h1", "dp": 2},
    "conv": {"schedule": "async", "codec": "int8", "recompute": "full"},
    "lstm": {"schedule": "1f1b", "microbatches": 2},
    "dict": {"schedule": "gpipe", "microbatches": 4},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_the_passes_that_are_kept_give_the_files_of_the_build(name: str) -> None:
    case = CASES[name]
    given: dict[str, Any] = {"workers": 2, "cost": "analytic", "microbatches": 2, **OPTIONS[name]}
    evaluation = (lambda model, batch: {"loss": case.loss(model, batch)}, case.batches(1))
    batch, larger = case.batch(8), case.batch(16)
    build = fxpipe.compile(case.make(), case.loss, batch, shapes=[larger], evaluation=evaluation, **given)
    assert texts_of(file_of(build.programs)) == build.programs
    saved = read_programs(file_of(build.programs), every_pass())
    assert {"training", "shape 1", "evaluation 0"} <= saved.keys()
    files: dict[str, str] = {}
    for one in saved.values():
        files |= run_passes(one.program, one.passes).files
    assert files == build.files


def test_a_file_of_another_form_is_refused(tmp_path: Path) -> None:
    (tmp_path / "program.json").write_text('{"format": 0}')
    with pytest.raises(BuildError, match="has no programs of format 1") as caught:
        read_programs(tmp_path / "program.json", every_pass())
    assert "compile again" in str(caught.value.hint)

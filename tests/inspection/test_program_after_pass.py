"""The program after each pass: of a build it is the one that the build was made from."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
from commands import QUICK, fxpipe
from model_files import write_model

import fxpipe as api
from fxpipe.errors import BuildError, CutError, FxpipeError
from fxpipe.inspection.program_after_pass import after, pass_names
from fxpipe.planner.cuts import Cuts
from fxpipe.planner.partition import Partition
from fxpipe.task.model_file import load_task, source_digests

PINS = ("--fp-cut", "blocks.2", "--bp-cut", "blocks.1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `model.py`."""
    return write_model(tmp_path_factory.mktemp("after")).parent


def compiled(folder: Path, name: str, *arguments: object) -> dict[str, str]:
    """A build, and the program after every pass of its compile, as it was dumped."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FXPIPE_DUMP", str(folder / f"{name}-dump"))
        result = fxpipe("compile", folder / "model.py", *QUICK, *arguments, "-o", folder / name)
    assert result.code == 0, result
    dumped = sorted((folder / f"{name}-dump").glob("[0-9]*"))
    return {f.stem.partition("_")[2]: f.read_text() for f in dumped}


def test_the_passes_in_their_order() -> None:
    assert pass_names() == (
        "capture", "fold", "whole_loss", "keep_layouts", "split_backward", "units", "cost", "cut", "defer",
        "recompute", "rematerialize", "comm", "encode", "send_early", "reduce", "split", "codegen",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("pinned", PINS),
        ("planned", ("-n", 3, "--cuts", "bidirectional")),
        ("three-way", ("-n", 3, "--cuts", "three-way", "--schedule", "1f1b", "--microbatches", 2)),
        ("autocast", ("--autocast", "bf16", *PINS)),
        ("apart", ("--schedule", "zb-h1", "--microbatches", 2, *PINS)),
        ("again", ("--schedule", "1f1b", "--microbatches", 2, "--recompute", "full", *PINS)),
    ],
)
def test_of_a_build_it_is_what_its_compile_had(folder: Path, name: str, arguments: tuple[Any, ...]) -> None:
    dumped = compiled(folder, name, *arguments)
    assert ("split_backward" in dumped) == (name in ("three-way", "apart"))
    assert ("defer" in dumped) == (name == "apart")
    assert ("recompute" in dumped) == (name == "again")
    said: list[str] = []
    for pass_name in dumped if name in ("three-way", "again") else ("units", "cut", "codegen"):
        assert after(folder / name, pass_name, warn=said.append) == dumped[pass_name], pass_name
    assert said == []
    assert after(folder / name, "capture").startswith("# CAPTURED: ")


def test_edges_keep_the_codecs_that_the_build_gave_them(tmp_path: Path) -> None:
    write_model(tmp_path, ("randn(4, 6)", "randn(64, 6)"), ("(4,)", "(64,)"))
    dumped = compiled(tmp_path, "build", *PINS, "--microbatches", 1, "--codec", "auto", "--bandwidth", "1Mbit")
    said: list[str] = []
    for pass_name in ("encode", "codegen"):
        assert after(tmp_path / "build", pass_name, warn=said.append) == dumped[pass_name]
    assert said == []
    assert "int8.pack(" in dumped["encode"]
    options: dict[str, Any] = {"workers": 2, "microbatches": 1, "cost": "analytic", "codec": "gradient=topk:0.25"}
    assert "topk_0_25.pack(" in after(tmp_path / "model.py", "encode", **options)


def test_what_the_planner_let_be_computed_again(folder: Path) -> None:
    task = load_task(folder / "model.py")
    program = api.capture(task.model(), task.loss, task.example())
    count = len(api.lower(program, cost="analytic").plan.units)
    cuts = Cuts((0, 7, count), (0, 2, count), recompute=((1, 2, 7),))
    build = api.lower(program, cuts=cuts, cost="analytic")
    chosen = Partition("bidirectional", cuts.forward, cuts.backward, cuts.weights, cuts.recompute, 1.0, 1.0, 1.0, ())
    plan = dataclasses.replace(build.plan, sources=source_digests(folder / "model.py"))
    build = dataclasses.replace(build, plan=plan, costs=dataclasses.replace(build.costs, partitions=(chosen,)))
    build.save(folder / "again", model_file=folder / "model.py")
    said: list[str] = []
    assert "_again = " in after(folder / "again", "rematerialize", warn=said.append)
    assert said == []


def test_of_a_model_it_is_what_a_compile_would_have(folder: Path) -> None:
    dumped = compiled(folder, "would", *PINS)
    options: dict[str, Any] = {"forward_at": ("blocks.2",), "backward_at": ("blocks.1",), "cost": "analytic"}
    for pass_name in ("fold", "units", "cut", "codegen"):
        assert after(folder / "model.py", pass_name, **options) == dumped[pass_name]
    assert "w2" in after(folder / "model.py", "cut", workers=3, cost="analytic")


def test_a_pass_that_nobody_knows(folder: Path) -> None:
    with pytest.raises(FxpipeError, match="no pass is called 'rematerialise', did you mean 'rematerialize'") as caught:
        after(folder / "model.py", "rematerialise")
    assert ", ".join(pass_names()) in str(caught.value)


def test_a_pass_that_does_not_run_here(folder: Path) -> None:
    with pytest.raises(FxpipeError, match="split_backward does not run here") as caught:
        after(folder / "model.py", "split_backward", cost="analytic")
    assert "capture, fold, keep_layouts, units, cost" in str(caught.value)
    assert after(folder / "model.py", "split_backward", cost="analytic", cuts="three-way").startswith("# FOLDED")
    with pytest.raises(FxpipeError, match="encode does not run here: it is for edges that have codecs"):
        after(folder / "model.py", "encode", cost="analytic")


def test_a_stale_build_and_one_without_a_model(folder: Path, tmp_path: Path) -> None:
    write_model(tmp_path)
    compiled(tmp_path, "build", *PINS)
    (tmp_path / "model.py").write_text((tmp_path / "model.py").read_text() + "\n")
    with pytest.raises(BuildError, match=r"model\.py changed"):
        after(tmp_path / "build", "cut")
    task = load_task(folder / "model.py")
    api.compile(task.model(), task.loss, task.example(), cost="analytic").save(tmp_path / "objects")
    with pytest.raises(BuildError, match="made from objects"):
        after(tmp_path / "objects", "cut")
    with pytest.raises(BuildError, match="not an fxpipe build"):
        after(tmp_path, "cut")


def test_an_edited_stage_is_no_difference_but_another_model_is(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compiled(folder, "edited", *PINS)
    (folder / "edited" / "stage_0.py").write_text("# gone\n")
    after(folder / "edited", "cut")
    assert capsys.readouterr().err == ""

    edit = ("nn.Linear(8, 3)", "nn.Linear(8, 2 + WIDTH)"), ("class Net", "from width import WIDTH\n\n\nclass Net")
    path = write_model(tmp_path, *edit)
    (tmp_path / "width.py").write_text("from pathlib import Path\nWIDTH = int(Path(__file__[:-3]).read_text())\n")
    (tmp_path / "width").write_text("1")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        assert fxpipe("compile", path, *QUICK, *PINS, "-o", tmp_path / "build").code == 0
        assert after(tmp_path / "build", "cut")
        assert capsys.readouterr().err == ""
        import width  # type: ignore[import-not-found]

        patch.setattr(width, "WIDTH", 2)
        assert "f32[4, 8]" in after(tmp_path / "build", "cut")
    err = capsys.readouterr().err
    assert err.startswith("warning: the passes now write ")
    assert "stage_1.py differently than for " in err


def test_impossible_cuts_are_said_to_be(folder: Path) -> None:
    with pytest.raises(CutError, match="no module of that path"):
        after(folder / "model.py", "comm", forward_at=("nowhere",), cost="analytic")


def test_costs_may_be_gone(folder: Path) -> None:
    dumped = compiled(folder, "full", *PINS)
    shutil.copytree(folder / "full", folder / "bare")
    for name in ("costs.json", "profile.json", "program.json"):
        (folder / "bare" / name).unlink()
    assert after(folder / "bare", "codegen") == dumped["codegen"]

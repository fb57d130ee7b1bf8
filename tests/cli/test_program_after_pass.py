"""`fxpipe compile --after PASS`: the program that the compile has after each pass; nothing is written."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import QUICK, fxpipe, unchanged
from fxpipe.passes import pass_names
from model_files import write_model

from fxpipe.ir.transform import CAPTURE

OPTIONS = ("--schedule", "zb-h1", "--microbatches", 2, "--recompute", "full", "--codec", "int8", "--dp", 2)
RARE = {"scale_loss"}
"""What does not run with these options: it is for float16 on CUDA."""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model file in the working directory, with metrics of training and of evaluations."""
    monkeypatch.chdir(tmp_path)
    path = write_model(
        tmp_path,
        ("randn(4, 6)", "randn(256, 6)"),
        ("(4,)", "(256,)"),
        ('return F.cross_entropy(model(batch["x"]), batch["y"])', 'x = F.cross_entropy(model(batch["x"]), batch["y"])\n'
         '    return x, {"twice": 2 * x}'),
    )  # fmt: skip
    evaluated = "def eval_data():\n    return train_data()[:1]"
    measured = 'def metrics(model, batch):\n    return {"mean": model(batch["x"]).mean()}'
    path.write_text(f"{path.read_text()}\n\n{evaluated}\n\n\n{measured}\n")
    return path


def test_it_is_what_the_compile_has(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("FXPIPE_DUMP", "dump")
        made = fxpipe("compile", "model.py", *QUICK, *OPTIONS)
    assert made.code == 0, made.err
    dumped = {f.stem.partition("_")[2]: f.read_text() for f in Path("dump").glob("[0-9]*")}
    evaluated = {f.stem.split("_", 3)[3]: f.read_text() for f in Path("dump").glob("evaluate_0_*")}
    assert {*dumped, *evaluated} | RARE == set(pass_names())
    with unchanged(model.parent):
        for name in ("fold", "encode", "place_evaluation"):
            found = fxpipe("compile", "model.py", *QUICK, *OPTIONS, "--after", name)
            assert (found.code, found.out) == (0, {**evaluated, **dumped}[name]), name
        found = fxpipe("compile", "model.py", *QUICK, *OPTIONS, "--after", CAPTURE, "--json").json
        assert found["after"] == CAPTURE
        assert found["program"].startswith("# CAPTURED: ")


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("--after", "rematerialise"), 1, "there is no pass 'rematerialise', did you mean 'rematerialize'"),
        (("--after", "rematerialise"), 1, f"the passes, in their order: {', '.join((CAPTURE, *pass_names()))}"),
        (("--after", "encode"), 1, "encode does not run here: it needs edges with codecs"),
        (("--after", "split_backward"), 1, "the passes that run, in their order: capture, fold, whole_loss"),
        (("--after", "cut", "--verify"), 2, "leave out --verify"),
    ],
)
def test_requests_that_make_no_sense(model: Path, options: tuple[str, ...], code: int, message: str) -> None:
    found = fxpipe("compile", "model.py", *QUICK, "--microbatches", 2, *options)
    assert (found.code, found.out) == (code, "")
    assert message in found.err

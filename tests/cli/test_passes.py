"""`fxpipe passes` runs passes on the programs that a build keeps; `fxpipe compile --after PASS` prints one of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from commands import QUICK, fxpipe, unchanged
from model_files import write_model

from fxpipe.cli.passes import CAPTURE, documented
from fxpipe.passes import every_pass

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
    assert {*dumped, *evaluated} | RARE == set(every_pass())
    with unchanged(model.parent):
        assert fxpipe("passes", "build", "--after", "encode", "--print").out == dumped["encode"]
        evaluation = fxpipe("passes", "build/program.json", "--of", "evaluation 0", "--print")
        assert evaluation.out == evaluated["codegen"]
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
        (("--after", "rematerialise"), 1, f"the passes, in their order: {', '.join((CAPTURE, *every_pass()))}"),
        (("--after", "encode"), 1, "encode does not run here: it needs edges with codecs"),
        (("--after", "split_backward"), 1, "the passes that run, in their order: capture, next_to, fold"),
        (("--after", "cut", "--verify"), 2, "leave out --verify"),
    ],
)
def test_requests_that_make_no_sense(model: Path, options: tuple[str, ...], code: int, message: str) -> None:
    found = fxpipe("compile", "model.py", *QUICK, "--microbatches", 2, *options)
    assert (found.code, found.out) == (code, "")
    assert message in found.err


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built")
    model = write_model(folder, ("randn(4, 6)", "randn(8, 6)"), ("(4,)", "(8,)"))
    assert fxpipe("compile", model, *QUICK, "--microbatches", 2, "-o", folder / "build").code == 0
    return folder / "build"


def test_any_list_runs(built: Path) -> None:
    with unchanged(built):
        steps = fxpipe("passes", built, "-p", "fold, units").out.splitlines()
        assert [line.split()[0] for line in steps] == ["fold", "units"]
        text = fxpipe("passes", built / "program.json", "-p", "fold,units", "--print").out
        assert text.startswith("# NUMBERED: ")
        cut = 'fold,units,cost,cut{"cuts": {"forward": [0, 1, UNITS], "backward": [0, 1, UNITS]}}'
        units = re.search(r"(\d+) units", text)
        assert units is not None
        facts = fxpipe("passes", built, "-p", cut.replace("UNITS", units[1]), "--print", "--json").json
        assert [line.split()[0] for line in facts["passes"]] == ["fold", "units", "cost", "cut"]
        assert "w1" in facts["program"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("-p", "fold,untis"), "there is no pass 'untis', did you mean 'units'"),
        (("-p", "fold,cut"), "pass cut takes a program that is COSTED, but this one is FOLDED"),
        (("-p", 'fold,whole_loss{"micro": 4}'), "its options: microbatches, weighted, checked, accepted, unlike"),
        (("-p", 'fold{"a"'), "the options of fold are not JSON"),
        (("-p", "fold{} units"), "a comma is missing before 'units'"),
        (("--of", "evaluations"), "one of: training, totals"),
        (("-p", "fold", "--after", "fold"), "give one of them"),
        (("--after", "encode"), "encode does not run here: it needs edges with codecs"),
    ],
)
def test_lists_that_cannot_run(built: Path, options: tuple[str, ...], message: str) -> None:
    found = fxpipe("passes", built, *options)
    assert found.code in (1, 2)
    assert message in found.err


def test_every_pass_is_listed_with_its_levels() -> None:
    rows = [(name, step.requires.name, step.provides.name) for name, step in every_pass().items()]
    assert [row[:3] for row in documented()] == rows
    listed = fxpipe("passes").out
    assert all(re.search(rf"^{name} +{takes}( → {gives})?: ", listed, re.M) for name, takes, gives in rows)
    assert [tuple(row.values())[:3] for row in fxpipe("passes", "--json").json["passes"]] == rows
    assert "need PROGRAM" in fxpipe("passes", "-p", "fold").err

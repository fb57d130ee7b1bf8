"""`compile_options` and `run_options` of a model file: what holds where the command line says nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import QUICK, fxpipe
from model_files import write_model

HOOKS = """

def train_data():
    torch.manual_seed(7)
    return [{"x": torch.randn(4, 6), "y": torch.randint(0, 3, (4,))} for _ in range(6)]


compile_options = {"microbatches": 2, "schedule": "1f1b", "seed": 3, "codec": None}
run_options = {"epochs": 2, "clip_norm": 0.5, "seed": 7, "eval_every": "epoch", "keep_going": True}
"""
EVALUATES = """

def eval_data():
    return train_data()


def metrics(model, batch):
    return {"loss": loss(model, batch)}
"""


def written(folder: Path, more: str = EVALUATES) -> Path:
    model = write_model(folder)
    model.write_text(model.read_text() + HOOKS + more)
    return model


def compiled(model: Path, *more: object) -> dict[str, object]:
    made = fxpipe("compile", model, "-n", 2, "-o", model.parent / "build", *QUICK, *more)
    assert made.code == 0, made.err
    asked = "model.py gives --microbatches 2 --schedule 1f1b --seed 3\nmodel.py gives runs --epochs 2 --clip-norm 0.5"
    assert more or f"{asked} --seed 7 --eval-every epoch --keep-going" in made.err
    return json.loads((model.parent / "build" / "plan.json").read_text())


def test_a_file_says_what_the_command_line_does_not(tmp_path: Path) -> None:
    plan = compiled(written(tmp_path))
    assert (plan["schedule"], plan["microbatches"]) == ("1f1b", 2)
    run = ("run", tmp_path / "build", "--local", "--json")
    found = fxpipe(*run, "--out", tmp_path / "out")
    assert "model.py gives --epochs 2 --clip-norm 0.5 --seed 7 --eval-every epoch --keep-going" in found.err
    assert (found.json["steps"], len(found.json["evaluations"])) == (12, 2)
    said = ("--steps", 12, "--clip-norm", 0.5, "--seed", 7)
    (tmp_path / "same").mkdir()
    model = written(tmp_path / "same", "\n\ncompile_options, run_options = {}, {}")
    same = ("--microbatches", 2, "--schedule", "1f1b", "--seed", 3)
    compiled(model, *same)
    asked = fxpipe("run", model.parent / "build", "--local", "--json", *said, "--out", tmp_path / "asked").json
    assert asked["losses"] == found.json["losses"]
    more = fxpipe(*run, "--steps", 3, "--clip-norm", 2.0, "--checkpoint-every", 2, "--out", tmp_path / "more")
    assert (more.json["steps"], more.json["clip_norm"]) == (3, 2.0)
    on = fxpipe(*run, "--steps", 5, "--resume", "--out", tmp_path / "more")
    assert (on.json["steps"], on.json["clip_norm"]) == (5, 2.0)  # the checkpoint's


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("", "hint: define eval_data() and metrics(model, batch)"),
        (EVALUATES.replace("loss(model, batch)", "float(loss(model, batch))"), "hint: fix that and compile again"),
    ],
)
def test_evaluations_that_a_build_does_not_have_are_refused(more: str, said: str, tmp_path: Path) -> None:
    compiled(written(tmp_path, more))
    made = fxpipe("run", tmp_path / "build", "--local", "--out", tmp_path / "out")
    assert made.code != 0
    text = " ".join(made.err.split())
    assert "--eval-every needs a build with evaluation, and this one has none" in text
    assert said in text
    assert not (tmp_path / "out").exists()


def test_a_plan_is_for_what_compile_would_do(tmp_path: Path) -> None:
    """The command line is first here, too; what is chosen or compared is not the file's."""
    model = written(tmp_path, "\n\ncompile_options |= {'cuts': 'same', 'workers': 3}")
    found = fxpipe("plan", model, "--json", *QUICK)
    assert "model.py gives --microbatches 2 --schedule 1f1b --seed 3 --cuts same --workers 3\n" in found.err
    assert "bidirectional" not in found.json
    assert len(found.json["same"]["memory_bytes"]) == 3
    asked = ("--cuts", "bidirectional", "-n", 2, "--schedule", "1f1b", "--microbatches", 2)
    more = fxpipe("plan", model, "--json", *asked, *QUICK)
    assert "gives --seed 3\n" in more.err
    assert len(more.json["bidirectional"]["memory_bytes"]) == 2
    both = fxpipe("plan", model, "--json", "--compare", *QUICK)
    assert {row["microbatches"] for row in both.json["schedules"]} == {2}
    assert len({row["schedule"] for row in both.json["schedules"]}) > 1
    assert fxpipe("plan", model, "--json", "--gpus", 2, *QUICK).code == 0


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            'compile_options = {"microbatch": 2}',
            "compile_options has 'microbatch', which is not an option, did you mean",
        ),
        ('run_options = {"epochs": 0}', "run_options has epochs=0: 0 is not in the range x>=1"),
        ('run_options = {"eval_every": "often"}', "run_options has eval_every='often': 'often' is not a number of"),
        ('run_options = {"keep_going": 3}', "run_options has keep_going=3"),
        ('run_options = {"epochs": [2]}', "run_options has epochs=[2]"),
        ("run_options = 3", "run_options is int, not a dictionary of options"),
    ],
)
def test_mistakes_are_said_by_compile(line: str, said: str, tmp_path: Path) -> None:
    made = fxpipe("compile", written(tmp_path, f"\n\n{line}"), "-n", 2, "-o", tmp_path / "build", *QUICK)
    assert made.code != 0
    assert said in " ".join(made.err.split())


def test_a_build_whose_options_have_changed_is_refused(tmp_path: Path) -> None:
    compiled(written(tmp_path))
    plan = json.loads((tmp_path / "build" / "plan.json").read_text())
    assert plan["model_file"]["run_options"]["epochs"] == 2
    from fxpipe.errors import TaskError
    from fxpipe.plan.build_folder import load_plan
    from fxpipe.task.model_file import task_of_build

    (tmp_path / "other.py").write_text((tmp_path / "model.py").read_text() + "\nrun_options = {'epochs': 3}\n")
    with pytest.raises(TaskError, match="other values of clip_norm, epochs, eval_every, keep_going, seed than"):
        task_of_build(load_plan(tmp_path / "build"), str(tmp_path / "build"), str(tmp_path / "other.py"))

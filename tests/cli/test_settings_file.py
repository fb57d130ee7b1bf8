"""`fxpipe.toml`: options of compiles and runs, and settings, after the command line and before the model file."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import QUICK, finish, free_port, fxpipe, start_module
from model_files import write_model

MODEL = """
import fxpipe


def train_data():
    torch.manual_seed(7)
    return [{"x": torch.randn(4, 6), "y": torch.randint(0, 3, (4,))} for _ in range(6)]


def optimizer(named_parameters):
    return torch.optim.SGD([p for _, p in named_parameters], lr=fxpipe.setting("lr", 0.1))


compile_options = {"microbatches": 1, "seed": 3}
run_options = {"epochs": 2, "clip_norm": 0.5, "seed": 7}
"""
FILE = """\
[compile]
workers = 2
microbatches = 2
fp_cut = ["blocks.2"]
bandwidth = "10Gbit"

[run]
steps = 3
clip-norm = 1

[set]
lr = 0.01
"""


def written(folder: Path, file: str | None = FILE) -> Path:
    model = write_model(folder)
    model.write_text(model.read_text() + MODEL)
    if file is not None:
        (folder / "fxpipe.toml").write_text(file)
    return model


def compiled(model: Path, *more: object) -> tuple[str, Any]:
    """What a compile says, and its plan."""
    made = fxpipe("compile", model, "-o", model.parent / "build", *QUICK, *more)
    assert made.code == 0, made.err
    return made.err, json.loads((model.parent / "build" / "plan.json").read_text())


def configuration(*command: object) -> tuple[dict[str, Any], list[str]]:
    """What --print-config prints, as TOML and its lines."""
    made = fxpipe(*command, "--print-config")
    assert made.code == 0, made.err
    return tomllib.loads(made.out), made.out.splitlines()


def test_the_file_is_between_the_command_line_and_the_model_file(tmp_path: Path) -> None:
    model = written(tmp_path)
    said, plan = compiled(model)
    given = "--workers 2 --microbatches 2 --fp-cut blocks.2 --bandwidth 10Gbit --set lr=0.01"
    assert f"fxpipe.toml gives {given}\n" in said
    assert "model.py gives --seed 3\n" in said
    (step,) = plan["steps"]
    assert (plan["microbatches"], step["stages"][1]["forward_units"][0]) == (2, step["units"].index("blocks.2"))
    run = ("run", tmp_path / "build", "--local", "--json")
    found = fxpipe(*run, "--out", tmp_path / "out")
    assert "fxpipe.toml gives --steps 3 --clip-norm 1 --set lr=0.01\n" in found.err
    assert "model.py gives --seed 7\n" in found.err
    assert (found.json["steps"], found.json["clip_norm"], found.json["seed"]) == (3, 1.0, 7)
    assert found.json["settings"] == {"lr": 0.01}
    said = fxpipe(*run, "--epochs", 1, "--set", "lr=0.02", "--seed", 1, "--out", tmp_path / "said").json
    assert (said["steps"], said["clip_norm"], said["seed"], said["settings"]) == (6, 1.0, 1, {"lr": 0.02})
    found, _ = configuration("compile", model, "--cuts", "same", "--microbatches", 1)
    assert found["compile"] == {"workers": 2, "cuts": "same", "microbatches": 1, "seed": 3, "bandwidth": "10Gbit"}


def test_a_comment_says_what_an_option_without_a_value_takes(tmp_path: Path) -> None:
    _, lines = configuration("compile", written(tmp_path, None), "--config", "none")
    assert lines[0].startswith("# Options of this compile. Save as fxpipe.toml next to the model file; ")
    assert {*lines} >= {"# fp-cut = MODULE  # default", "# device = [cpu|cuda|mps]  # default: the model's"}


def test_another_file_or_none(tmp_path: Path) -> None:
    model = written(tmp_path)
    (tmp_path / "other.toml").write_text("[compile]\nmicrobatches = 4\nscan = 1")
    found, _ = configuration("compile", model, "--config", tmp_path / "other.toml")
    assert found == {"compile": {"microbatches": 4, "scan": 1, "seed": 3}}
    found, _ = configuration("compile", model, "--config", "none")
    assert found == {"compile": {"microbatches": 1, "seed": 3}}
    missing = fxpipe("compile", model, "--config", tmp_path / "missing.toml")
    assert missing.code == 1
    assert "missing.toml cannot be read" in missing.err


def test_a_run_that_goes_on_keeps_what_it_began_with(tmp_path: Path) -> None:
    compiled(written(tmp_path, "[run]\nsteps = 2\nclip-norm = 1.0\ncheckpoint-every = 1\n[set]\nlr = 0.01"), "-n", 2)
    run = ("run", tmp_path / "build", "--local", "--json", "--out", tmp_path / "out")
    assert fxpipe(*run).json["clip_norm"] == 1.0
    (tmp_path / "fxpipe.toml").write_text('[run]\nsteps = 4\nclip-norm = 2.0\nweights = "w"\n[set]\nlr = 0.5')
    on = fxpipe(*run, "--resume").json
    assert (on["steps"], on["clip_norm"], on["settings"]) == (4, 1.0, {"lr": 0.01})


@pytest.mark.parametrize(
    ("file", "said"),
    [
        (
            "[compile]\nmicrobatch = 2",
            "[compile] has 'microbatch', which is not an option, did you mean 'microbatches'",
        ),
        ("[run]\nclip_nrom = 2", "[run] has 'clip-nrom', which is not an option, did you mean 'clip-norm'"),
        ("[runs]\nsteps = 2", "fxpipe.toml has 'runs', which is not a table of options, did you mean 'run'"),
        ("steps = 2", "fxpipe.toml has 'steps', which is not a table of options"),
        ('[run]\nclip-norm = "1.0"', "[run] has clip-norm='1.0': this is not a number"),
        ("[run]\nsteps = true", "[run] has steps=True: this is not a number"),
        ("[run]\nsteps = 1.5", "[run] has steps=1.5: '1.5' is not a valid"),
        ("[run]\nsteps = 0", "[run] has steps=0: 0 is not in the range x>=1"),
        ("[run]\nlocal = 1", "[run] has local=1: this is not true or false"),
        ("[run]\npolicy = [1]", "[run] has policy=[1]: this is not text"),
        ('[compile]\nfp-cut = "blocks.2"', "[compile] has fp-cut='blocks.2': this is no list"),
        ("[compile]\npad-to = 2\npad_to = 2", "fxpipe.toml has 'pad-to' twice"),
        ("[run]\nresume = 'newest'", "[run] has 'resume', which is not an option"),
        ("[set]\nlr = [1]", "[set] has lr=[1], which is not a number, a text, true or false"),
        ("[set]\nlrr = 0.1", "the model file reads no setting 'lrr', did you mean 'lr'"),
        ("[run]\nsteps = \n", "fxpipe.toml:2"),
    ],
)
def test_mistakes(file: str, said: str, tmp_path: Path) -> None:
    made = fxpipe("compile", written(tmp_path, file), "-n", 2, "-o", tmp_path / "build", *QUICK)
    assert made.code == 1
    assert said in " ".join(made.err.split())
    assert "fxpipe.toml" in made.err


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: path.symlink_to("away.toml"), "it is a link to away.toml, which is not there"),
        (os.mkfifo, "it is not a file"),
        (Path.mkdir, "Is a directory"),
    ],
)
def test_what_is_no_file_is_not_passed_over(make: Callable[[Path], None], said: str, tmp_path: Path) -> None:
    make(tmp_path / "fxpipe.toml")
    made = fxpipe("compile", written(tmp_path, None), "-n", 2, "-o", tmp_path / "build", *QUICK)
    assert made.code == 1
    assert f"fxpipe.toml cannot be read: {said}" in made.err


def test_a_file_may_begin_with_a_mark(tmp_path: Path) -> None:
    """Some editors write it before the text."""
    (tmp_path / "fxpipe.toml").write_text("[run]\nsteps = 1.5", encoding="utf-8-sig")
    made = fxpipe("compile", written(tmp_path, None), "-n", 2, "-o", tmp_path / "build", *QUICK)
    assert "[run] has steps=1.5: '1.5' is not a valid" in made.err


def test_the_configuration_of_a_compile_goes_round(tmp_path: Path) -> None:
    model = written(tmp_path)
    command = ("compile", model, "-o", tmp_path / "build", *QUICK)
    typed = ("--speed", "1,0.5", "--schedule", "1f1b", "--microbatch-dims", "batch['x']=0,batch['y']=0", "--verify")
    found, lines = configuration(*command, *typed, "--set", "lr=0.3")
    assert not (tmp_path / "build").exists()
    for line in (
        "workers = 2  # fxpipe.toml",
        'speed = "1,0.5"  # command line',
        "seed = 3  # model.py",
        "verify = true  # command line",
        'fp-cut = ["blocks.2"]  # fxpipe.toml',
        "# dp = 1  # default",
        "# device = [cpu|cuda|mps]  # default: the model's",
        "lr = 0.3  # command line",
    ):
        assert line in lines
    (tmp_path / "fxpipe.toml").write_text("\n".join(lines))
    again, lines = configuration("compile", model)
    assert again == found
    assert "seed = 3  # fxpipe.toml" in lines
    by_hand = compiled(written(tmp_path / "typed"), *typed[:-1], "--set", "lr=0.3")[1]
    assert fxpipe("compile", model).code == 0
    assert json.loads((tmp_path / "build" / "plan.json").read_text()) == by_hand


def test_the_configuration_of_a_run_goes_round(tmp_path: Path) -> None:
    compiled(written(tmp_path, None), "-n", 2)
    typed = ("--clip-norm", 2, "--policy", "stash", "--log", "tensorboard=a b", "--peak", "1T", "--steps", 2)
    command = ("run", tmp_path / "build", "--local", *typed, "--ema", 0.5, "--out", tmp_path / "out")
    found, lines = configuration(*command)
    assert not (tmp_path / "out").exists()
    assert {*lines} >= {"clip-norm = 2.0  # command line", "seed = 7  # model.py", 'peak = "1T"  # command line'}
    assert found["run"].keys() == {"steps", "seed", "clip-norm", "policy", "ema", "local", "out", "log", "peak"}
    (tmp_path / "fxpipe.toml").write_text("\n".join(lines))
    assert configuration("run", tmp_path / "build")[0] == found
    (tmp_path / "fxpipe.toml").write_text("[run]\nsteps = 2\nepochs = 1")
    assert "--steps and --epochs both set the length of the run" in fxpipe("run", tmp_path / "build").err


def test_what_no_table_has_is_a_comment(tmp_path: Path) -> None:
    """The arguments after two dashes, and what a run keeps of its build."""
    model = written(tmp_path, None)
    compiled(model, "-n", 2, "--set", "lr=1e-3", "--", "--width", "6 4\n")
    run = ("run", tmp_path / "build", "--print-config")
    kept = r"""# arguments after -- = "--width '6 4\n'"  # build"""
    for command, rows in (
        (run, ['# lr = "1e-3"  # build', kept]),
        (
            (*run, "--set", "lr=true", "--", "-x"),
            ["lr = true  # command line", '# arguments after -- = "-x"  # command line'],
        ),
        ((*run, "--set", "lr=-2", "--"), ["lr = -2  # command line"]),
    ):
        made = fxpipe(*command)
        assert made.out.splitlines()[-len(rows) :] == rows
        tomllib.loads(made.out)
    assert 'arguments after -- = "-y"  # command line' in fxpipe("compile", model, "--print-config", "--", "-y").out


def test_what_another_build_gives_goes_round(tmp_path: Path) -> None:
    model = written(tmp_path, None)
    assert 'replicas = "2,1,1"  # command line' in configuration("compile", model, "--replicas", "2,1,1")[1]
    compiled(model, "-n", 2, "--schedule", "1f1b", "--microbatches", 2)
    found, lines = configuration("compile", model, "-n", 3, "--like", tmp_path / "build")
    assert {*lines} >= {'schedule = "1f1b"  # build', "microbatches = 2  # build", "seed = 3  # model.py"}
    (tmp_path / "fxpipe.toml").write_text("\n".join(lines))
    assert configuration("compile", model)[0] == found


def test_a_plan_reads_the_file(tmp_path: Path) -> None:
    model = written(tmp_path, FILE.replace('fp_cut = ["blocks.2"]\n', ""))
    planned = fxpipe("plan", model, *QUICK, "--json")
    assert "fxpipe.toml gives --workers 2 --microbatches 2 --bandwidth 10Gbit --set lr=0.01\n" in planned.err
    typed = ("-n", 2, "--microbatches", 2, "--bandwidth", "10Gbit", "--config", "none")
    assert planned.json == fxpipe("plan", model, *QUICK, *typed, "--json").json


@pytest.mark.slow
@pytest.mark.multiproc
def test_every_process_of_torchrun_reads_the_file(tmp_path: Path) -> None:
    compiled(written(tmp_path, "[run]\nsteps = 2\nclip-norm = 0.25\nseed = 5"), "-n", 2, "--schedule", "1f1b")
    torchrun = ("torch.distributed.run", "--nproc-per-node", 2, "--master-port", free_port())
    done = finish(start_module(*torchrun, "-m", "fxpipe", "run", tmp_path / "build", "--out", tmp_path / "out"), 120)
    assert done.code == 0, done.err
    assert done.err.count("fxpipe.toml gives") == 1
    found = json.loads((tmp_path / "out" / "run.json").read_text())
    assert (found["steps"], found["clip_norm"], found["seed"]) == (2, 0.25, 5)

"""Help is instant and shows examples that work; exit codes tell whose fault it was."""

from __future__ import annotations

import re
import subprocess
import sys

import click
import pytest
from commands import fxpipe

from fxpipe.cli.command import Command
from fxpipe.cli.cost_options import CostOptions
from fxpipe.cli.main import cli
from fxpipe.lowering.options import CompileOptions
from fxpipe.options import flags
from fxpipe.policy import POLICIES
from fxpipe.runtime.options import RunOptions
from fxpipe.schedule import SCHEDULES
from fxpipe.task.model_options import ModelOptions

COMMANDS = sorted(cli.commands)
TWO_TIERS = ("compile", "export", "plan", "run")
HEAVY = {"torch", "numpy", "safetensors", "rich", "networkx", "scipy", "sympy"}


def test_the_commands() -> None:
    assert COMMANDS == ["compare", "compile", "diff", "doctor", "explain", "export", "inspect", "passes", "plan", "run"]


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], *([name, "--help"] for name in COMMANDS)])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "fxpipe", *arguments], capture_output=True, text=True, check=True
    )
    imported = {line.rpartition("|")[2].strip().split(".")[0] for line in done.stderr.splitlines()}
    assert {"click", "fxpipe"} <= imported, "-X importtime is not understood"
    assert not imported & HEAVY
    assert "fxpipe" in done.stdout


def test_help_says_what_the_commands_are() -> None:
    result = fxpipe("--help")
    assert result.code == 0
    assert result.err == ""
    for name, command in cli.commands.items():
        assert command.help
        assert re.search(rf"^  {name}  +\S", result.out, re.M), "listed with its first sentence"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_example_in_the_help_is_understood(name: str) -> None:
    text = fxpipe(name, "--help-all").out
    examples = re.findall(rf"^ +(?:.*--no-python )?fxpipe {name}(.*)$", text, re.M)
    assert examples
    for example in examples:
        cli.commands[name].make_context(name, example.split())  # or it raises a usage error


@pytest.fixture(autouse=True)
def _columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_short_and_names_the_rest(name: str) -> None:
    lines, command = fxpipe(name, "--help").out.splitlines(), cli.commands[name]
    assert isinstance(command, Command)
    assert len(lines) <= 40
    assert (f"{name} --help-all" in lines[-1]) == (name in TWO_TIERS)
    if name in TWO_TIERS:
        assert sum(line.startswith("  ") and f"fxpipe {name} " in line for line in lines) == 2
        assert len(command.first) <= 12
        indented = [line for line in lines if line.startswith("  ")]
        assert len(indented) == len(command.first) + 2 + 3, "a line an option; examples, description"
        for option in command.first:
            assert any(re.match(rf"  (-\w, )?{option.opts[-1]} .*\w", line) for line in indented)


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("compile", ("--bp-cut", "--policy", "--codec", "--bandwidth", "--latency", "--links")),
        ("run", ("--patience", "--schedule", "--policy", "--throttle")),
    ],
)
def test_help_names_what_the_pages_lead_to(name: str, flags: tuple[str, ...]) -> None:
    lines = fxpipe(name, "--help").out.splitlines()
    assert lines[-2] == f"Also {', '.join(flags)}, …"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_in_one_group(name: str) -> None:
    command = cli.commands[name]
    assert isinstance(command, Command)
    assert len(command.groups) <= 8
    listed = [option for options in command.groups.values() for option in options]
    assert sorted(map(id, listed)) == sorted(id(one) for one in command.params if isinstance(one, click.Option))
    assert {id(option) for option in command.first} <= set(map(id, listed))
    text = fxpipe(name, "--help-all").out
    if name not in TWO_TIERS:
        assert text == fxpipe(name, "--help").out
        return
    for title, options in command.groups.items():
        section = text.partition(f"\n{title}:\n")[2].partition("\n\n")[0].rstrip()
        shown = re.split(r"^  (?=-)", section, flags=re.M)[1:]
        assert [re.split("[ ,\n]", one)[0] for one in shown] == [option.opts[0] for option in options]
        for one in shown:
            assert one.rstrip().count("\n") <= 2, f"more than two lines for {one}"


def test_every_field_is_an_option() -> None:
    for name, *classes in (("compile", CompileOptions, ModelOptions, CostOptions), ("run", RunOptions)):
        known = {one.name for one in cli.commands[name].params}
        assert {field for kind in classes for field in flags(kind)} <= known


def test_the_names_that_options_take_are_said() -> None:
    text = re.sub(r"-\s+", "-", fxpipe("compile", "--help-all").out)  # lines are broken after a dash
    assert [name for name in (*SCHEDULES, *POLICIES) if not re.search(rf"\b{name}\b", text)] == []
    text = fxpipe("run", "--help-all").out
    assert [name for name in POLICIES if not re.search(rf"\b{name}\b", text)] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_explained(name: str) -> None:
    for parameter in cli.commands[name].params:
        if isinstance(parameter, click.Option):
            assert parameter.help, parameter.name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compile"], "Missing argument 'MODEL'"),
        (["compile", "model.py", "-n", "0"], "0 is not in the range"),
        (["compile", "model.py", "--cuts", "some"], "'some' is not one of"),
        (["compile", "model.py", "--cuts", "same", "--fp-cut", "norm"], "give one of them"),
        (["run", "build", "--stesp", "3"], "--steps"),
        (["run", "build", "--log-stalenes"], "Did you mean one of: '--log-staleness'"),
        (["run", "build", "--steps", "3", "--epochs", "1"], "--steps and --epochs both set the length of the run"),
        (["trian"], "No such command 'trian'"),
        ([], "Usage: fxpipe"),
    ],
)
def test_a_wrong_request_exits_with_2(arguments: list[str], message: str) -> None:
    result = fxpipe(*arguments)
    assert result.code == 2
    assert message in result.err
    assert result.out == ""

"""Help is instant and shows examples that work; exit codes tell whose fault it was."""

from __future__ import annotations

import re
import subprocess
import sys

import click
import pytest
from commands import fxpipe
from fxpipe.cli.main import cli

COMMANDS = sorted(cli.commands)
HEAVY = {"torch", "numpy", "safetensors", "rich", "networkx", "scipy", "sympy"}


def test_the_commands() -> None:
    assert COMMANDS == ["compare", "compile", "diff", "doctor", "explain", "export", "inspect", "plan", "run", "sweep"]


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
    text = fxpipe(name, "--help").out
    examples = re.findall(rf"^ +(?:.*--no-python )?fxpipe {name}(.*)$", text, re.M)
    assert examples
    for example in examples:
        cli.commands[name].make_context(name, example.split())  # or it raises a usage error


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
        (["run", "build", "--steps", "3", "--epochs", "1"], "--steps and --epochs exclude each other"),
        (["trian"], "No such command 'trian'"),
        ([], "Usage: fxpipe"),
    ],
)
def test_a_wrong_request_exits_with_2(arguments: list[str], message: str) -> None:
    result = fxpipe(*arguments)
    assert result.code == 2
    assert message in result.err
    assert result.out == ""

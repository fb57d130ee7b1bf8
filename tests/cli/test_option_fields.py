"""Fields of options become flags; an unknown option is refused by name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from fxpipe.cli.command import option_fields
from fxpipe.errors import FxpipeError, PolicyError
from fxpipe.options import changed, option
from fxpipe.policy import policy_option


@dataclass(frozen=True)
class Some:
    workers: int = option(2, "-n", "--workers", minimum=1, help="Number of stages.")
    steps: int | None = option(None, "--steps", minimum=1, help="How many.")
    at: tuple[str, ...] = option((), "--cut", metavar="PATH", help="Where.")
    norm: float | None = option(None, kind=float, above=0, help="At most this.")
    mode: str = option("a", "--mode", choices=("a", "b"), help="Which.")
    dry: bool = option(False, "--dry", help="Only say it.")
    out: str | None = option(None, "--out", on_command_line="out", path="any", help="Where to.")
    policy: str | None = policy_option("none")
    inside: int = 7
    pad_to: int = option(1, help="Multiples of this.")


@click.command()
@option_fields(Some, "workers", "steps", "at", "norm", "mode", "out", "dry", "pad_to", policy="Other words.")
def command(**asked: Any) -> Some:
    return Some(**asked)


def parsed(*arguments: str) -> Some:
    found = command.main(arguments, standalone_mode=False)
    assert isinstance(found, Some)
    return found


def test_values() -> None:
    assert parsed() == Some(out=str(Path("out").absolute()))
    given = parsed("-n", "3", "--cut", "a", "--cut", "b", "--norm", "0.5", "--mode", "b", "--dry", "--policy", "stash")
    assert given == Some(3, None, ("a", "b"), 0.5, "b", True, str(Path("out").absolute()), "stash")


@pytest.mark.parametrize("wrong", [["-n", "0"], ["--norm", "nan"], ["--norm", "0"], ["--mode", "c"]])
def test_wrong_values(wrong: list[str]) -> None:
    with pytest.raises(click.BadParameter):
        parsed(*wrong)


def test_a_kind_of_its_own() -> None:
    with pytest.raises(PolicyError, match="no option 'fast'"):
        parsed("--policy", "stash+fast")


def test_help() -> None:
    lines = [" ".join(line.split()) for line in CliRunner().invoke(command, ["--help"]).output.splitlines()]
    assert lines[3:-1] == [
        "-n, --workers INTEGER RANGE Number of stages. [default: 2; x>=1]",
        "--steps INTEGER RANGE How many. [x>=1]",
        "--cut PATH Where.",
        "--norm FLOAT RANGE At most this. [x>0]",
        "--mode [a|b] Which. [default: a]",
        "--out PATH Where to. [default: out]",
        "--dry Only say it.",
        "--pad-to INTEGER Multiples of this. [default: 1]",
        "--policy NAME[+OPTION] Other words.",
    ]


def test_changed() -> None:
    assert changed(Some(), {"workers": 3, "inside": 8}) == Some(workers=3, inside=8)
    with pytest.raises(FxpipeError, match="no option 'worker', did you mean 'workers'"):
        changed(Some(), {"worker": 3})

"""docs/tutorial is a program; its page is what it prints, and the commands it names work."""

from __future__ import annotations

import difflib
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from by_path import module_at
from commands import QUICK, fxpipe

TUTORIAL = Path(__file__).parents[1] / "docs" / "tutorial"


def printed(*arguments: str) -> str:
    """What the tutorial prints, run from a folder that is not its own."""
    command = [sys.executable, str(TUTORIAL / "tutorial.py"), *arguments]
    return subprocess.run(command, capture_output=True, encoding="utf-8", check=True, cwd=TUTORIAL.parents[1]).stdout


@pytest.fixture(scope="module")
def page() -> ModuleType:
    """`docs/tutorial/page.py`."""
    return module_at(TUTORIAL / "page.py", "tutorial_page")


@pytest.mark.slow
def test_the_page_is_what_the_program_prints() -> None:
    kept, made = (TUTORIAL / "README.md").read_text(encoding="utf-8"), printed("--markdown")
    difference = "\n".join(difflib.unified_diff(kept.splitlines(), made.splitlines(), "README.md", "printed"))
    assert made == kept, f"python docs/tutorial/tutorial.py --markdown > docs/tutorial/README.md\n{difference}"


@pytest.mark.slow
def test_a_terminal_gets_the_same_without_markup() -> None:
    text, page = printed(), (TUTORIAL / "README.md").read_text(encoding="utf-8")
    assert "```" not in text
    assert "Pass 8: comm\n============\n" in text
    blocks = re.findall(r"```\w*\n(.*?)\n```", page, re.S)
    assert len(blocks) > 15
    for block in blocks:
        assert "\n".join(f"    {line}" if line else "" for line in block.split("\n")) in text


def test_every_pass_is_walked_through() -> None:
    from fxpipe.passes import every_pass

    page = (TUTORIAL / "README.md").read_text(encoding="utf-8")
    names = re.findall(r"^## Pass \d+: (\w+)$", page, re.M)
    asked_for = {"next_to", "whole_loss", "encode", "defer", "recompute", "reduce"}  # by options the tutorial lacks
    asked_for |= {"join_metrics", "scale_loss", "merge_equal", "order_evaluation", "place_evaluation"}  # or by hooks
    assert names == [name for name in every_pass() if name not in asked_for]


def test_the_commands_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (TUTORIAL / "README.md").read_text(encoding="utf-8")
    build, run = re.findall(r"^fxpipe (.*)$", page, re.M)
    (tmp_path / "docs" / "tutorial").mkdir(parents=True)
    shutil.copy(TUTORIAL / "letters.py", tmp_path / "docs" / "tutorial")
    monkeypatch.chdir(tmp_path)
    assert fxpipe(*shlex.split(build), *QUICK).code == 0
    losses = fxpipe(*shlex.split(run), "--local", "--json").json["losses"]
    assert losses[-1] < losses[0] / 2


def test_a_long_call_loses_arguments_in_its_middle(page: ModuleType) -> None:
    line = f"x = aten.cat.default({', '.join(f'argument_{i}' for i in range(20))}, [1, 2, 3])  # f32[4]"
    short = page.shortened(line)
    assert len(short) <= page.WIDTH < len(line)
    assert short.startswith("x = aten.cat.default(argument_0, argument_1, ")
    assert short.endswith(", …, [1, 2, 3])  # f32[4]")
    assert page.shortened(short) == short


def test_what_changed_is_folded(page: ModuleType) -> None:
    assert page.changes("a\nb\nc\nd", "a\nb\nx\nd") == "  …\n- c\n+ x\n  …"


def test_lines_that_nobody_wants_are_folded(page: ModuleType) -> None:
    assert page.kept("a1\nb\nc\na2\na3\nd", lambda line: "a" in line) == "a1\n…\na2\na3\n…"

"""Nothing that a stranger named reaches the terminal as more than text: no escape sequence, nothing reordered."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest
from commands import QUICK, Result, finish, fxpipe, start_module
from model_files import write_model

from fxpipe.cli import output
from fxpipe.messages import plain, plain_lines

NASTY = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\u2066\u200f\u2028\x08\x00"
NAMED = NASTY.replace("\x00", "")
_FORBIDDEN = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def clean(result: Result) -> Result:
    for text in (result.out, result.err):
        assert _FORBIDDEN.findall(text) == []
    return result


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stranger's build: names of modules, of files and of metrics, and the source, are nasty."""
    folder = tmp_path_factory.mktemp(f"strange {NAMED}")
    model = write_model(
        folder,
        ("        self.norm =", f"        self.add_module({NAMED!r}, nn.Linear(8, 8))\n        self.norm ="),
        ("return self.head(self.norm(x))", f"return self.head(self.norm(getattr(self, {NAMED!r})(x)))"),
        name=f"model {NAMED}.py",
    )
    hooks = (
        "def eval_data():\n    return train_data()\n\ndef metrics(model, batch):\n    return {NAME: loss(model, batch)}"
    )
    model.write_text(f"{model.read_text()}\n\n{hooks}\n".replace("NAME", repr(NAMED)))
    result = clean(fxpipe("compile", model, "-o", folder / "build", *QUICK))
    assert result.code == 0, result.err
    return folder / "build"


@pytest.mark.parametrize(
    "arguments",
    [
        ("inspect", "BUILD"),
        ("inspect", "BUILD", "--edges"),
        ("inspect", "BUILD", "--depth", 9),
        ("inspect", f"missing {NAMED}", "--stage", 0),
        ("diff", "BUILD", "BUILD"),
        ("diff", "BUILD", f"missing {NAMED}"),
        ("plan", f"missing {NAMED}.py"),
        ("run", "BUILD", "--policy", NAMED),
        ("run", "BUILD", "--weights", f"missing {NAMED}"),
        ("run", f"missing {NAMED}"),
        ("run", "BUILD", "--local", "--steps", 2, "--out", "OUT"),
        ("compare", f"missing {NAMED}", "BUILD"),
        ("export", "BUILD", "-o", "OUT/onnx", "--weights", "initializers", "--trained", f"missing {NAMED}"),
        ("explain", NAMED),
        (NAMED,),
        ("run", f"--{NAMED}"),
        ("compile", f"missing {NAMED}.py", "-o", f"missing {NAMED}"),
    ],
)
def test_no_command_passes_them_on(build: Path, tmp_path: Path, arguments: tuple[object, ...]) -> None:
    named = {"BUILD": str(build), "OUT": str(tmp_path), "OUT/onnx": str(tmp_path / "onnx")}
    result = clean(fxpipe(*(named.get(str(argument), argument) for argument in arguments)))
    assert "owned" in result.out + result.err


@pytest.mark.parametrize("local", [("--local",), pytest.param((), marks=pytest.mark.multiproc)])
def test_errors_of_a_models_code(tmp_path: Path, local: tuple[str, ...]) -> None:
    model = write_model(tmp_path)
    model.write_text(
        model.read_text()
        + f"\n\ndef train_data():\n    yield {{'x': torch.randn(4, 6), 'y': torch.randint(0, 3, (4,))}}\n"
        f"    raise RuntimeError({NASTY!r})\n"
    )
    assert fxpipe("compile", model, "-o", tmp_path / "build", *QUICK, "--scan", 1).code == 0
    result = clean(fxpipe("run", tmp_path / "build", *local, "--steps", 3, "--out", tmp_path / "out"))
    assert result.code == 1
    assert "RuntimeError: ]0;owned" in result.err


def test_a_defect_of_fxpipe_itself(tmp_path: Path) -> None:
    code = (
        f"import fxpipe.cli.main as m\n\ndef fail(asked):\n    raise ValueError({NASTY!r})\n\nm._run = fail\nm.main()\n"
    )
    (tmp_path / "defective.py").write_text(code + "m.main()\n")
    result = clean(finish(start_module("defective", PYTHONPATH=str(tmp_path)), 60))
    assert result.code == 1
    assert result.err.startswith("Traceback")
    assert "ValueError: ]0;owned" in result.err


def test_what_is_dropped_and_what_stays() -> None:
    assert plain(NASTY + "x") == "]0;owned[2J31mx"
    assert plain("naïve 模型 é 🙂 \u00a0 → ½") == "naïve 模型 é 🙂 \u00a0 → ½"
    assert plain("a\tb\nc") == "abc"
    assert plain("\ud800x") == "x", "half of a pair, which no encoding has"
    assert plain_lines("a\nb\r\n") == "a\nb\n"


def test_texts_for_rich_pass_the_filter_too(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stdout", shown)
    output.new_console().print(NASTY + "x")
    assert shown.getvalue() == "]0;owned[2J31mx\n"


@pytest.mark.parametrize(("terminal", "shown"), [(False, NASTY + "x\r\n"), (True, "]0;owned[2J31mx\n")])
def test_a_file_is_shown_as_it_is_but_on_a_terminal(
    terminal: bool, shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    output.echo_file(NASTY + "x\r\n")
    assert capsys.readouterr().out == shown


def test_there_is_one_way_out() -> None:
    """What else writes to a terminal does not know the filter."""
    root = Path(__file__).parents[2]
    allowed = {"cli/output.py", "fxpipe/messages.py", "fxpipe/observe/progress.py"}
    others = [
        str(path.relative_to(root))
        for folder in ("cli", "fxpipe", "passes")
        for path in sorted((root / folder).rglob("*.py"))
        if re.search(r"click\.echo\(|(?<![\w.])print\(|std(out|err)\.write\(|\bConsole\(", path.read_text())
    ]
    assert set(others) <= allowed

"""User code may change the working directory at any time: fxpipe writes and reads where the command was given."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import QUICK, fxpipe, fxpipe_process
from model_files import write_model

from fxpipe import messages
from fxpipe.messages import begin_here, from_here

MOVES = """
import os

MOVE = os.environ.get("MOVE")
os.makedirs("elsewhere", exist_ok=True)
os.makedirs("elsewhere/elsewhere", exist_ok=True)
_as_written = model, train_data


def move(here):
    if MOVE == here:
        os.chdir("elsewhere")


def model():
    move("model")
    return _as_written[0]()


def train_data():
    for number, batch in enumerate(_as_written[1]()):
        move(f"batch {number}")
        yield batch


move("import")
"""


@pytest.mark.slow
@pytest.mark.multiproc
def test_outputs_are_where_the_command_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = write_model(tmp_path)
    model.write_text(model.read_text() + MOVES)
    run = ("run", "build", "--checkpoint-every", 2, "--threads", 1)
    for move in ("never", "import", "model", "batch 0", "batch 2"):
        made = fxpipe_process("compile", "model.py", "-o", "build", "--fp-cut", "blocks.2", *QUICK, MOVE=move)
        assert made.code == 0, made.err
        assert "wrote build: stage_0.py" in made.out + made.err
        for local in ((), ("--local",)):
            out = f"{move} {len(local)}"
            for more in (("--steps", 3), ("--steps", 7, "--resume")):
                ran = fxpipe_process(*run, *more, "--out", out, "--trace", f"{out}/trace.json", *local, MOVE=move)
                assert ran.code == 0, ran.err
                assert f"weights  {out}/model.safetensors\n" in ran.out
            names = ["checkpoints", "metrics.jsonl", "model.safetensors", "run.json", "trace.json"]
            assert sorted(path.name for path in Path(out).iterdir()) == names
            assert Path(out, names[2]).read_bytes() == Path("never 0", names[2]).read_bytes()
    assert [path.name for path in Path("elsewhere").rglob("*")] == ["elsewhere"]


def test_paths_are_shown_as_the_reader_would_write_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "_began", "")
    monkeypatch.chdir(tmp_path)
    begin_here()
    text = f'{tmp_path}/a b/c: File "{tmp_path}/d.py" {tmp_path} {tmp_path}/ /other{tmp_path}/e {tmp_path}f/g'
    assert from_here(text) == f'a b/c: File "d.py" {tmp_path} {tmp_path}/ /other{tmp_path}/e {tmp_path}f/g'
    monkeypatch.chdir("/")
    begin_here()
    assert from_here(text) == text


def test_an_error_names_the_path_that_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert fxpipe("run", "nothing").err.startswith("error: nothing does not exist\n")

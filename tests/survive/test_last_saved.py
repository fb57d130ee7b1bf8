"""A run that an error ends finishes the checkpoints that it writes, and the error names the newest good one."""

from __future__ import annotations

import math
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import QUICK, fxpipe, fxpipe_process
from model_files import write_model

from fxpipe.checkpoint import shard
from fxpipe.checkpoint.manifest import MANIFEST, Manifest
from fxpipe.checkpoint.safetensors_file import write_bytes, write_tensors
from fxpipe.checkpoint.shelf import Shelf, shown_alive
from fxpipe.errors import NotFiniteError, WorkerLost
from fxpipe.observe.out_folder import FINAL_WEIGHTS
from fxpipe.observe.pulse import Pulse, Signs
from fxpipe.runtime.options import RunOptions
from fxpipe.runtime.process import last_saved
from fxpipe.runtime.process.last_saved import finish_writing, last_checkpoint, name_checkpoint
from fxpipe.runtime.process.stall import waited_for_disk

MODEL, OPTIMIZER = (f"{kind}-00001-of-00001.safetensors" for kind in ("model", "optimizer"))


def put(shelf: Shelf, step: int, weight: float = 1.0, moment: float = 1.0) -> Path:
    """A checkpoint of one worker."""
    partial = shelf.partial(step)
    partial.mkdir(parents=True)
    files = {
        name: write_tensors(partial / name, {"weight": torch.tensor([0.0, value])})
        for name, value in ((MODEL, weight), (OPTIMIZER, moment))
    }
    run = {"schedule": "async", "policy": "latest"}
    write_bytes(partial / MANIFEST, Manifest(step, 0, 1, "plan", run, {}, files).to_json().encode())
    shelf.commit(step)
    return shelf.path(step)


def options(tmp_path: Path, **more: Any) -> RunOptions:
    return RunOptions("build", out=str(tmp_path), **more)


def test_what_is_written_is_waited_for(tmp_path: Path) -> None:
    shelf = Shelf.of(tmp_path)
    assert not finish_writing(tmp_path)
    assert not finish_writing(None)
    partial = shelf.partial(5)
    partial.mkdir(parents=True)

    def write() -> None:
        for number in range(8):
            time.sleep(0.1)
            (partial / str(number)).write_bytes(b"x" * number)
        partial.rename(shelf.path(5))

    thread = threading.Thread(target=write)
    thread.start()
    assert finish_writing(tmp_path)
    assert shelf.path(5).is_dir()
    thread.join()


def test_what_nobody_writes_any_more_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_saved, "PATIENCE", 0.3)
    Shelf.of(tmp_path).partial(5).mkdir(parents=True)
    begin = time.monotonic()
    assert finish_writing(tmp_path)
    assert 0.3 <= time.monotonic() - begin < 5
    monkeypatch.setattr(last_saved, "PATIENCE", 60)
    begin = time.monotonic()
    assert finish_writing(tmp_path, most=0.2)
    assert time.monotonic() - begin < 5


def test_a_disk_that_takes_long_over_a_sync_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing changes meanwhile but the time of the folder."""
    monkeypatch.setattr(last_saved, "PATIENCE", 0.6)
    monkeypatch.setattr("fxpipe.checkpoint.shelf.TOUCH", 0.1)
    shelf = Shelf.of(tmp_path)
    shelf.partial(5).mkdir(parents=True)

    def write() -> None:
        with shown_alive(shelf.partial(5)):
            time.sleep(2.0)
        shelf.partial(5).rename(shelf.path(5))

    thread = threading.Thread(target=write)
    thread.start()
    assert finish_writing(tmp_path)
    assert shelf.path(5).is_dir()
    thread.join()


def test_who_still_has_something_to_write_is_waited_for(tmp_path: Path) -> None:
    """Between two checkpoints there is no folder for a moment."""
    shards = [1, 2, 3]
    assert finish_writing(tmp_path, writes=lambda: bool(shards) and bool(shards.pop()))
    assert not shards


def test_a_disk_that_fails_hides_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Shelf) -> list[int]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Shelf, "steps", fails)
    error = WorkerLost("it was killed")
    name_checkpoint(error, options(tmp_path), tmp_path)
    assert error.hint is None


def test_a_run_that_waited_for_the_disk_goes_on(tmp_path: Path) -> None:
    shelf, pulse = Shelf.of(tmp_path), Pulse()
    signs = [Signs.of(pulse.numbers)]
    assert not waited_for_disk(signs, lambda: [Signs.of(pulse.numbers)], str(tmp_path)), "nothing was written"
    for moves in (True, False):
        shelf.partial(5).mkdir(parents=True)

        def write(moves: bool = moves) -> None:
            time.sleep(0.3)
            shelf.partial(5).rmdir()
            if moves:
                pulse.move()

        thread = threading.Thread(target=write)
        thread.start()
        assert waited_for_disk(signs, lambda: [Signs.of(pulse.numbers)], str(tmp_path)) is moves
        thread.join()
        signs = [Signs.of(pulse.numbers)]


def test_lost_steps_are_said_to_be_lost(tmp_path: Path) -> None:
    """Where no checkpoints were asked for; nothing is said if there are final weights."""
    errors = [WorkerLost("it was killed", hint="see above") for _ in range(3)]
    name_checkpoint(errors[0], options(tmp_path), tmp_path)
    assert errors[0].hint == "see above; no weights of this run are saved: --checkpoint-every N saves them on the way"
    name_checkpoint(errors[1], options(tmp_path, checkpoint_every=5), tmp_path)
    (tmp_path / FINAL_WEIGHTS).touch()
    name_checkpoint(errors[2], options(tmp_path), tmp_path)
    assert [error.hint for error in errors[1:]] == ["see above", "see above"]


def test_the_newest_with_all_its_bytes_is_named(tmp_path: Path) -> None:
    shelf, asked = Shelf.of(tmp_path), options(tmp_path)
    assert last_checkpoint(asked, tmp_path) is None
    elsewhere = put(Shelf.of(tmp_path / "other"), 3)
    assert last_checkpoint(options(tmp_path, resume=str(elsewhere)), tmp_path) == str(elsewhere)
    first, second, third = (put(shelf, step) for step in (5, 10, 100))
    assert last_checkpoint(asked, tmp_path) == str(third)
    (third / MODEL).write_bytes(b"")
    assert last_checkpoint(asked, tmp_path) == str(second)
    (second / MODEL).unlink()
    assert last_checkpoint(asked, tmp_path) == str(first)
    error = WorkerLost("it was killed")
    name_checkpoint(error, asked, tmp_path)
    assert error.hint == f"the last good checkpoint is {first}: go on from there with --resume"
    shutil.rmtree(first)
    assert last_checkpoint(asked, tmp_path) is None


def test_none_that_was_spoilt_is_named_where_something_was_not_finite(tmp_path: Path) -> None:
    """Weights can be spoilt some steps before a loss shows it."""
    shelf, asked = Shelf.of(tmp_path), options(tmp_path)
    good = put(shelf, 5)
    middle = put(shelf, 10, moment=math.inf)
    newest = put(shelf, 15, weight=math.nan)
    assert last_checkpoint(asked, tmp_path) == str(newest)
    error = NotFiniteError("the loss is nan", hint="look at the batch")
    name_checkpoint(error, asked, tmp_path)
    assert error.hint == (
        f"look at the batch; the last good checkpoint is {good}: go on from there with --resume, after deleting those "
        f"with numbers that are not finite: {newest}, {middle}"
    )


HARM = """

import os
import time

from fxpipe.checkpoint import shard

write_shard = shard.write_shard


def slowly(*arguments):
    time.sleep(1)
    return write_shard(*arguments)


shard.write_shard = slowly


def train_data():
    for number in range(24):
        x = torch.randn(4, 6)
        if number == 14:
            x = harm(x)
        yield {"x": x, "y": torch.randint(0, 3, (4,))}


def harm(x):
"""
HARMS = {
    "not finite": ("return x * float('nan')", "the loss of step 15 is nan"),
    "an error": ("raise KeyError('row')", "train_data() raised KeyError: 'row'"),
    "standing still": ("time.sleep(1000)", "the run stood still for"),
    "killed": ("time.sleep(4)\n    os.kill(os.getpid(), 9)", "worker 0 was killed by signal 9"),
}


@pytest.mark.slow
@pytest.mark.parametrize("local", [True, pytest.param(False, marks=pytest.mark.multiproc)], ids=["local", "processes"])
@pytest.mark.parametrize("harm", HARMS)
def test_the_error_names_what_was_still_written(
    harm: str, local: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint of step 10 is written when the run ends by step 15."""
    monkeypatch.setattr(shard, "write_shard", shard.write_shard)  # the model file makes it slow, here too
    if local and harm in ("standing still", "killed"):
        pytest.skip("one process has nobody who would see it")
    code, message = HARMS[harm]
    model = write_model(tmp_path)
    model.write_text(f"{model.read_text()}{HARM}    {code}\n")
    result = fxpipe("compile", model, "-o", tmp_path / "build", "--fp-cut", "blocks.2", *QUICK)
    assert result.code == 0, result.err
    out = tmp_path / "out"
    arguments = ("run", tmp_path / "build", "--steps", 20, "--checkpoint-every", 10, "--stall-timeout", 1)
    result = (fxpipe if local else fxpipe_process)(*arguments, "--out", out, *(["--local"] if local else []))
    assert result.code == 1
    assert message in result.err
    assert Shelf.of(out).steps() == [10], result.err
    assert result.err.count("the last good checkpoint is") == 1
    assert f"the last good checkpoint is {out / 'checkpoints' / 'step-10'}: go on from there" in result.err

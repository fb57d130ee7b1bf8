"""One writer a folder: others are refused by name, and no dead writer keeps a folder shut."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import QUICK, files, finish, fxpipe, start_module, wait_for_steps
from model_files import write_model

from fxpipe.errors import BuildError
from fxpipe.plan.lock import LockHolder, build_lock, locked, replacing_alone, run_lock

HOLD = """
import sys, time
from pathlib import Path
from fxpipe.plan.lock import locked
with locked(Path(sys.argv[1]), sys.argv[2], "--out"):
    print("held", flush=True)
    time.sleep(60)
"""
CONTEND = """
import os, sys, time
from pathlib import Path
from fxpipe.errors import BuildError
from fxpipe.plan.lock import locked
lock, inside = Path(sys.argv[1]), Path(sys.argv[2])
while time.time() < float(sys.argv[3]):
    pass
taken = 0
for _ in range(200):
    try:
        with locked(lock, "out", "--out"):
            os.close(os.open(inside, os.O_CREAT | os.O_EXCL))  # fails if another process is inside
            taken += 1
            os.unlink(inside)
    except BuildError:
        pass
print(taken)
"""


def leave(lock: Path, **changed: object) -> None:
    """A lock that a process like this one, but for what is changed, has left."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    lock.write_text(json.dumps(dataclasses.asdict(LockHolder.own()) | changed))


def test_a_living_writer_is_named(tmp_path: Path) -> None:
    lock = run_lock(tmp_path / "out")
    holder = subprocess.Popen([sys.executable, "-c", HOLD, lock, "out"], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    try:
        assert holder.stdout.readline() == "held\n"
        before = files(tmp_path)
        with pytest.raises(BuildError, match=f"out is being written by another process: {holder.pid} on ") as caught:
            locked(lock, "out", "--out").__enter__()
        assert caught.value.where == str(lock)
        assert caught.value.hint == "wait until it ends, or choose another --out"
        assert files(tmp_path) == before
    finally:
        holder.kill()
        holder.communicate()
    assert lock.is_file(), "it was killed, and could not take its lock away"
    with locked(lock, "out", "--out"):
        assert json.loads(lock.read_text())["pid"] == os.getpid()
    assert not lock.exists()


@pytest.mark.parametrize("changed", [{"pid": 2**22 + 1}, {"started": "earlier"}])
def test_a_process_that_is_gone_holds_nothing(tmp_path: Path, changed: dict[str, object]) -> None:
    """The id may have been given to another process since."""
    lock = run_lock(tmp_path)
    leave(lock, **changed)
    with locked(lock, tmp_path, "--out"):
        pass
    assert not lock.exists()


def test_a_process_of_another_host_may_live(tmp_path: Path) -> None:
    lock = run_lock(tmp_path)
    leave(lock, host="elsewhere pid:[1]", pid=2**22 + 1)
    before = files(tmp_path)
    with pytest.raises(BuildError, match="another process: 4194305 on elsewhere, ") as caught:
        locked(lock, tmp_path, "--out").__enter__()
    assert caught.value.hint == (
        f"wait until it ends, or choose another --out; if no process writes there, delete {lock}"
    )
    assert files(tmp_path) == before


@pytest.mark.parametrize("text", ["x", "[]", '{"host": 1}', "[" * 100_000])
def test_a_damaged_lock_says_what_to_delete(tmp_path: Path, text: str) -> None:
    lock = run_lock(tmp_path)
    lock.write_text(text)
    with pytest.raises(BuildError, match="cannot be read") as caught:
        locked(lock, tmp_path, "--out").__enter__()
    assert caught.value.hint == f"if no process writes there, delete {lock}"


def test_a_lock_without_a_word_is_of_a_killed_process(tmp_path: Path) -> None:
    run_lock(tmp_path).touch()
    with locked(run_lock(tmp_path), tmp_path, "--out"):
        pass


def test_it_leaves_nothing(tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"

    def fail() -> None:
        with locked(run_lock(out), out, "--out"), locked(run_lock(out), out, "--out"):
            assert run_lock(out).is_file()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert files(tmp_path) == {}
    with locked(run_lock(out), out, "--out"):
        (out / "metrics.jsonl").touch()
    assert files(tmp_path) == {"new": None, "new/out": None, "new/out/metrics.jsonl": b""}


def test_a_folder_that_is_replaced_has_its_lock_beside_it(tmp_path: Path) -> None:
    build = tmp_path / "build"
    leave(build_lock(build), host="elsewhere")
    with pytest.raises(BuildError, match="build is being written by another process"), replacing_alone(build):
        raise AssertionError
    build_lock(build).unlink()
    with replacing_alone(build) as fresh:
        assert build_lock(build).is_file()
        (fresh / "plan.json").touch()
    assert files(tmp_path) == {"build": None, "build/plan.json": b""}


@pytest.mark.multiproc
def test_one_at_a_time(tmp_path: Path) -> None:
    """Processes that find a stale lock at the same moment: one takes it over."""
    lock, inside = tmp_path / "lock", tmp_path / "inside"
    leave(lock, pid=2**22 + 1)
    command = [sys.executable, "-c", CONTEND, lock, inside, str(time.time() + 1.5)]
    processes = [subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, text=True) for _ in range(4)]
    found = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 4
    assert sum(map(int, found)) > 0
    assert not lock.exists()


@pytest.mark.slow
@pytest.mark.multiproc
def test_a_second_run_into_one_folder(tmp_path: Path) -> None:
    model, build, out = write_model(tmp_path), tmp_path / "build", tmp_path / "out"
    assert fxpipe("compile", model, "-o", build, *QUICK).code == 0
    first = start_module("fxpipe", "run", build, "--steps", 100_000, "--out", out)
    try:
        wait_for_steps(first, out)
        for more in ((), ("--local",)):
            second = fxpipe("run", build, "--steps", 1, "--out", out, *more)
            assert second.code == 1
            assert f"{out} is being written by another process: {first.pid} on " in second.err
        assert "model.safetensors" not in files(out)
        elsewhere = fxpipe("run", build, "--steps", 1, "--out", tmp_path / "other", "--local")
        assert elsewhere.code == 0, elsewhere.err
    finally:
        first.terminate()
        finish(first, 30)
    assert fxpipe("run", build, "--steps", 1, "--out", out, "--local").code == 0
    assert not run_lock(out).exists()

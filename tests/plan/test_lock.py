"""One writer a folder: others are refused by name, and no dead writer keeps a folder shut."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from commands import QUICK, files, finish, fxpipe, start_module, wait_for_steps
from model_files import write_model

from fxpipe.errors import BuildError
from fxpipe.plan.lock import build_lock, locked, replacing_alone, run_lock

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


def holder_of(lock: Path) -> str:
    return lock.with_suffix(".holder").read_text()


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
        assert holder_of(lock).startswith(f"{os.getpid()} on ")
    assert files(tmp_path) == {"out": None}


@pytest.mark.parametrize("text", [b"", b"\xff" * 10, None])
def test_a_holder_may_be_without_a_readable_name(tmp_path: Path, text: bytes | None) -> None:
    """It has taken the lock just now."""
    lock = run_lock(tmp_path)
    with locked(lock, tmp_path, "--out"):
        name = lock.with_suffix(".holder")
        name.unlink() if text is None else name.write_bytes(text)
        with pytest.raises(BuildError, match="is being written by another process"), locked(lock, tmp_path, "--out"):
            raise AssertionError


def test_a_folder_that_was_deleted_and_locked_anew_keeps_its_lock(tmp_path: Path) -> None:
    lock = run_lock(tmp_path / "out")
    with locked(lock, tmp_path, "--out"):
        shutil.rmtree(tmp_path / "out")
        with ThreadPoolExecutor(1) as threads, ExitStack() as held:
            threads.submit(held.enter_context, locked(lock, tmp_path, "--out")).result()
            kept = held.pop_all()
    assert lock.is_file()
    kept.close()
    assert files(tmp_path) == {}


def test_it_leaves_nothing(tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"

    def fail() -> None:
        with locked(run_lock(out), out, "--out", again=True), locked(run_lock(out), out, "--out"):
            assert run_lock(out).is_file()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert files(tmp_path) == {}
    with locked(run_lock(out), out, "--out"):
        (out / "metrics.jsonl").touch()
    assert files(tmp_path) == {"new": None, "new/out": None, "new/out/metrics.jsonl": b""}


def test_another_call_of_this_process_is_refused(tmp_path: Path) -> None:
    """From another thread, and from this one unless the lock was taken for it."""
    lock, refused = run_lock(tmp_path), "being written by this process, in another call"

    def take() -> None:
        with pytest.raises(BuildError, match=refused), locked(lock, tmp_path, "--out"):
            raise AssertionError

    with locked(lock, tmp_path, "--out", again=True):
        with ThreadPoolExecutor(1) as threads:
            threads.submit(take).result()
        with locked(lock, tmp_path, "--out"):
            take()
        with locked(lock, tmp_path, "--out"):
            pass
        if (child := os.fork()) == 0:  # it has a copy of this block, which ends
            os._exit(_left(lock, tmp_path))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert lock.is_file()
    assert not lock.exists()


def _left(lock: Path, folder: Path) -> int:
    """In a copy of a process that holds a lock: 0 if it may not take the lock."""
    try:
        with locked(lock, folder, "--out"):
            return 1
    except BuildError:
        return 0


def test_a_folder_that_is_replaced_has_its_lock_beside_it(tmp_path: Path) -> None:
    build = tmp_path / "build"
    with (
        locked(build_lock(build), build, "-o"),
        pytest.raises(BuildError, match="build is being written by this process"),
        replacing_alone(build),
    ):
        raise AssertionError
    with replacing_alone(build) as fresh:
        assert build_lock(build).is_file()
        (fresh / "plan.json").touch()
    assert files(tmp_path) == {"build": None, "build/plan.json": b""}


@pytest.mark.multiproc
def test_one_at_a_time(tmp_path: Path) -> None:
    """Processes that find a lock at the same moment which a killed one has left: one takes it over."""
    lock, inside = tmp_path / "lock", tmp_path / "inside"
    lock.touch()
    command = [sys.executable, "-c", CONTEND, lock, inside, str(time.time() + 1.5)]
    processes = [subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, text=True) for _ in range(4)]
    found = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 4
    assert sum(map(int, found)) > 0
    assert files(tmp_path) == {}


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

"""A run on this machine: who can reach it, how it starts, and how it ends."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from started_runs import LAUNCH, listening_addresses, started_command, started_run, state_of

from fxpipe.errors import RunError, WorkerLost
from fxpipe.runtime.options import RunOptions
from fxpipe.runtime.process.launch import launch

pytestmark = pytest.mark.multiproc
SLOW = pytest.mark.slow
LOOPBACK = "0100007F"
ENDLESS = 10**7
FORWARD = "loss = ("  # a line in the forward of a toy's last worker


def in_forward(code: str) -> dict[int, tuple[str, str]]:
    """Let worker 1 run this first in its forward."""
    return {1: (FORWARD, f"{code}\n    {FORWARD}")}


@pytest.fixture
def endless(toy: Any, tmp_path: Path) -> RunOptions:
    """A run that goes on until it is stopped."""
    return RunOptions(str(toy().save(tmp_path / "build")), steps=ENDLESS, out=str(tmp_path / "out"), threads=1)


def trains(options: RunOptions) -> bool:
    metrics = Path(options.out or "") / "metrics.jsonl"
    return metrics.is_file() and bool(metrics.read_text())


def test_options_travel() -> None:
    options = RunOptions("build", steps=3, policy="stash", out="weird 'name'", threads=2)
    assert RunOptions.from_json(options.to_json()) == options


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_nothing_listens_while_it_trains(endless: RunOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the workers connect, they listen on the loopback interface; nobody else ever does, and then they do not."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")  # for runs on several machines
    seen: set[str] = set()
    with started_run(endless, 2, tmp_path / "tmp") as run:

        def looked() -> bool:
            seen.update(listening_addresses(run.all()))
            return trains(endless)

        run.until(looked)
        workers = run.workers()
        assert set(workers) == {0, 1}
        assert all(os.getsid(worker) == worker for worker in workers.values())
        assert {_parent(worker) for worker in workers.values()} == {run.launcher.pid}, "forked by another process"
        assert listening_addresses(run.all()) == set()
        assert seen <= {LOOPBACK}
        (board,) = (tmp_path / "tmp").glob("fxpipe_run_*")
        assert board.stat().st_mode & 0o077 == 0
        run.launcher.send_signal(signal.SIGTERM)
        assert run.ends(10)[0] == 143
        run.is_gone(10)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_the_next_run_removes_what_a_killed_one_has_left(endless: RunOptions, tmp_path: Path) -> None:
    """Launcher and guardian are killed at the same time, while a build of the run is compiled."""
    out = Path(endless.out or "")
    command = ["-m", "fxpipe", "run", endless.build, "--steps", str(ENDLESS), "--threads", "1", "--out", str(out)]
    with started_command(command, tmp_path / "tmp") as run:
        run.until(lambda: trains(endless))
        for process in run.all():
            os.kill(process, signal.SIGKILL)
        run.ends(10)
    (out / "metrics.jsonl").unlink()
    number = out / "rebalanced" / "1"
    number.mkdir(parents=True)
    for path in (number / "plan.json", number.with_suffix(".toml"), number.with_suffix(".txt")):
        path.touch()
    (out / "checkpoints" / ".step-3.partial").mkdir(parents=True)
    assert list((tmp_path / "tmp").glob("fxpipe*")), "nobody was left to remove it"
    with started_command(command, tmp_path / "tmp") as run:
        run.until(lambda: trains(endless))
        left = [path for path in out.rglob("*") if ".partial" in path.name or path.parent.name == "rebalanced"]
        run.launcher.send_signal(signal.SIGTERM)
        run.ends(10)
    assert left == []
    assert not list((tmp_path / "tmp").glob("fxpipe*"))
    assert not list(out.glob(".fxpipe*"))


def _parent(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.slow
def test_a_worker_is_a_process_as_one_that_python_starts(toy: Any, tmp_path: Path) -> None:
    """CUDA can begin in it, and it knows its place."""
    facts = {
        "RANK": "os.environ['RANK'] + os.environ['LOCAL_RANK']",
        "WORLD_SIZE": "os.environ['WORLD_SIZE'] + os.environ['LOCAL_WORLD_SIZE']",
        "OWN": "os.environ['OWN']",
        "queues": "os.environ['CUDA_DEVICE_MAX_CONNECTIONS']",
        "bad fork": "torch.cuda._is_in_bad_fork()",
        "stdin": "os.readlink('/proc/self/fd/0')",
        "folder": "os.getcwd()",
        "script": "sys.modules['__main__'].__spec__.name",
        "collects": "gc.isenabled()",
    }
    told = "{" + ", ".join(f"{name!r}: {code}" for name, code in facts.items()) + "}"
    code = f"import gc, json, os, sys; open({str(tmp_path / 'told')!r}, 'w').write(json.dumps({told}))"
    folder = toy(spoil=in_forward(code)).save(tmp_path / "build")
    options = RunOptions(str(folder), steps=1, threads=1)
    environment = {**os.environ, "OWN": "é"}
    subprocess.run([sys.executable, "-c", LAUNCH, options.to_json(), "2"], env=environment, cwd=tmp_path, check=True)
    assert json.loads((tmp_path / "told").read_text()) == {
        "RANK": "11",
        "WORLD_SIZE": "22",
        "OWN": "é",
        "queues": "32",
        "bad fork": False,
        "stdin": "/dev/null",
        "folder": str(tmp_path),
        "script": "fxpipe.runtime.process.child",
        "collects": True,
    }


@pytest.mark.slow
def test_what_ends_the_imports_ends_the_run(endless: RunOptions, tmp_path: Path) -> None:
    with started_run(endless, 2, tmp_path / "tmp") as run:
        run.until(run.workers)
        os.kill(run.workers()[1], signal.SIGKILL)
        code, err = run.ends(5)
        assert code == 1
        assert "WorkerLost: worker 0 was killed by signal 9 (SIGKILL)\n  at: " in err
        run.is_gone(1)


@pytest.mark.parametrize(
    ("code", "message", "place"),
    [
        ("import sys; sys.exit(3)", "worker 1 was ended by sys.exit(3)", "stage_1.py"),
        pytest.param("import sys; sys.exit(0)", "worker 1 was ended by sys.exit(0)", "stage_1.py", marks=SLOW),
        pytest.param(
            "import os; os._exit(0)",
            "worker 1 exited with code 0 before its work was done",
            "training step 1",
            marks=SLOW,
        ),
        pytest.param(
            "import os; os.kill(os.getpid(), 15)",
            "worker 1 was killed by signal 15 (SIGTERM)",
            "training step 1",
            marks=SLOW,
        ),
        pytest.param(
            "import os; os.kill(os.getpid(), 11)",
            "worker 1 was killed by signal 11 (SIGSEGV)",
            "training step 1",
            marks=SLOW,
        ),
    ],
)
def test_the_end_of_a_worker_is_said_as_what_it_is(
    toy: Any, tmp_path: Path, code: str, message: str, place: str
) -> None:
    folder = toy(spoil=in_forward(code)).save(tmp_path / "build")
    with pytest.raises(WorkerLost) as caught:
        launch(RunOptions(str(folder), steps=5, threads=1), 2)
    assert caught.value.what == message
    assert place in str(caught.value.where)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "number"), [(1, signal.SIGTERM), (0, signal.SIGTERM), (0, signal.SIGKILL), (1, signal.SIGINT)]
)
def test_a_killed_worker_is_named_and_the_others_end(
    endless: RunOptions, tmp_path: Path, victim: int, number: signal.Signals
) -> None:
    with started_run(endless, 2, tmp_path / "tmp") as run:
        run.until(lambda: trains(endless))
        os.kill(run.workers()[victim], number)
        code, err = run.ends(5)
        assert code == 1
        assert (
            f"WorkerLost: worker {victim} was killed by signal {int(number)} ({number.name})\n  at: training step"
            in err
        )
        run.is_gone(1)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_signal_to_one_process_saves_the_run(endless: RunOptions, tmp_path: Path, victim: int) -> None:
    """As when one machine is drained."""
    options = dataclasses.replace(endless, checkpoint_every="1h")
    with started_run(options, 2, tmp_path / "tmp") as run:
        run.until(lambda: trains(options))
        os.kill(run.workers()[victim], signal.SIGTERM)
        code, err = run.ends(20)
        assert code == 143, err
        assert "go on with --resume" in err
        run.is_gone(1)
    assert list((tmp_path / "out" / "checkpoints").glob("step-*/checkpoint.json"))


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.0, 0.1, 0.3, 0.6, 1.0, 1.5, 2.0, 3.0, 4.0, None])
def test_no_process_outlives_the_launcher(endless: RunOptions, tmp_path: Path, seconds: float | None) -> None:
    """Killed so many seconds after it has started its first worker, or in training (None), and a worker is stopped."""
    with started_run(endless, 2, tmp_path / "tmp") as run:
        run.until(run.workers)
        if seconds is None:
            run.until(lambda: trains(endless))
            os.kill(run.workers()[1], signal.SIGSTOP)
        else:
            time.sleep(seconds)
        run.launcher.kill()
        run.launcher.wait()
        run.is_gone(5)


@pytest.mark.slow
def test_what_a_worker_has_started_ends_with_it(toy: Any, tmp_path: Path) -> None:
    spawn = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    spawn = f"if not hasattr(comm.__class__, 'spawned'):\n        {spawn}\n        comm.__class__.spawned = True"
    folder = toy(spoil=in_forward(spawn)).save(tmp_path / "build")
    for number in (signal.SIGKILL, signal.SIGTERM):
        options = RunOptions(str(folder), steps=ENDLESS, out=str(tmp_path / number.name), threads=1)
        with started_run(options, 2, tmp_path / "tmp") as run:
            run.until(lambda options=options: trains(options))
            assert len(run.all()) == 5  # launcher, guardian, workers, and that one
            run.launcher.send_signal(number)
            run.launcher.wait(10)
            run.is_gone(5)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, -2), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_stops_the_run(endless: RunOptions, tmp_path: Path, number: signal.Signals, code: int) -> None:
    """A stopped worker cannot stop politely: a second signal ends it at once."""
    with started_run(endless, 2, tmp_path / "tmp") as run:
        run.until(lambda: trains(endless))
        worker = run.workers()[0]
        os.kill(worker, signal.SIGSTOP)
        run.until(lambda: state_of(worker) == "T")
        run.launcher.send_signal(number)
        time.sleep(0.5)
        assert run.launcher.poll() is None
        run.launcher.send_signal(number)
        found, err = run.ends(3)
        assert found == code
        said = re.fullmatch(r"stopped in step \d+, and nothing is saved; with --checkpoint-every, .*\n(?s:(.*))", err)
        assert said is not None, err
        assert said[1].strip().endswith("KeyboardInterrupt") if number == signal.SIGINT else not said[1]
        run.is_gone(1)


@pytest.mark.slow
@pytest.mark.parametrize("begun", [False, True])
def test_a_run_that_has_not_begun_saves_nothing(endless: RunOptions, tmp_path: Path, begun: bool) -> None:
    options = dataclasses.replace(endless, checkpoint_every="1000000")
    with started_run(options, 2, tmp_path / "tmp") as run:
        run.until(lambda: trains(options) if begun else len(run.workers()) == 2)
        run.launcher.send_signal(signal.SIGTERM)
        code, err = run.ends(30)
        assert code == 143
        assert ("saving the run before it stops" in err) == begun


def once(marks: Path, code: str) -> dict[int, tuple[str, str]]:
    """Let worker 1 run this in its first forward, as often as `marks` has files: a start takes one of them."""
    take = f"import glob, os, sys, time; marks = glob.glob({str(marks / '*')!r})"
    return in_forward(f"{take}\n    if marks:\n        os.remove(marks[0])\n        {code}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("os.kill(os.getpid(), 9)", "worker 1 was killed by signal 9 (SIGKILL)"),
        ("os._exit(7)", "worker 1 exited with code 7 before its work was done"),
        ("sys.exit(3)", "worker 1 was ended by sys.exit(3)"),
    ],
)
def test_lost_workers_are_started_again(toy: Any, tmp_path: Path, capfd: Any, code: str, cause: str) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    folder = toy(spoil=once(marks, code)).save(tmp_path / "build")
    options = RunOptions(str(folder), steps=4, out=str(tmp_path / "out"), threads=1)
    undisturbed = launch(dataclasses.replace(options, out=str(tmp_path / "other")), 2)
    assert undisturbed["restarts"] == []
    for number in range(2):
        (marks / str(number)).touch()
    summary = launch(dataclasses.replace(options, max_restarts=2), 2)
    assert [(restart["cause"], restart["step"] >= 1) for restart in summary["restarts"]] == [(cause, True)] * 2
    assert json.loads((tmp_path / "out/run.json").read_text())["restarts"] == summary["restarts"]
    assert summary["losses"] == undisturbed["losses"]
    weights = [(tmp_path / out / "model.safetensors").read_bytes() for out in ("out", "other")]
    assert weights[0] == weights[1]
    err = capfd.readouterr().err
    assert f"warning: {cause}\n" in err
    assert re.search(r"\n  all workers start again \(restart 2 of 2\), after step 0 of [1-4] begun\n", err), err
    for number in range(2):
        (marks / str(number)).touch()
    with pytest.raises(WorkerLost) as caught:
        launch(dataclasses.replace(options, max_restarts=1), 2)
    assert caught.value.what == cause


@pytest.mark.slow
def test_an_error_that_explains_itself_would_come_again(toy: Any, tmp_path: Path, capfd: Any) -> None:
    folder = toy(spoil=in_forward("raise ValueError('again')")).save(tmp_path / "build")
    with pytest.raises(RunError, match="again"):
        launch(RunOptions(str(folder), steps=4, threads=1, max_restarts=3), 2)
    assert "start again" not in capfd.readouterr().err


@pytest.mark.slow
def test_the_display_of_a_worker_0_that_is_killed_is_ended(
    endless: RunOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[bool] = []
    monkeypatch.setattr("fxpipe.runtime.process.launch.leave_bar", lambda: ended.append(True))
    stage = Path(endless.build) / "stage_0.py"
    stage.write_text(stage.read_text().replace("def forward(", "import os; os.kill(os.getpid(), 9)\n\ndef forward("))
    with pytest.raises(WorkerLost, match="worker 0 was killed by signal 9"):
        launch(dataclasses.replace(endless, progress=True), 2)
    assert ended == [True]


@pytest.mark.slow
def test_a_stop_is_no_reason_to_start_again(endless: RunOptions, tmp_path: Path) -> None:
    with started_run(dataclasses.replace(endless, max_restarts=3), 2, tmp_path / "tmp") as run:
        run.until(lambda: trains(endless))
        run.launcher.send_signal(signal.SIGTERM)
        code, err = run.ends(10)
        assert (code, err.count("\n")) == (143, 1)
        assert "stopped in step" in err
        run.is_gone(1)

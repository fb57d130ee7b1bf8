"""A run that stands still says who waits for whom, again and again, and ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from started_runs import started_run

from fxpipe.observe.pulse import STEP, PostedPulses, Pulse, Signs
from fxpipe.observe.watch import Cause, Watch
from fxpipe.plan.mesh import Mesh
from fxpipe.runtime.options import RunOptions
from fxpipe.runtime.process.stall import StallWatch, Standstill, WatchingWorker
from fxpipe.runtime.wires.board import StoreBoard


class Worker:
    """A worker whose pulse a test writes."""

    def __init__(self, phase: Any = "training", step: int = 12) -> None:
        self.pulse, self.watch = Pulse(), Watch()
        self.pulse.follow([self.watch])
        self.pulse.phase = phase
        self.pulse.numbers[STEP] = step

    def waits(self, what: str, other: int) -> Worker:
        self.watch.open("wait", Cause(what, what, other))
        return self

    def signs(self) -> Signs:
        self.pulse.beat()
        return Signs.of(self.pulse.numbers)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def looks(seconds: int, workers: list[Worker], silent: tuple[int, ...] = (), **more: Any) -> dict[int, Standstill]:
    """What is said in so many seconds, by the second."""
    clock, found = Clock(), {}
    stall = StallWatch(60, clock=clock, **more)
    last = [worker.signs() for worker in workers]
    stall.look(last)
    for second in range(1, seconds + 1):
        clock.now = second
        last = [last[i] if i in silent else worker.signs() for i, worker in enumerate(workers)]
        if (said := stall.look(last)) is not None:
            found[second] = said
    return found


def test_who_waits_for_a_shape_that_is_compiled_does_not_stand_still_while_that_runs() -> None:
    compiling = Worker("compiling a shape")
    compiling.watch.open("data")
    waiting = Worker().waits("token", 0)
    assert looks(2000, [compiling, waiting]) == {}
    assert looks(61, [compiling, waiting], silent=(0,))[60].text.startswith(
        "no worker has moved for 60 s: worker 0 does not answer"
    )


def test_processes_of_several_workers_are_called_by_their_ranks() -> None:
    data = Worker()
    data.watch.open("data")
    mesh = Mesh((0, 1, 2, 0, 1))
    said = looks(61, [data, Worker().waits("activation", 3), Worker().waits("gradient", 4)], mesh=mesh)
    assert said[60].text.splitlines() == [
        "no worker has moved for 60 s: rank 0 (workers 0, 3) waits for the data of step 12",
        "  rank 0 (workers 0, 3) waits for the data of step 12",
        "  rank 1 (workers 1, 4) waits for worker 3: an activation of step 12",
        "  worker 2 waits for worker 4: a gradient of step 12",
    ]
    silent = looks(61, [data, data, data], silent=(1, 2), mesh=mesh)
    assert silent[60].text.startswith("no worker has moved for 60 s: rank 1 (workers 1, 4), worker 2 does not answer")


def test_it_is_said_at_growing_intervals_until_the_end() -> None:
    data = Worker()
    data.watch.open("data")
    said = looks(700, [data, Worker().waits("activation", 0)])
    assert [s for s in said if s <= 600] == [60, 120, 240, 480, 600]
    assert said[60].text.splitlines() == [
        "no worker has moved for 60 s: worker 0 waits for the data of step 12",
        "  worker 0 waits for the data of step 12",
        "  worker 1 waits for worker 0: an activation of step 12",
    ]
    assert all(said[s].ends is None for s in (60, 120, 240, 480))
    end = said[600].ends
    assert end is not None
    assert end.what == "the run stood still for 600 s: worker 0 waits for the data of step 12"
    assert "--stall-timeout" in str(end.hint)


def test_a_worker_without_a_beat_is_the_one() -> None:
    said = looks(60, [Worker().waits("gradient", 1), Worker().waits("sent", 0)], silent=(1,))[60].text
    assert "60 s: worker 1 does not answer\n" in said
    assert "worker 1 does not answer; 60 s ago, it waits until worker 0 takes what it has sent" in said
    stopped = looks(60, [Worker().waits("gradient", 1), Worker()], silent=(1,), stopped=lambda worker: worker == 1)
    assert "worker 1 is stopped (SIGSTOP); before, it is between two actions of step 12" in stopped[60].text


def test_workers_that_wait_for_each_other() -> None:
    said = looks(60, [Worker().waits("gradient", 1), Worker().waits("activation", 0)])
    assert "all workers wait for each other" in said[60].text


def test_the_notes_of_an_update_are_named() -> None:
    said = looks(60, [Worker().waits("up", 1), Worker().waits("down", 0)])[60].text
    assert "worker 0 waits for worker 1: the note up (the norms of gradients, or whether they overflowed) of" in said
    assert (
        "1 waits for worker 0: the note down (the norm of all gradients, or whether they overflowed) of step 12" in said
    )


def test_what_comes_before_training_may_take_longer() -> None:
    said = looks(1900, [Worker("loading", 0), Worker("loading", 0)])
    assert said[60].text.splitlines()[1] == "  worker 0 loads its stage"
    assert min(second for second, found in said.items() if found.ends is not None) == 1800


def test_a_move_begins_anew() -> None:
    worker, clock = Worker(), Clock()
    stall = StallWatch(10, clock=clock)
    for second in range(100):
        clock.now = second
        if second % 9 == 0:
            worker.pulse.move()
        assert stall.look([worker.signs()]) is None


def test_a_machine_that_slept_has_not_stood_still() -> None:
    worker, clock = Worker(), Clock()
    stall = StallWatch(60, clock=clock)
    stall.look([worker.signs()])
    clock.now = 10**6
    assert stall.look([worker.signs()]) is None


def test_no_timeout_says_nothing() -> None:
    worker, clock = Worker(), Clock()
    stall = StallWatch(0, clock=clock)
    for second in range(0, 10**5, 5):
        clock.now = second
        assert stall.look([worker.signs()]) is None


def test_under_torchrun_the_first_worker_that_answers_watches(capsys: Any) -> None:
    store: Any = dist.HashStore()
    pulses, ends, options = PostedPulses(StoreBoard(store), 3), list[int](), RunOptions("build", stall_timeout=60)
    workers = [Worker().waits("gradient", 2), Worker().waits("gradient", 2), Worker()]
    watching = [WatchingWorker(pulses, w.pulse, i, options, ends.append) for i, w in enumerate(workers)]
    clock = Clock()
    for watch in watching:
        watch._stall._clock, watch._stall._looked = clock, 0.0

    def beat(seconds: int, *silent: int) -> str:
        for _ in range(seconds):
            clock.now += 1
            for i, (worker, after) in enumerate(zip(workers, watching, strict=True)):
                worker.pulse.after_beat = [after]
                if i not in silent:
                    worker.pulse.beat()
        return str(capsys.readouterr().err)

    assert beat(65).count("warning: no worker has moved for 60 s: worker 2 is between two actions of step 12") == 1
    workers[0].pulse.move()
    beat(1)
    assert beat(65, 0).count("worker 0 does not answer") >= 1, "worker 1 says it"
    assert not ends
    beat(600, 0)
    assert ends[0] == 1


@pytest.mark.slow
@pytest.mark.multiproc
def test_a_stopped_worker_is_named(toy: Any, tmp_path: Path) -> None:
    options = RunOptions(
        str(toy().save(tmp_path / "build")), steps=10**7, out=str(tmp_path / "out"), threads=1, stall_timeout=1.0
    )
    with started_run(options, 2, tmp_path / "tmp") as run:
        run.until(lambda: (tmp_path / "out/metrics.jsonl").is_file() and (tmp_path / "out/metrics.jsonl").read_text())
        os.kill(run.workers()[1], signal.SIGSTOP)
        code, err = run.ends(30)
        assert code == 1
        assert err.count("warning: no worker has moved for") >= 4
        assert "worker 1 is stopped (SIGSTOP); before, it " in err
        assert "worker 0 waits for worker 1: a gradient of step" in err or "worker 0 waits until worker 1 takes" in err
        assert "WorkerLost: the run stood still for 10 s: worker 1 does not answer" in err
        run.is_gone(5)


@pytest.mark.slow
@pytest.mark.multiproc
def test_data_that_hang_are_named_under_torchrun(toy: Any, tmp_path: Path) -> None:
    folder = toy().save(tmp_path / "build")
    model = (tmp_path / "model.py").read_text()
    hangs = "\n\nimport time\n\n\ndef train_data():\n    time.sleep(1000)\n    yield 1\n"
    (tmp_path / "model.py").write_text(model + hangs)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "fxpipe", "run", folder]
    command += ["--steps", "5", "--stall-timeout", "1", "--out", tmp_path / "out"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 1
    assert "warning: no worker has moved for 1 s: worker 0 waits for the data of step 1" in result.stderr
    assert "error: the run stood still for 10 s: worker 0 waits for the data of step 1" in result.stderr

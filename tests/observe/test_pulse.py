"""What can be read of a worker from outside, even after it was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from fxpipe.observe import pulse as pulse_module
from fxpipe.observe.pulse import PostedPulses, Pulse, PulseFile, Signs
from fxpipe.observe.watch import Cause, Watch
from fxpipe.runtime.wires.board import StoreBoard
from fxpipe.schedule.action import Action


def test_numbers_say_what_a_worker_does() -> None:
    watch, inner, pulse = Watch(), Watch(), Pulse()
    assert Signs.of(pulse.numbers).place == "starting"
    pulse.follow([watch], [inner])
    pulse.phase = "training"
    watch.at(Action("F", 11))
    watch.open("F")
    watch.open("wait", Cause("gradient", "g", 3))
    pulse.beat()
    found = Signs.of(pulse.numbers)
    assert (found.place, found.doing, found.what, found.other) == ("training step 12", "wait", "gradient", 3)
    watch.close()
    pulse.beat()
    later = Signs.of(pulse.numbers)
    assert (later.doing, later.what, later.beat, later.moves) == ("F", None, 2, found.moves + 1)
    assert later.status.in_flight == 0
    inner.open("receive", Cause("input", "x", 0))
    pulse.beat()
    assert Signs.of(pulse.numbers).doing == "receive", "the innermost watch speaks"
    inner.close()
    watch.close()
    watch.sends = Cause("sent", "sent", 2)
    pulse.beat()
    found = Signs.of(pulse.numbers)
    assert (found.doing, found.what, found.other, found.status.in_flight) == ("wait", "sent", 2, 1)
    pulse.phase = "evaluating"
    assert Signs.of(pulse.numbers).place == "evaluating after step 12"


def test_every_cause_has_a_number() -> None:
    watch, pulse = Watch(), Pulse()
    pulse.follow([watch])
    for what in ("input", "activation", "saved", "gradient", "token", "weights", "up", "down", "loss", "sent"):
        watch.open("wait", Cause(what, "name", 1))
        pulse.beat()
        assert Signs.of(pulse.numbers).what == what


@pytest.mark.multiproc
def test_they_outlive_the_worker_and_the_file_does_not_grow(tmp_path: Path) -> None:
    script = f"""import os
from pathlib import Path
from fxpipe.observe.pulse import *
pulse = Pulse(PulseFile(Path({str(tmp_path / "pulses")!r}), 3).numbers(1))
pulse.phase = "training"
for step in range(5000):
    pulse.numbers[STEP] = step
    pulse.beat()
os.kill(os.getpid(), 9)"""
    pulses = PulseFile(tmp_path / "pulses", 3)
    size = os.path.getsize(tmp_path / "pulses")
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == -signal.SIGKILL
    found = pulses.read()
    assert [signs.place for signs in found] == ["starting", "training step 4999", "starting"]
    assert found[1].beat == 5000
    assert os.path.getsize(tmp_path / "pulses") == size


def test_neither_it_nor_a_launcher_needs_torch() -> None:
    script = "import sys, fxpipe.cli.run, fxpipe.runtime.process.check_run, fxpipe.runtime.process.launch"
    script += ", fxpipe.runtime.process.best_weights; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout == "False\n"


def test_a_thread_beats_until_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse_module, "PERIOD", 0.01)
    pulse = Pulse()
    pulse.begin()
    while Signs.of(pulse.numbers).beat < 3:
        pass
    pulse.end()
    assert not pulse._thread.is_alive()


def test_a_store_that_is_gone_says_nothing() -> None:
    class Gone:
        def check(self, keys: list[str]) -> bool:
            raise dist.DistNetworkError("gone")

    gone: Any = Gone()
    assert PostedPulses(StoreBoard(gone), 2).read() == []

"""TensorBoard's event files, read back with its own reader."""

from __future__ import annotations

import importlib.util
import math
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from packages import needs

from fxpipe.errors import FxpipeError, RunError
from fxpipe.observe.logger import LoggedRun, Loggers, check_loggers
from fxpipe.observe.tensorboard import TensorboardLog

pytestmark = needs("tensorboard")


def read(folder: Path) -> Any:
    from tensorboard.backend.event_processing import event_accumulator as accumulator

    found = accumulator.EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    found.Reload()
    return found


def values(events: Any, tag: str) -> dict[int, float]:
    return {event.step: event.value for event in events.Scalars(tag)}


def opened(folder: Path, **run: Any) -> TensorboardLog:
    return TensorboardLog(str(folder), LoggedRun(**run))


def test_a_run_is_read_back(tmp_path: Path) -> None:
    log = opened(tmp_path / "tb" / "run")
    log.log(1, 0.5, {"train/loss": 2.5, "train/lr": 0.1})
    log.log(2, 0.75, {"train/loss": 2.25, "busy/worker_0": 0.75})
    log.close()
    events = read(tmp_path / "tb" / "run")
    assert values(events, "train/loss") == {1: 2.5, 2: 2.25}
    assert values(events, "train/lr") == pytest.approx({1: 0.1})
    assert values(events, "busy/worker_0") == {2: 0.75}
    first, second = events.Scalars("train/loss")
    assert second.wall_time - first.wall_time == pytest.approx(0.25, abs=1e-3)
    assert events.Tags()["tensors"] == []


def test_without_a_folder_it_is_in_that_of_the_run(tmp_path: Path) -> None:
    log = TensorboardLog(None, LoggedRun(tmp_path / "out"))
    log.log(1, 0.5, {"train/loss": 2.5})
    log.close()
    assert values(read(tmp_path / "out" / "tensorboard"), "train/loss") == {1: 2.5}


def test_what_is_not_finite_is_kept_as_such(tmp_path: Path) -> None:
    log = opened(tmp_path)
    log.log(1, 1.0, {"train/loss": math.inf, "train/grad_norm": 3.0})
    log.log(2, 2.0, {"train/loss": math.nan})
    log.close()
    events = read(tmp_path)
    assert values(events, "train/loss")[1] == math.inf
    assert math.isnan(values(events, "train/loss")[2])
    assert values(events, "train/grad_norm") == {1: 3.0}


def test_without_the_package_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        "fxpipe.observe.logger.find_spec", lambda name: None if name == "tensorboard" else find_spec(name)
    )
    with pytest.raises(RunError, match="not installed") as caught:
        check_loggers([f"tensorboard={tmp_path / 'tb'}"], None)
    assert caught.value.hint == "pip install tensorboard"
    with pytest.raises(RunError, match="not installed"):
        opened(tmp_path / "tb")
    assert not (tmp_path / "tb").exists()


def test_a_package_that_cannot_be_imported_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(RunError, match="cannot be imported") as caught:
        opened(tmp_path)
    assert caught.value.hint == "pip install tensorboard"


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "tb"):
        with pytest.raises(FxpipeError, match=r"cannot be written: file is a file"):
            opened(folder)


def test_a_run_that_goes_on_hides_what_came_after_its_step(tmp_path: Path) -> None:
    first = opened(tmp_path)
    for step in range(1, 8):
        first.log(step, float(step), {"train/loss": float(step)})
    first.log(4, 7.0, {"eval/accuracy": 0.4})
    first.close()
    log = opened(tmp_path, continue_after=4)
    for step in (5, 6):
        log.log(step, float(step), {"train/loss": 10.0 + step})
    log.close()
    events = read(tmp_path)
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [
        (1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (5, 15.0), (6, 16.0),
    ]  # fmt: skip
    assert values(events, "eval/accuracy") == {4: pytest.approx(0.4)}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_writer_that_fails_in_its_thread_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fxpipe.observe.tensorboard.PAUSE", 0.01)
    loggers = Loggers([opened(tmp_path / "tb")])
    loggers.log(1, 1.0, {"train/loss": 1.0})
    shutil.rmtree(tmp_path / "tb")
    deadline, step = time.monotonic() + 30, 1
    while not loggers.problems:
        assert time.monotonic() < deadline
        step += 1
        loggers.log(step, float(step), {"train/loss": 1.0})
        time.sleep(0.01)
    loggers.log(step + 1, 1.0, {"train/loss": 1.0})
    loggers.close()
    assert loggers.problems == [{"file": "tensorboard", "lost": 2}]
    assert f"warning: --log tensorboard gets no numbers from step {step} on: " in capsys.readouterr().err

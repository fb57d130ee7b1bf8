"""What becomes of an earlier run's files, and of a run whose files cannot be written."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
from commands import QUICK, files, finish, fxpipe, start_module, unchanged
from model_files import write_model
from safetensors.torch import load_file

from fxpipe.checkpoint import safetensors_file
from fxpipe.files import temporary

DATA = """

def train_data():
    for number in range(40):
        if (number, os.environ.get("FAIL")) == (4, "here"):
            raise RuntimeError("the data end here")
        if os.environ.get("SLOW"):
            time.sleep(0.1)
        yield {"x": torch.randn(4, 6), "y": torch.randint(0, 3, (4,))}
"""


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("outputs")
    model = write_model(folder, ("import torch\n", "import os\nimport time\nimport torch\n"))
    model.write_text(model.read_text() + DATA)
    result = fxpipe("compile", model, "-o", folder / "build", *QUICK)
    assert result.code == 0, result.err
    return folder / "build"


@pytest.fixture(scope="module")
def earlier(build: Path) -> Path:
    """The folder of a run, with all that a run may write."""
    out = build.with_name("earlier")
    more = ("--ema", 0.9, "--trace", out / "trace.json")
    result = fxpipe("run", build, "--local", "--steps", 6, "--out", out, *more)
    assert result.code == 0, result.err
    assert set(files(out)) == {"model.safetensors", "ema.safetensors", "metrics.jsonl", "run.json", "trace.json"}
    return out


@pytest.fixture
def out(earlier: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return shutil.copytree(earlier, tmp_path / "out")


@pytest.mark.parametrize("local", [("--local",), ()])
def test_a_refused_run_changes_nothing(build: Path, out: Path, local: tuple[str, ...]) -> None:
    for wrong in (("--policy", "TYPO"), ("--weights", "missing.safetensors"), ("--clip-norm", "-1")):
        with unchanged(out):
            assert fxpipe("run", build, *local, "--steps", 2, "--out", out, *wrong).code != 0


def test_a_run_that_fails_changes_no_earlier_file(build: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIL", "here")
    before = files(out)
    more = ("--ema", 0.9, "--trace", out / "trace.json")
    result = fxpipe("run", build, "--local", "--steps", 9, "--out", out, *more)
    assert result.code == 1
    assert "the data end here" in result.err
    after = files(out)
    assert {name: after[name] for name in before} == before
    assert after.keys() - before.keys() == {"partial", "partial/metrics.jsonl"}
    partial = (out / "partial" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in partial] == [1, 2, 3]


@pytest.mark.multiproc
@pytest.mark.parametrize("number", [signal.SIGKILL])
def test_a_run_that_is_stopped_changes_no_earlier_file(build: Path, out: Path, number: signal.Signals) -> None:
    before = files(out)
    process = start_module("fxpipe", "run", build, "--local", "--out", out, SLOW="yes")
    partial = out / "partial" / "metrics.jsonl"
    while not (partial.is_file() and partial.read_text()):
        assert process.poll() is None
    process.send_signal(number)
    assert finish(process, 30).code != 0
    after = files(out)
    assert {name: after[name] for name in before} == before


def test_a_run_that_ends_replaces_all_of_an_earlier_one(build: Path, out: Path) -> None:
    before = files(out)
    assert fxpipe("run", build, "--local", "--steps", 7, "--out", out).code == 0
    after = files(out)
    assert set(after) == {"model.safetensors", "metrics.jsonl", "run.json", "trace.json"}
    assert all(after[name] != before[name] for name in ("model.safetensors", "metrics.jsonl", "run.json"))


def test_a_run_may_start_from_the_weights_that_it_replaces(build: Path, out: Path) -> None:
    before = load_file(out / "model.safetensors")
    weights = out / "model.safetensors"
    result = fxpipe("run", build, "--local", "--steps", 2, "--weights", weights, "--out", out)
    assert result.code == 0, result.err
    assert load_file(weights).keys() == before.keys()


def test_what_a_killed_process_left_half_written_is_removed(build: Path, out: Path) -> None:
    own = temporary(out / "model.safetensors").name
    left = out / own.replace(f".{os.getpid()}.", f".{2**22 + 1}.")
    elsewhere = out / f".model.safetensors.another-host.{2**22 + 1}.tmp"
    for path in (left, elsewhere):
        path.write_bytes(b"half")
    assert fxpipe("run", build, "--local", "--steps", 2, "--out", out).code == 0
    assert not left.exists()
    assert elsewhere.exists(), "it may be running there"


class _Disk:
    """Refuses to write weights below a folder, so many times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, times: int) -> None:
        self.folder, self.times = folder, times
        self._write = safetensors_file.SafetensorsWriter.write
        disk = self

        def write(writer: safetensors_file.SafetensorsWriter, tensor: object) -> None:
            if Path(writer.file.name).is_relative_to(disk.folder) and disk.times:
                disk.times -= 1
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            disk._write(writer, tensor)

        monkeypatch.setattr(safetensors_file.SafetensorsWriter, "write", write)


@pytest.mark.parametrize("times", [1, 1000])
def test_weights_that_cannot_be_written_go_elsewhere(
    times: int, build: Path, out: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    expected = {name: (out / name).read_bytes() for name in ("model.safetensors", "ema.safetensors")}
    before = files(out)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    _Disk(monkeypatch, out, times)
    result = fxpipe("run", build, "--local", "--steps", 6, "--out", out, "--ema", 0.9)
    assert result.code == 1
    assert f"{out / 'model.safetensors'} cannot be written: No space left on device" in result.err
    (elsewhere,) = tmp_path.glob("fxpipe-weights-*")
    assert f"hint: the trained weights are in {elsewhere}" in result.err
    assert not list(out.glob(".*"))
    assert {path.name: path.read_bytes() for path in elsewhere.iterdir()} == expected
    after = files(out)
    assert {name: after[name] for name in before} == before


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_launcher_loses_no_weights(number: int, tmp_path: Path) -> None:
    model, out, tried = write_model(tmp_path), tmp_path / "out", tmp_path / "tried"
    full = f"""
from fxpipe.checkpoint import safetensors_file as file
write = file.SafetensorsWriter.write

def refused(self, tensor):
    if "RANK" in os.environ and self.file.name.startswith({str(out)!r}):
        open({str(tried)!r}, "w").close()
        time.sleep(1)
        raise OSError(28, os.strerror(28))
    write(self, tensor)

file.SafetensorsWriter.write = refused
"""
    model.write_text("import os, time\n" + model.read_text() + full)
    assert fxpipe("compile", model, "-n", 2, "-o", tmp_path / "build", *QUICK, "--scan", 1).code == 0
    run = ("run", tmp_path / "build", "--steps", 6, "--threads", 1, "--out")
    assert fxpipe(*run, tmp_path / "whole", "--local").code == 0
    (tmp_path / "tmp").mkdir()
    process = start_module("fxpipe", *run, out, TMPDIR=str(tmp_path / "tmp"))
    deadline = time.monotonic() + 60
    while not tried.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(number)
    result = finish(process, 20)
    assert result.code == 128 + number, result.err
    (elsewhere,) = (tmp_path / "tmp").iterdir()
    assert f"model.safetensors is in {elsewhere}" in result.err
    assert (elsewhere / "model.safetensors").read_bytes() == (tmp_path / "whole/model.safetensors").read_bytes()


def test_weights_that_can_be_written_nowhere_are_named(
    build: Path, out: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _Disk(monkeypatch, Path("/"), 1000)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    result = fxpipe("run", build, "--local", "--steps", 6, "--out", out)
    assert result.code == 1
    assert "model.safetensors could not be written anywhere" in result.err


def test_too_little_room_is_said_before_training(build: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 700})())
    result = fxpipe("run", build, "--local", "--steps", 1, "--out", tmp_path / "out")
    assert result.code == 0
    assert "has 700 B free, and the trained weights need 1.6 KiB: free space before the run ends" in result.err


def test_an_output_folder_that_is_deleted_gets_the_weights(tmp_path: Path) -> None:
    model = write_model(tmp_path, ("import torch\n", "import shutil\nimport torch\n"))
    model.write_text(
        model.read_text()
        + f"""

def train_data():
    for number in range(6):
        if number == 3:
            shutil.rmtree({str(tmp_path / "out")!r})
        yield {{"x": torch.randn(4, 6), "y": torch.randint(0, 3, (4,))}}
"""
    )
    assert fxpipe("compile", model, "-o", tmp_path / "build", *QUICK, "--scan", 1).code == 0
    result = fxpipe("run", tmp_path / "build", "--local", "--steps", 6, "--out", tmp_path / "out")
    assert result.code == 0, result.err
    assert "metrics.jsonl was deleted during the run: its lines are lost" in result.err
    assert set(files(tmp_path / "out")) == {"model.safetensors", "run.json"}

"""Checkpoints on a disk that loses power, is full, fails, or has changed a byte."""

from __future__ import annotations

import errno
import functools
import hashlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe import Build
from fxpipe.checkpoint.manifest import MANIFEST, read_manifest
from fxpipe.checkpoint.shard import read_shard
from fxpipe.checkpoint.shelf import Shelf
from fxpipe.checkpoint.starting_weights import Checkpoint
from fxpipe.errors import CheckpointError, FxpipeError
from fxpipe.runtime.process.resume import Resumed
from fxpipe.runtime.worker.weights import forms
from tests.survive.disk import Call, Recorder

STEPS = 4
OUT = "runs/a"


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def batches() -> list[Any]:
    draw = torch.Generator().manual_seed(1)
    return [(torch.randn(4, 2, generator=draw), torch.randn(4, 1, generator=draw)) for _ in range(STEPS + 2)]


@functools.cache
def build() -> Build:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3, bias=False), nn.Tanh(), nn.Linear(3, 1, bias=False))
    return fxpipe.compile(model, loss, batches()[0], workers=2, microbatches=1, cost="analytic")


def pipeline(out: Path | None = None, **options: Any) -> Any:
    saving = {} if out is None else {"out": out, "checkpoint_every": "1", "keep": 2}
    return build().local(optimizer=lambda named: torch.optim.SGD([p for _, p in named], 0.1, 0.9), **saving, **options)


def train(out: Path, fed: int = 0, **options: Any) -> tuple[list[float], str]:
    """All steps, with a checkpoint after each; the losses, and a digest of the weights."""
    found = pipeline(out, **options)
    losses = found.run(batches()[fed:STEPS])
    found.checkpoints.finish()
    return losses, digest(found)


def digest(found: Any) -> str:
    return hashlib.sha256(b"".join(v.numpy().tobytes() for v in found.state_dict().values())).hexdigest()


@functools.cache
def undisturbed() -> tuple[list[float], str]:
    found = pipeline()
    return found.run(batches()[:STEPS]), digest(found)


@pytest.fixture
def marked(monkeypatch: pytest.MonkeyPatch) -> Callable[[Recorder], None]:
    """Has the recorder note which steps a `commit` has promised."""

    real, recorders = Shelf.commit, []

    def commit(shelf: Shelf, step: int) -> None:
        real(shelf, step)
        recorders[-1].note(Call("mark", str(step)))

    monkeypatch.setattr(Shelf, "commit", commit)
    return recorders.append


@pytest.fixture
def fast() -> Iterator[Path]:
    """A folder in memory where there is one: thousands of small files."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        yield Path(folder)


def newest(root: Path) -> int:
    """The step that a run would go on from; 0 for none. All its shards are read."""
    shelf = Shelf.of(root / OUT)
    try:
        path, manifest, _ = shelf.newest()
    except CheckpointError:
        return 0
    for worker in range(manifest.workers):
        assert read_shard(path, manifest.step, worker, manifest.workers, forms()).state
    assert path.name == f"step-{manifest.step}"
    return manifest.step


def read(path: Path) -> None:
    """What a run of the same cuts reads of a checkpoint."""
    plan = build().plan
    checkpoint = Checkpoint.open(path, plan)
    for worker in (0, 1):
        list(checkpoint.read(plan.owned(worker), "cpu"))
        assert checkpoint.manifest is not None
        Resumed(path, checkpoint.manifest, True).shards(worker)


def test_a_name_is_given_to_what_the_disk_has(tmp_path: Path, marked: Callable[[Recorder], None]) -> None:
    """Whenever the power is lost: a promised checkpoint has all its bytes and its name, and none goes before that."""
    recorder, folder = Recorder(tmp_path), f"{OUT}/checkpoints"
    marked(recorder)
    with recorder.recording():
        assert train(tmp_path / OUT) == undisturbed()
    assert [call.path for call in recorder.calls if call.kind == "mark"] == ["1", "2", "3", "4"]
    lost: set[str] = set()
    """Files and folders with changes that a loss of power would take."""
    for call in recorder.calls:
        place = str(Path(call.path).parent)
        if call.kind == "fsync":
            lost.discard(call.path)
        elif call.kind in ("create", "write", "mkdir"):
            lost |= {place if call.kind == "mkdir" else call.path, *([place] if call.kind == "create" else [])}
        elif call.kind == "rename":
            assert not [path for path in lost if f"{path}/".startswith(f"{call.path}/")], call
            lost |= set() if Path(call.to).name.startswith(".") else {place}  # what is to go may stay
        elif call.kind in ("mark", "unlink", "rmdir"):
            assert folder not in lost, call


def of_third(calls: list[Call]) -> range:
    """The numbers of the calls that the third checkpoint makes, the one that takes the first away."""
    marks = [number for number, call in enumerate(calls) if call.kind == "mark"]
    begun = next(number for number, call in enumerate(calls) if ".step-3." in call.path)
    return range(begun, marks[2])


@pytest.mark.parametrize(
    ("code", "every"),
    [
        (errno.ENOSPC, False),
        pytest.param(errno.ENOSPC, True, marks=pytest.mark.slow),
        pytest.param(errno.EIO, True, marks=pytest.mark.slow),
    ],
    ids=["the last of each kind", "all full", "all broken"],
)
def test_a_call_that_fails_costs_one_checkpoint_at_most(
    code: int, every: bool, fast: Path, marked: Callable[[Recorder], None], capsys: pytest.CaptureFixture[str]
) -> None:
    first = Recorder(fast)
    marked(first)
    with first.recording():
        train(fast / OUT)
    shutil.rmtree(fast / "runs")
    kinds = ("mkdir", "create", "write", "fsync", "rename")
    numbers = [n for n in of_third(first.calls) if first.calls[n].kind in kinds]
    assert len(numbers) > 30
    last = {first.calls[n].kind: n for n in numbers}
    assert set(last) == set(kinds)
    for number in numbers if every else last.values():
        failed = first.calls[number]
        recorder = Recorder(fast)
        marked(recorder)
        done: list[int] = []

        def fail(at: int, call: Call, number: int = number, failed: Call = failed, done: list[int] = done) -> Any:
            if done or at != number:
                return None
            assert (call.kind, call.path) == (failed.kind, failed.path), "the calls are not the same as before"
            done.append(newest(fast))
            return OSError(code, "the disk says no")

        recorder.fail = fail
        with recorder.recording():
            assert train(fast / OUT) == undisturbed(), failed
        renamed = (failed.kind, failed.path) == ("fsync", f"{OUT}/checkpoints")  # it is taken back
        assert done == [3 if renamed else 2]
        said = [line for line in capsys.readouterr().err.splitlines() if line]
        shelf = Shelf.of(fast / OUT)
        assert len(said) == 1, (failed, said)
        assert "the checkpoint at step 3 could not be written" in said[0]
        assert "the disk says no" in said[0]
        assert newest(fast) == 4, failed
        assert {path.name for path in shelf.folder.iterdir()} == {"step-2", "step-4"}, failed
        if every:
            assert train(fast / "again", 2, resume=shelf.path(2)) == (undisturbed()[0][2:], undisturbed()[1])
            shutil.rmtree(fast / "again")
        shutil.rmtree(fast / "runs")


def test_a_damaged_newest_counts_for_none_of_those_to_keep(tmp_path: Path) -> None:
    """Runs that go on below damaged checkpoints must not take away what they write, nor where they came from."""
    out = tmp_path / OUT
    found = pipeline(out, resume=None)
    found.run(batches()[:STEPS])
    found.close()
    shelf = Shelf.of(out)
    (shelf.path(4) / MANIFEST).write_text("{}")
    again = pipeline(out, resume="newest")
    assert again.fed == 3
    shelf.path(4).rename(shelf.path(9))
    again.run(batches()[3:4])
    again.checkpoints.finish()
    assert shelf.steps() == [3, 4, 9]
    assert newest(tmp_path) == 4


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("saved") / OUT
    train(out)
    return out


@pytest.mark.parametrize("part", [13, pytest.param(1, marks=pytest.mark.slow)])
def test_every_byte_of_a_real_checkpoint_counts(part: int, saved: Path, fast: Path) -> None:
    """Every byte of every file: the checkpoint before is taken, and with this one's path given, nothing."""
    shelf = Shelf.of(fast)
    for step in (3, 4):
        shutil.copytree(Shelf.of(saved).path(step), shelf.path(step))
    files = sorted(shelf.path(4).iterdir())
    assert len(files) == 10
    for file in files:
        whole = file.read_bytes()
        for place in range(0, len(whole), part):
            file.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
            path, _, damaged = shelf.newest()
            assert (path, len(damaged)) == (shelf.path(3), 1), (file.name, place)
            with pytest.raises(FxpipeError, match=file.name):
                read(shelf.path(4))
        file.write_bytes(whole)
    assert shelf.newest()[0] == shelf.path(4)


KINDS = ("model", "optimizer", "pipeline", "worker")


def name_of(kind: str, worker: int) -> str:
    return f"{kind}-{worker + 1:05d}-of-00002.{'json' if kind == 'worker' else 'safetensors'}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("harm", ["swapped", "other step", "missing", "empty"])
def test_wrong_files_are_refused_by_name(kind: str, harm: str, saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "step-4"
    shutil.copytree(Shelf.of(saved).path(4), path)
    first, second = (path / name_of(kind, worker) for worker in (0, 1))
    held = first.read_bytes(), second.read_bytes()
    if harm == "swapped":
        assert held[0] != held[1] or kind == "pipeline", "nothing is swapped"
        first.write_bytes(held[1])
        second.write_bytes(held[0])
    elif harm == "other step":
        other = (Shelf.of(saved).path(3) / first.name).read_bytes()
        first.write_bytes(other)
    elif harm == "missing":
        first.unlink()
    else:
        first.write_bytes(b"")
    if first.is_file() and first.read_bytes() == held[0]:
        pytest.skip("the files are the same")
    with pytest.raises(FxpipeError) as refused:
        pipeline(resume=path)
    assert first.name in str(refused.value)


@pytest.mark.parametrize("harm", ["swapped", "missing"])
def test_a_wrong_manifest_is_refused(harm: str, saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "step-4"
    shutil.copytree(Shelf.of(saved).path(4), path)
    if harm == "missing":
        (path / MANIFEST).unlink()
    else:
        shutil.copy(Shelf.of(saved).path(3) / MANIFEST, path)
        assert read_manifest(path).step == 3
    with pytest.raises(FxpipeError, match=MANIFEST if harm == "missing" else "changed after it was written"):
        pipeline(resume=path)

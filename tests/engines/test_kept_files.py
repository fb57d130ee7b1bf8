"""What engines keep in a build is run only as they made it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from commands import QUICK, fxpipe_process
from engines import needs
from model_files import write_model
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fxpipe.engines.engine import Engine, EnginePart
from fxpipe.engines.kept_files import is_intact, record
from fxpipe.plan.packing import Layout
from fxpipe.stages.pure_function import Compute
from fxpipe.stages.pure_part import PartInput, PartOutput, PurePart
from fxpipe.task.batch import tensor_spec


class Keeping(Engine):
    """Keeps a folder with code, which it runs as it finds it."""

    name: ClassVar[str] = "keeping"
    built: ClassVar[int] = 0

    def missing(self, device: str) -> str | None:
        return None

    def version(self) -> str:
        return "1"

    def build(self, part: PurePart, cache: Path | None) -> Compute:
        assert cache is None or not cache.exists() or is_intact(cache)
        if cache is None or not cache.exists():
            Keeping.built += 1
            time.sleep(0.1)
            if cache is not None:
                (cache / "deep").mkdir(parents=True)
                (cache / "deep" / "code.py").write_text("2 * x")
                (cache / "library.so").write_bytes(b"\x7fELF")
        return lambda inputs: [Layout(part.outputs[0].tensor)(inputs[0] * 2)]


def double(x: Tensor) -> tuple[Tensor]:
    return (x * 2,)


@pytest.fixture
def make(tmp_path: Path) -> Callable[[], tuple[int, list[str]]]:
    """Makes the part ready; how often the engine has built it since, and what was said."""

    def again() -> tuple[int, list[str]]:
        said: list[str] = []
        before = Keeping.built
        EnginePart(doubling(0, "x"), Keeping(), tmp_path / "engines", said.append)
        return Keeping.built - before, said

    return again


def doubling(worker: int, name: str) -> PurePart:
    x = torch.ones(3)
    spec = tensor_spec(x)
    inputs, outputs = (PartInput("saved", name, spec),), (PartOutput("saved", f"{name} * 2", spec),)
    return PurePart(worker, "F", make_fx(double, tracing_mode="fake")(x), inputs, outputs, (), "cpu")


def kept(folder: Path) -> Path:
    (found,) = (path for path in (folder / "engines").iterdir() if path.is_dir())
    return found


def edit(folder: Path) -> None:
    (kept(folder) / "deep" / "code.py").write_text("3 * x")


def flip(folder: Path) -> None:
    (kept(folder) / "library.so").write_bytes(b"\x7fELG")


def add(folder: Path) -> None:
    (kept(folder) / "other.so").write_bytes(b"\x7fELF")


def move(folder: Path) -> None:
    (kept(folder) / "library.so").rename(kept(folder) / "deep" / "library.so")


def take_away(folder: Path) -> None:
    (kept(folder) / "library.so").unlink()


def forget(folder: Path) -> None:
    kept(folder).with_name(kept(folder).name + ".sha256").unlink()


def test_it_is_used_again(tmp_path: Path, make: Callable[[], tuple[int, Sequence[str]]]) -> None:
    built, said = make()
    assert (built, len(said)) == (1, 1)
    (kept(tmp_path) / "deep" / "x.lock").touch()  # torch leaves such when it loads
    assert make() == (0, [])
    assert not list((tmp_path / "engines").glob("*.tmp"))


def test_workers_with_equal_parts_build_it_once(tmp_path: Path) -> None:
    """All begin at the same time; those that wait use what the first has made."""
    said: list[str] = []
    before = Keeping.built
    with ThreadPoolExecutor() as workers:
        parts = [doubling(worker, f"block_{worker}") for worker in range(4)]
        made = [workers.submit(EnginePart, part, Keeping(), tmp_path / "engines", said.append) for part in parts]
    assert [one.result().kept for one in made] == [[kept(tmp_path).name]] * 4
    assert (Keeping.built - before, len(said)) == (1, 1)
    assert sorted(p.suffix for p in (tmp_path / "engines").iterdir()) == sorted(("", ".sha256")), "no lock stays"


@pytest.mark.parametrize("change", [edit, flip, add, move, take_away, forget])
def test_what_was_changed_is_said_and_made_again(
    tmp_path: Path, make: Callable[[], tuple[int, Sequence[str]]], change: Callable[[Path], None]
) -> None:
    make()
    change(tmp_path)
    built, said = make()
    assert built == 1
    assert said == [f"warning: {kept(tmp_path)} was changed after keeping made it, so it is made again"]
    assert (kept(tmp_path) / "deep" / "code.py").read_text() == "2 * x"
    assert make() == (0, [])


def test_what_cannot_be_removed_is_not_used(
    tmp_path: Path, make: Callable[[], tuple[int, Sequence[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that may only be read."""
    make()
    edit(tmp_path)
    monkeypatch.setattr("fxpipe.engines.engine.remove", lambda path: False)
    for _ in range(2):
        built, said = make()
        assert (built, len(said)) == (1, 1)
    assert not is_intact(kept(tmp_path))


def test_a_file_alone(tmp_path: Path) -> None:
    file = tmp_path / "model"
    file.write_bytes(b"onnx")
    assert not is_intact(file)
    record(file)
    assert is_intact(file)
    file.write_bytes(b"onny")
    assert not is_intact(file)
    record(tmp_path / "missing")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "model.sha256"]


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.parametrize("engine", ["inductor", "onnxruntime"])
def test_a_changed_file_of_a_build(tmp_path: Path, engine: str) -> None:
    """In processes of their own: what a process has loaded must not change under it."""
    needs(engine)
    build = tmp_path / "build"
    assert fxpipe_process("compile", write_model(tmp_path), "-o", build, "--backend", engine, *QUICK).code == 0
    run = ("run", build, "--local", "--steps", 1, "--threads", 1, "--out", tmp_path / "out")
    first = fxpipe_process(*run)
    assert (first.code, "made again" in first.err) == (0, False), first.err
    weights = (tmp_path / "out" / "model.safetensors").read_bytes()
    files = [p for p in (build / "engines").rglob("*") if p.is_file() and p.suffix not in (".sha256", ".lock")]
    for file in files:
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 0x20
        file.write_bytes(content)
    again = fxpipe_process(*run)
    assert again.code == 0, again.err
    assert again.err.count("so it is made again") == 4
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == weights
    assert "made again" not in fxpipe_process(*run).err

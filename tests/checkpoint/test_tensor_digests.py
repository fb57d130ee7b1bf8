"""Weights that fxpipe wrote are read as they were written, or refused by name; other programs read them as they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from cached import lowered
from commands import QUICK, fxpipe
from model_files import write_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fxpipe.checkpoint.safetensors_file import read_digests, safetensors_writer
from fxpipe.checkpoint.starting_weights import Checkpoint
from fxpipe.errors import BuildError
from fxpipe.runtime.worker.final_weights import final_tensors


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained weights of a small model, as a run writes them."""
    path = tmp_path_factory.mktemp("digests") / "model.safetensors"
    torch.manual_seed(0)
    tensors = [(name, t.spec) for t in final_tensors(PLAN) for name in t.names]
    with safetensors_writer(path, tensors) as file:
        for _, spec in tensors:
            file.write(torch.randn(spec.shape))
    return path


PLAN = lowered("function", workers=2).plan


def read(path: Path) -> dict[str, torch.Tensor]:
    """As `--weights` does."""
    return dict(Checkpoint.open(path, PLAN).read(PLAN.parameters, "cpu"))


def test_the_tensor_is_named(written: Path, tmp_path: Path) -> None:
    content, path = bytearray(written.read_bytes()), tmp_path / "model.safetensors"
    content[-1] ^= 1
    path.write_bytes(content)
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    last = max((n for n in header if n != "__metadata__"), key=lambda n: header[n]["data_offsets"])
    with pytest.raises(BuildError, match=f"{last} in model.safetensors was changed after it was written"):
        read(path)


def test_other_programs_read_it(written: Path, tmp_path: Path) -> None:
    found = load_file(written)
    with safe_open(str(written), framework="pt") as file:
        assert file.metadata()["format"] == "pt"
    assert set(read_digests(written).of) == set(found)
    from torch.distributed.checkpoint import load
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    empty = {name: torch.zeros_like(value) for name, value in found.items()}
    load(empty, storage_reader=HuggingFaceStorageReader(str(written.parent)), no_dist=True)
    assert all(torch.equal(empty[name], value) for name, value in found.items())


def test_a_file_of_another_program_has_no_digests(written: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(load_file(written), path, {"format": "pt", "sha": "x"})
    assert read_digests(path).of == {}
    assert read(path).keys() == read(written).keys()


def test_a_checkpoint_of_a_run_has_its_manifest(tmp_path: Path) -> None:
    model = write_model(tmp_path)
    assert fxpipe("compile", model, "-o", tmp_path / "build", *QUICK).code == 0
    run = ("run", tmp_path / "build", "--local", "--threads", 1)
    first = fxpipe(*run, "--steps", 2, "--checkpoint-every", 1, "--out", tmp_path / "out")
    assert first.code == 0, first.err
    checkpoint = tmp_path / "out" / "checkpoints" / "step-1"
    again = (*run, "--steps", 1, "--weights", checkpoint, "--out", tmp_path / "again")
    assert fxpipe(*again).code == 0
    (shard, *_) = checkpoint.glob("model-*.safetensors")
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    refused = fxpipe(*again)
    assert refused.code == 1
    assert shard.name in refused.err

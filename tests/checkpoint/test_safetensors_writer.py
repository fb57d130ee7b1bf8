"""What the writer writes, the library reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fxpipe.checkpoint.safetensors_file import DTYPES, safetensors_writer
from fxpipe.task.batch import tensor_spec


def test_all_dtypes_shapes_and_strides(tmp_path: Path) -> None:
    tensors = {f"ü.{dtype}": torch.ones(2, 3).to(getattr(torch, dtype)) for dtype in DTYPES}
    tensors |= {"scalar": torch.tensor(4.0), "empty": torch.zeros(0, 3), "turned": torch.randn(3, 4).t()}
    with safetensors_writer(
        tmp_path / "new" / "model.safetensors", [(n, tensor_spec(t)) for n, t in tensors.items()]
    ) as f:
        for tensor in tensors.values():
            f.write(tensor)
    read = load_file(tmp_path / "new" / "model.safetensors")
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert read[name].shape == tensor.shape
        assert torch.equal(read[name].view(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_after_an_error_there_is_no_file(tmp_path: Path) -> None:
    spec = tensor_spec(torch.ones(2))
    with pytest.raises(AssertionError, match="a is"), safetensors_writer(tmp_path / "m", [("a", spec)]) as file:
        file.write(torch.ones(3))
    assert list(tmp_path.iterdir()) == []

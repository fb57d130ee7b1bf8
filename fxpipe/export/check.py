"""Does a model compute in onnxruntime what it should? Its outputs against tensors that are known to be right."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort
import torch
import torch.utils.dlpack
from torch import Tensor

from fxpipe.backend.compare import Difference, Expected, compare
from fxpipe.errors import ExportError


def check_file(path: Path, inputs: Mapping[str, Tensor], expected: Mapping[str, Expected]) -> list[Difference]:
    """Check a model's file, run it, and say how far each expected output is off.

    Raises:
        ExportError: the file is not a valid model, or onnxruntime cannot run it.
    """
    try:
        onnx.checker.check_model(str(path), full_check=True)
    except Exception as error:
        raise ExportError(f"{path.name} is not a valid ONNX model: {_first_line(error)}") from error
    return compare(run_file(path, inputs), expected)


def run_file(path: Path, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All outputs of a model's file, computed by onnxruntime on the CPU.

    Raises:
        ExportError: it cannot, or the model asks for an input that is not given.
    """
    options = ort.SessionOptions()
    options.log_severity_level = 4  # what goes wrong is raised
    options.intra_op_num_threads = torch.get_num_threads()
    try:
        session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        names = [value.name for value in session.get_outputs()]
        given = {value.name: _to_ort(inputs[value.name]) for value in session.get_inputs()}
        values = session.run_with_ort_values(names, given)
        return {name: _from_ort(value) for name, value in zip(names, values, strict=True)}
    except KeyError as error:
        raise ExportError(f"{path.name} asks for {error.args[0]!r}, which is no input of its stage") from error
    except Exception as error:
        raise ExportError(
            f"onnxruntime {ort.__version__} cannot run {path.name}: {_first_line(error)}",
            hint="its CPU has few operators in bfloat16: compile without --autocast, and with a model in float32"
            if any(tensor.dtype is torch.bfloat16 for tensor in inputs.values()) or "bfloat16" in str(error)
            else None,
        ) from error


def _to_ort(tensor: Tensor) -> Any:
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    if tensor.dtype is torch.bfloat16:  # numpy has none
        bits = tensor.view(torch.int16).numpy().view("uint16")
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, onnx.TensorProto.BFLOAT16)
    return ort.OrtValue.ortvalue_from_numpy(tensor.numpy())


def _from_ort(value: Any) -> Tensor:
    if value.data_type() == "tensor(bfloat16)":
        return torch.utils.dlpack.from_dlpack(value._ortvalue.to_dlpack()).clone()
    return torch.from_numpy(value.numpy())


def _first_line(error: Exception) -> str:
    if isinstance(error, ExportError):
        return error.what
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__

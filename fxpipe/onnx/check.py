"""Runs a model's file in onnxruntime, so that its outputs can be compared with tensors known to be right."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort
import torch
import torch.utils.dlpack
from torch import Tensor

from fxpipe.errors import ExportError, first_line


def run_file(path: Path, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All outputs of a model's file, computed by onnxruntime on the CPU."""
    return CheckedSession(path).run(inputs)


class CheckedSession:
    """A model's file, checked and loaded into onnxruntime on the CPU, to be run more than once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        options = ort.SessionOptions()
        options.log_severity_level = 4  # problems are raised as errors
        options.intra_op_num_threads = torch.get_num_threads()
        try:
            onnx.checker.check_model(str(path), full_check=True)
        except Exception as error:
            raise ExportError(f"{path.name} is not a valid ONNX model: {first_line(error)}") from error
        try:
            self._session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:
            raise self._cannot(error) from error

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All outputs."""
        names = [value.name for value in self._session.get_outputs()]
        input_names = [value.name for value in self._session.get_inputs()]
        missing = next((name for name in input_names if name not in inputs), None)
        if missing is not None:
            raise ExportError(f"{self.path.name} needs {missing!r}, which is not an input of its stage")
        try:
            ort_inputs = {name: _to_ort(inputs[name]) for name in input_names}
            values = self._session.run_with_ort_values(names, ort_inputs)
            return {name: _from_ort(value) for name, value in zip(names, values, strict=True)}
        except Exception as error:
            raise self._cannot(error) from error

    def _cannot(self, error: Exception) -> ExportError:
        hint = None
        if "NOT_IMPLEMENTED" in str(error) or "bfloat16" in str(error):
            hint = "its CPU has few operators in 16 bits: compile a float32 model without --autocast and --params"
        return ExportError(f"onnxruntime {ort.__version__} cannot run {self.path.name}: {first_line(error)}", hint=hint)


def _to_ort(tensor: Tensor) -> Any:
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    if tensor.dtype is torch.bfloat16:  # numpy does not have it
        bits = tensor.view(torch.int16).numpy().view("uint16")
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, onnx.TensorProto.BFLOAT16)
    return ort.OrtValue.ortvalue_from_numpy(tensor.numpy())


def _from_ort(value: Any) -> Tensor:
    if value.data_type() == "tensor(bfloat16)":
        return torch.utils.dlpack.from_dlpack(value._ortvalue.to_dlpack()).clone()
    return torch.from_numpy(value.numpy())

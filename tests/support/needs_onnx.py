"""Skips a file of tests where the packages for ONNX are missing, and makes torch's table of ONNX functions once.

`torch.onnx.export` makes that table anew each time, in more than half a second. It only reads it, except where a caller
brings translations of its own, and fxpipe brings none.
"""

from __future__ import annotations

import functools

import pytest

for _package in ("onnx", "onnxscript", "onnxruntime"):
    pytest.importorskip(_package, reason=f"{_package} is not installed")

from torch.onnx._internal.exporter._registration import ONNXRegistry  # noqa: E402

_from_torchlib = functools.cache(ONNXRegistry.from_torchlib)
ONNXRegistry.from_torchlib = staticmethod(_from_torchlib)  # type: ignore[method-assign, assignment]

"""What ONNX files that were exported of the case `dict` say of themselves, and what they are given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import needs_onnx  # noqa: F401
import onnx
import onnxruntime as ort
from small_models import CASES
from torch import Tensor

CASE = CASES["dict"]
BATCH = CASE.batches(1)[0]


def metadata(path: Path) -> dict[str, Any]:
    (found,) = (p.value for p in onnx.load(path, load_external_data=False).metadata_props if p.key == "fxpipe")
    body: dict[str, Any] = json.loads(found)
    return body


def session(path: Path) -> ort.InferenceSession:
    return ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])


def leaves() -> dict[str, Tensor]:
    """Those of the batch."""
    inputs = {f"batch['inputs']['{name}']": value for name, value in BATCH["inputs"].items()}
    return inputs | {f"batch['{name}']": BATCH[name] for name in ("keep", "y", "weight")}

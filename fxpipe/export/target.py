"""Refuses before any work: missing packages, a wrong opset, a folder with other files. No torch."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from fxpipe.errors import ExportError
from fxpipe.files import check_creatable

PACKAGES = ("onnx", "onnxscript", "onnxruntime")

OLDEST = 18
"""PyTorch's exporter writes this opset and converts from it; an older one comes out wrong, or unconverted."""

NEWEST = 25
"""The newest opset that PyTorch's exporter converts to."""

_TRAINING = re.compile(r"(stage_\d+\.(forward|backward|weights)|pipeline)\.onnx(\.data)?")
_INFERENCE = re.compile(r"stage_\d+\.inference\.onnx(\.data)?")
_HEAD = 64  # bytes of a model's file within which the producer's name is


def check_packages() -> None:
    """Refuse to start without the packages that the export needs."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ExportError(
            f"the export needs {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed",
            hint=f"pip install {' '.join(missing)}",
        )


def check_opset(opset: int) -> None:
    """Refuse an opset that PyTorch's exporter does not write."""
    if not OLDEST <= opset <= NEWEST:
        raise ExportError(
            f"opset {opset} is too {'old' if opset < OLDEST else 'new'} for PyTorch's exporter",
            hint=f"choose --opset from {OLDEST} to {NEWEST}",
        )


def check_export_target(folder: str | Path, *, inference: bool = False) -> None:
    """Refuse a folder that an export could not be written to; an earlier export of the same kind may be replaced."""
    folder = Path(folder)
    if folder.is_dir():
        pattern = _INFERENCE if inference else _TRAINING
        foreign = sorted(e.name for e in folder.iterdir() if not (pattern.fullmatch(e.name) and _is_ours(e)))
        if foreign:
            raise ExportError(
                f"{folder} exists and holds {', '.join(foreign[:5])}{', …' if len(foreign) > 5 else ''}, "
                "which an export would delete",
                hint="choose another -o, or remove it",
            )
    elif folder.exists():
        raise ExportError(f"{folder} is a file", hint="choose another -o")
    check_creatable(folder.resolve().parent, folder, "-o")


def _is_ours(path: Path) -> bool:
    """Whether fxpipe wrote the model; a file of weights belongs to the model next to it."""
    model = path.with_suffix("") if path.suffix == ".data" else path
    try:
        with model.open("rb") as file:
            return b"fxpipe" in file.read(_HEAD)
    except OSError:
        return False

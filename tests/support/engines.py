"""Engines in tests."""

from __future__ import annotations

import pytest

from fxpipe import engines as backend


def needs(engine: str, device: str = "cpu") -> None:
    """Skip where the engine cannot be used."""
    reason = backend.make(engine).missing(device)
    if reason:
        pytest.skip(reason)
    if engine == "onnxruntime":
        import needs_onnx  # noqa: F401

"""Engines that run the parts of stages: eager PyTorch (the emitted code itself), onnxruntime, inductor, CUDA graphs.

Imports no torch, so that the command line can list them at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fxpipe.errors import BackendError, near

if TYPE_CHECKING:
    from fxpipe.engines.engine import Engine

MEASURED = ("eager", "onnxruntime", "inductor")
"""The engines among which `auto` chooses. After a CUDA graph that fails, a process cannot go on to the next engine."""

ENGINES = (*MEASURED, "cudagraph")
BACKENDS = ("auto", *ENGINES)


def make(name: str) -> Engine:
    """The engine called `name`; 'eager' is not an engine, but the emitted code."""
    if name == "onnxruntime":
        from fxpipe.engines.onnxruntime import OrtEngine

        return OrtEngine()
    if name == "inductor":
        from fxpipe.engines.inductor import InductorEngine

        return InductorEngine()
    if name == "cudagraph":
        from fxpipe.engines.cudagraph import CudaGraphEngine

        return CudaGraphEngine()
    raise BackendError(f"no engine {name!r}{near(name, ENGINES)}", hint=f"give one of {', '.join(ENGINES)}")

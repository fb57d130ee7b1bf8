"""Engines that run the parts of stages: eager PyTorch (the emitted code itself), onnxruntime, inductor.

Imports no torch, so that the command line can list them at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fxpipe.errors import BackendError, near

if TYPE_CHECKING:
    from fxpipe.engines.engine import Engine

ENGINES = ("eager", "onnxruntime", "inductor")
BACKENDS = ("auto", *ENGINES)


def make(name: str) -> Engine:
    """The engine called `name`; 'eager' is not an engine, but the emitted code.

    Raises:
        BackendError: an unknown name.
    """
    if name == "onnxruntime":
        from fxpipe.engines.onnxruntime import OrtEngine

        return OrtEngine()
    if name == "inductor":
        from fxpipe.engines.inductor import InductorEngine

        return InductorEngine()
    raise BackendError(f"no engine {name!r}{near(name, ENGINES)}", hint=f"give one of {', '.join(ENGINES)}")

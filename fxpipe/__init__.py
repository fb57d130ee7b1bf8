"""fxpipe: a compiler for pipeline-parallel training of unmodified PyTorch models.

    program = fxpipe.capture(model, loss, batch)
    build = fxpipe.compile(model, loss, batch, workers=4)
    build.save("build/");  build = fxpipe.load("build/")
    pipeline = build.local(optimizer=..., schedule="async", policy="spectrain")

Importing fxpipe imports no torch: each name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from fxpipe.build import Build as Build
    from fxpipe.build import load as load
    from fxpipe.errors import FxpipeError as FxpipeError
    from fxpipe.lowering import compile as compile
    from fxpipe.lowering import lower as lower
    from fxpipe.tracing import capture as capture

_HOME = {
    "Build": "fxpipe.build",
    "compile": "fxpipe.lowering",
    "lower": "fxpipe.lowering",
    "load": "fxpipe.build",
    "capture": "fxpipe.tracing",
    "FxpipeError": "fxpipe.errors",
}
__all__ = ["Build", "FxpipeError", "__version__", "capture", "compile", "load", "lower"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'fxpipe' has no attribute {name!r}")
    found = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = found
    return found

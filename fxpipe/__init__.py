"""fxpipe: a compiler for pipeline-parallel training of unmodified PyTorch models.

    program = fxpipe.capture(model, loss, batch)
    build = fxpipe.compile(model, loss, batch, workers=4)
    build.save("build/");  build = fxpipe.load("build/")
    pipeline = build.local(optimizer=..., schedule="async", policy="spectrain")
    model, summary = fxpipe.fit(model, loss, batches, workers=2, steps=500)  # all of it in one call

Importing fxpipe imports no torch: each name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from fxpipe.builds.build import Build as Build
    from fxpipe.builds.build import join as join
    from fxpipe.builds.build import load as load
    from fxpipe.errors import FxpipeError as FxpipeError
    from fxpipe.lowering.fit import fit as fit
    from fxpipe.lowering.lower import compile as compile
    from fxpipe.lowering.lower import lower as lower
    from fxpipe.planner.cuts import Cuts as Cuts
    from fxpipe.planner.links import Links as Links
    from fxpipe.settings import setting as setting
    from fxpipe.task.meta import on_meta as on_meta
    from fxpipe.task.wrapped_tensors import load_weights as load_weights
    from fxpipe.tracing.capture import capture as capture

_HOME = {
    "Build": "fxpipe.builds.build",
    "Cuts": "fxpipe.planner.cuts",
    "FxpipeError": "fxpipe.errors",
    "Links": "fxpipe.planner.links",
    "capture": "fxpipe.tracing.capture",
    "compile": "fxpipe.lowering.lower",
    "fit": "fxpipe.lowering.fit",
    "join": "fxpipe.builds.build",
    "load": "fxpipe.builds.build",
    "load_weights": "fxpipe.task.wrapped_tensors",
    "lower": "fxpipe.lowering.lower",
    "on_meta": "fxpipe.task.meta",
    "setting": "fxpipe.settings",
}
__all__ = [
    "Build",
    "Cuts",
    "FxpipeError",
    "Links",
    "__version__",
    "capture",
    "compile",
    "fit",
    "join",
    "load",
    "load_weights",
    "lower",
    "on_meta",
    "setting",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'fxpipe' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value

"""Marks what the user's own code calls while autograd runs: gradient hooks, and backward of an autograd.Function.

Autograd's formulas are derivatives of what forward calls. What the user writes is whatever they like, so what is
derived of forward says nothing of it (`passes/analysis/written_backward.py`). Formulas call operators; code in Python
calls torch functions, which a TorchFunctionMode sees.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch import fx
from torch.overrides import TorchFunctionMode

from fxpipe.ir.program import WRITTEN
from fxpipe.tracing.origin import TracedStep
from fxpipe.tracing.user_lines import is_within_users, place, user_frame

_KEY = "fxpipe_written"
_OLD_KEY = "quantization_tag"  # torch 2.11 puts the forward node's "custom" in the place of a backward node's


def mark(node: fx.Node, made: fx.Node) -> None:
    """Let a node know the line of the user's code that called it within backward, if the traced node has one."""
    line = node.meta.get("custom", {}).get(_KEY) or node.meta.get(_OLD_KEY)
    if line is not None:
        made.meta[WRITTEN] = line


@contextlib.contextmanager
def marked(watch: TracedStep) -> Iterator[None]:
    """Inside, nodes that are traced from the user's code within backward get its line.

    Args:
        watch: of the step that is traced; backward begins when it is over.
    """
    engine, lines = torch.autograd._engine_run_backward, _Lines()  # type: ignore[attr-defined]

    def run(*args: Any, **kwargs: Any) -> Any:
        with contextlib.nullcontext() if watch.runs else lines:
            return engine(*args, **kwargs)

    torch.autograd._engine_run_backward = run  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.autograd._engine_run_backward = engine  # type: ignore[attr-defined]


class _Lines(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        frame = sys._getframe(1)
        if not is_within_users(frame):
            return func(*args, **(kwargs or {}))
        user, before = user_frame(frame), fx_traceback.current_meta.get("custom", {})
        assert user is not None
        line = place(user.f_code.co_filename, user.f_lineno)
        fx_traceback.current_meta["custom"] = {**before, _KEY: line}
        fx_traceback.current_meta[_OLD_KEY] = line
        try:
            return func(*args, **(kwargs or {}))
        finally:
            fx_traceback.current_meta["custom"] = before
            fx_traceback.current_meta.pop(_OLD_KEY, None)

"""Where every captured node comes from: module path, the user's line, activation-checkpoint region.

While a step is traced, module hooks keep the path, a TorchFunctionMode finds the user's line at each torch call, and
`torch.utils.checkpoint` is taken over: its regions run as plain code (so either form captures), marked for
`rematerialize` to recompute. The record rides in `current_meta["custom"]`, which the tracer copies to each node.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import linecache
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.fx.traceback as fx_traceback
import torch.utils.checkpoint as torch_checkpoint
from torch import nn
from torch.overrides import TorchFunctionMode

from fxpipe.errors import CaptureError

KEY = "fxpipe_origin"
_LIBRARY = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.abspath(__file__)) + os.sep)
_SET_DATA = vars(torch._C.TensorBase)["data"].__set__


class Origin(NamedTuple):
    """A node's place in the user's program; `file` is the file name as Python knows it."""

    module: str = ""
    file: str = ""
    line: int = 0
    region: int | None = None


def of(meta: dict[str, Any]) -> Origin:
    """The origin in a traced node's metadata."""
    origin: Origin = meta.get("custom", {}).get(KEY, Origin())
    return origin


@contextlib.contextmanager
def recording(model: nn.Module) -> Iterator[None]:
    """Give every node traced inside, from calls of `model` or beside it, its origin."""
    recorder = _Recorder()
    hooks = []
    for path, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(recorder.enter(path), with_kwargs=True, prepend=True))
        hooks.append(module.register_forward_hook(recorder.leave, always_call=True))
    try:
        with recorder, recorder.checkpoints():
            yield
    finally:
        for hook in hooks:
            hook.remove()
        fx_traceback.current_meta.pop("custom", None)


class _Recorder(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.paths: list[str] = [""]
        self.regions: list[int] = []
        self.numbers = itertools.count()
        self.place: tuple[str, int] = ("", 0)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        frame = user_frame(sys._getframe(1))
        if frame is not None:
            self.place = (frame.f_code.co_filename, frame.f_lineno)
            self.mark()
        if func == _SET_DATA:  # the tracer does not see it
            raise CaptureError(
                "the step assigns to the .data of a tensor",
                where=place(*self.place),
                hint="write `with torch.no_grad(): tensor.copy_(new)` instead",
            )
        return func(*args, **(kwargs or {}))

    def mark(self) -> None:
        region = self.regions[0] if self.regions else None  # the outermost: nested ones are recomputed with it
        fx_traceback.current_meta["custom"] = {KEY: Origin(self.paths[-1], *self.place, region)}

    def enter(self, path: str) -> Callable[..., None]:
        def pre_hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            self.paths.append(path)
            self.mark()

        return pre_hook

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self.paths.pop()
        self.mark()

    @contextlib.contextmanager
    def region(self) -> Iterator[None]:
        self.regions.append(next(self.numbers))
        self.mark()
        try:
            yield
        finally:
            self.regions.pop()
            self.mark()

    @contextlib.contextmanager
    def checkpoints(self) -> Iterator[None]:
        """Run checkpointed functions as plain code inside a region.

        Both forms of `torch.utils.checkpoint.checkpoint` look their machinery up in its module when they are called,
        so replacing it there reaches every caller, however the function was imported.
        """
        recorder = self

        class Plain:
            @staticmethod
            def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
                # The reentrant form gives no gradient at all, not even to weights, unless an argument requires one.
                needed = any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
                with recorder.region(), torch.set_grad_enabled(needed and torch.is_grad_enabled()):
                    return function(*args)

        def plain(*args: Any, **kwargs: Any) -> Iterator[None]:
            with recorder.region():
                yield

        saved = (
            torch_checkpoint.CheckpointFunction,
            torch_checkpoint._checkpoint_without_reentrant_generator,
        )
        torch_checkpoint.CheckpointFunction = Plain  # type: ignore[assignment,misc]
        torch_checkpoint._checkpoint_without_reentrant_generator = plain
        try:
            yield
        finally:
            torch_checkpoint.CheckpointFunction = saved[0]  # type: ignore[misc]
            torch_checkpoint._checkpoint_without_reentrant_generator = saved[1]


def user_frame(frame: FrameType | None) -> FrameType | None:
    """The first frame, from `frame` outwards, that is neither torch's nor fxpipe's."""
    while frame is not None and frame.f_code.co_filename.startswith((*_LIBRARY, "<")):
        frame = frame.f_back
    return frame


def user_traceback(error: BaseException) -> str | None:
    """`file.py:12: the line` of the deepest frame of an error that is neither torch's nor fxpipe's."""
    found = None
    traceback = error.__traceback__
    while traceback is not None:
        name = traceback.tb_frame.f_code.co_filename
        if not name.startswith((*_LIBRARY, "<")):
            found = place(name, traceback.tb_lineno)
        traceback = traceback.tb_next
    return found


def user_stack(stack: str) -> str | None:
    """The same of the innermost frame of a stack as Python prints it: of `stack_trace` in a node's metadata."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', stack)
    own = [(file, int(line)) for file, line in frames if not file.startswith((*_LIBRARY, "<"))]
    return place(*own[-1]) if own else None


def place(file: str, line: int) -> str:
    """`file.py:12: the line`."""
    return f"{short(file)}:{line}: {text(file, line)}"


def definition(function: Callable[..., Any]) -> str | None:
    """`file.py:12, in loss`: where a function is defined; None for a callable without code of its own."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return None if code is None else f"{short(code.co_filename)}:{code.co_firstlineno}, in {code.co_name}"


def short(file: str) -> str:
    """A file's name as its reader knows it: relative to where Python found it, else its base name. Never absolute."""
    best = ""
    for entry in sys.path:
        prefix = os.path.abspath(entry) + os.sep
        if file.startswith(prefix) and len(prefix) > len(best):
            best = prefix
    return file[len(best) :] if best else os.path.basename(file)


def text(file: str, line: int) -> str:
    """The line's text, without its surrounding blanks."""
    return linecache.getline(file, line).strip()


def version_hint() -> str:
    """What to say when torch's tracing internals have moved."""
    return f"fxpipe supports torch 2.11 and newer; this is torch {torch.__version__}"

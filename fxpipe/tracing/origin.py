"""Where every captured node comes from: module path, the user's line, activation-checkpoint region.

While a step is traced, module hooks keep the path, a TorchFunctionMode finds the user's line at each torch call, and
`torch.utils.checkpoint` is replaced: its regions run as plain code (so either form captures), marked for
`rematerialize` to recompute. The record is in `current_meta["custom"]`, which the tracer copies to each node. The same
mode passes every torch call to `calls`, and refuses calls that tracing would not see.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import sys
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.fx.traceback as fx_traceback
import torch.utils.checkpoint as torch_checkpoint
from torch import nn
from torch.overrides import TorchFunctionMode

from fxpipe.errors import CaptureError
from fxpipe.messages import saying
from fxpipe.torch_private import (
    CHECKPOINT_GENERATOR,
    MARK,
    UNKNOWN,
    FakeTensor,
    HigherOrderOperator,
    is_tensor_view,
    made_functional,
    memory_of,
    set_data,
)
from fxpipe.tracing import unseen
from fxpipe.tracing.batch_reads import BatchReads
from fxpipe.tracing.known_values import KnownValues, mapped, tensors_in
from fxpipe.tracing.step_calls import StepCalls
from fxpipe.tracing.torch_versions import TESTED
from fxpipe.user_lines import outwards, place, stacked, user_frame

KEY = "fxpipe_origin"


class Origin(NamedTuple):
    """A node's place in the user's program; `file` is the file name as Python knows it.

    `marks`: how many of the step's own marks for cuts come before it: torch's `pipe_split()`.
    """

    module: str = ""
    file: str = ""
    line: int = 0
    region: int | None = None
    marks: int = 0


def of(meta: dict[str, Any]) -> Origin:
    """The origin in a traced node's metadata."""
    origin: Origin = meta.get("custom", {}).get(KEY, Origin())
    return origin


class TracedStep:
    """What is known about a step while it is traced, from all of its calls."""

    def __init__(self) -> None:
        self.calls = StepCalls(every=True)
        self.lines: dict[tuple[str, int], str] = {}  # by line that calls torch, its text and the user's that led to it
        self.operators: dict[str, tuple[str, int]] = {}  # by torch function or operator, the line that last called it
        self.higher: tuple[str, int] = ("", 0)  # the line that last called a higher-order operator
        self.failed: tuple[Exception | None, str] = (None, "")  # the error of the last call that failed, and its name
        # The error of the last call that asked for a value. It fails the trace even if the step caught it, because with
        # values the step would take another path.
        self.unknown: Exception | None = None
        self.followed: Container[int] = ()  # the ids of tensors that hooks of a run reach
        self.met: dict[int, str | None] = {}  # the lines that first passed them to torch, by id

    def where(self, line: tuple[str, int]) -> str | None:
        return self.lines.get(line)

    def raised_by(self, error: Exception) -> str:
        """The name of the torch function that raised an error; '' if none did."""
        return self.failed[1] if self.failed[0] is error else ""


@contextlib.contextmanager
def recording(
    model: nn.Module,
    watch: TracedStep,
    arguments: Sequence[torch.Tensor],
    stand_ins: Mapping[int, torch.Tensor],
    known_values: KnownValues,
    reads: BatchReads,
) -> Iterator[None]:
    """Give every node traced inside, from calls of `model` or outside it, its origin.

    All calls of a step share one `watch`. `stand_ins` are, by the id of a tensor, the tensors to call torch with
    instead: for the model's own tensors that an object, a closure or functools.partial holds.

    Raises:
        CaptureError: the step does something else than at its first call.
    """
    arguments, calls = [*arguments, *stand_ins.values()], watch.calls
    recorder = _Recorder(watch, arguments, stand_ins, known_values, reads)
    calls.begin(arguments)
    hooks = []
    for path, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(recorder.enter(path), with_kwargs=True, prepend=True))
        hooks.append(module.register_forward_hook(recorder.leave, always_call=True))
    try:
        progress = saying(lambda: f"tracing, {recorder.count} calls of torch so far")
        with progress, recorder, recorder.checkpoints(), known_values.lists(), unseen.refused():
            yield
        if watch.unknown is not None:
            raise watch.unknown
        calls.repeat(watch.where)
    except CaptureError:
        raise
    except Exception:
        calls.repeat(watch.where, failed=True)  # a difference comes before what it causes
        raise
    finally:
        for hook in hooks:
            hook.remove()
        fx_traceback.current_meta.pop("custom", None)


class _Recorder(TorchFunctionMode):
    def __init__(
        self,
        watch: TracedStep,
        arguments: Sequence[torch.Tensor],
        stand_ins: Mapping[int, torch.Tensor],
        known_values: KnownValues,
        reads: BatchReads,
    ) -> None:
        super().__init__()
        self.watch = watch
        self.known_values = known_values
        self.reads = reads
        self.stand_ins = stand_ins
        self.stand_in_ids = {id(tensor) for tensor in stand_ins.values()}
        self.memories = {memory_of(tensor) for tensor in arguments}
        self.paths: list[str] = [""]
        self.regions: list[int] = []
        self.numbers = itertools.count()
        self.marks = 0
        self.count = 0
        self.place: tuple[str, int] = ("", 0)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        frame = user_frame(sys._getframe(1))
        if frame is not None:
            self.place = (frame.f_code.co_filename, frame.f_lineno)
            if self.place not in self.watch.lines:
                self.watch.lines[self.place] = stacked(outwards(frame)) or place(*self.place)
            self.mark()
        name = getattr(func, "__name__", "")
        if name == MARK:
            self.marks += 1
            return None
        args, kwargs = self.replaced(tuple(args)), self.replaced(kwargs or {})
        traced = functools.partial(self.known_values.call, func, traced=functools.partial(self.traced, func))
        try:
            return self.reads.call(func, args, kwargs, traced)
        except Exception as error:
            self.watch.failed = (error, name)
            if isinstance(error, UNKNOWN):
                self.watch.unknown = error
            raise

    def traced(
        self,
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        counts_as: tuple[Sequence[Any], dict[str, Any]] | None = None,
    ) -> Any:
        """What a torch call returns, now that it is known where it comes from.

        Between runs of the step the arguments `counts_as` are compared, instead of these.
        """
        name = getattr(func, "__name__", "")
        if name == "__get__":  # an attribute
            return func(*args, **kwargs)
        if func == set_data and args[0] is args[1]:
            return None  # what module.to(…) does if the dtype is already right
        if func == set_data and self.is_update(*args):
            func, name, args = torch.Tensor.copy_, "copy_", (args[0], args[1].detach())
        self.refuse(func, name, kwargs)
        call = self.watch.calls.call(name, *(counts_as or (args, kwargs)), self.where)
        self.watch.operators[name] = self.place
        if isinstance(func, HigherOrderOperator):
            self.watch.higher = self.place
        result = _fresh(func(*args, **kwargs), args, kwargs)
        self.count += 1
        self.watch.calls.made(call, result, self.place, self.where)
        return result

    def replaced(self, value: Any) -> Any:
        """Arguments of a torch call with stand-ins."""
        return mapped(value, self.stand_in)

    def stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in self.watch.followed and id(tensor) not in self.watch.met:
            self.watch.met[id(tensor)] = self.where()
        return self.stand_ins.get(id(tensor), tensor)

    def is_update(self, tensor: torch.Tensor, value: torch.Tensor) -> bool:
        """Whether `tensor.data = value` may be a copy_: into an untrained tensor of the model, of a new value."""
        return (
            id(tensor) in self.stand_in_ids
            and not tensor.requires_grad
            and (tensor.shape, tensor.dtype) == (value.shape, value.dtype)
            and not is_tensor_view(value)
            and memory_of(value) not in self.memories
        )

    def where(self) -> str | None:
        """The line of the current call, and the user's line that led to it."""
        return stacked(outwards(user_frame(sys._getframe(1)))) or self.watch.where(self.place)

    def refuse(self, func: Callable[..., Any], name: str, kwargs: dict[str, Any]) -> None:
        """Refuse what tracing does not see, or sees wrongly."""
        if func == set_data:
            raise CaptureError(
                "the step assigns to the .data of a tensor",
                where=self.where(),
                hint="compute the new value as a separate tensor, with .detach() where no gradient should pass; "
                "update a buffer with copy_",
                page="tensor-data",
            )
        if name == "backward":
            raise CaptureError(
                "the step calls backward() itself",
                where=self.where(),
                hint="return the loss: the backward pass is captured with it",
                page="backward",
            )
        if isinstance(kwargs.get("generator"), torch.Generator):
            raise CaptureError(
                "the step draws from its own torch.Generator, whose state no graph can hold",
                where=self.where(),
                hint="draw from torch's own generator, which each run seeds: leave out generator=",
                page="randomness",
            )

    def mark(self) -> None:
        region = self.regions[0] if self.regions else None  # the outermost region: nested ones are recomputed with it
        fx_traceback.current_meta["custom"] = {KEY: Origin(self.paths[-1], *self.place, region, self.marks)}

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

        Both forms of `torch.utils.checkpoint.checkpoint` look up their internals in its module when they are called, so
        replacing them there reaches every caller, no matter how it imported the function.
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

        # torch 2.15 looks up another name than earlier ones: …_generator_impl.
        generators = [name for name in vars(torch_checkpoint) if name.startswith(CHECKPOINT_GENERATOR)]
        replaced: dict[str, Any] = {"CheckpointFunction": Plain, **dict.fromkeys(generators, plain)}
        with mock.patch.multiple(torch_checkpoint, **replaced):
            yield


def _fresh(result: Any, args: Any, kwargs: Any) -> Any:
    """What a call returns, where new tensors made only of tensors from elsewhere are the step's own, which may change.

    What shares memory with one from elsewhere stays as it is: a change of it would be lost.
    """

    def of_step(tensor: torch.Tensor) -> torch.Tensor:
        if type(tensor) is not FakeTensor or tensor.requires_grad or is_tensor_view(tensor):
            return tensor
        for argument in tensors_in((args, kwargs)):
            seen = argument if isinstance(argument, FakeTensor) else tensor.fake_mode.from_tensor(argument)
            if memory_of(seen) == memory_of(tensor):
                return tensor
        return made_functional(tensor)

    return mapped(result, of_step)


def version_hint() -> str:
    """The hint for errors that may come from changed tracing internals of torch."""
    return f"fxpipe is tested with torch {', '.join(TESTED)}; this is torch {torch.__version__}"


def identifier(name: str) -> str:
    """A Python name for a dotted path: `blocks.3.ln` becomes `blocks_3_ln`."""
    name = re.sub(r"\W+", "_", name).strip("_")
    return name if name and not name[0].isdigit() else f"_{name}"

"""Refuses, while a step is traced, what tracing would drop or freeze silently; leaves checks of values out."""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn
from unittest import mock

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.distributions import Distribution

from fxpipe.errors import CaptureError
from fxpipe.torch_private import CHECK_TENSOR, disable_current_modes, validates_args
from fxpipe.user_lines import outwards, place, stacked, user_frame

_SEEDING = ("manual_seed", "seed", "initial_seed", "set_rng_state")  # torch.random.fork_rng calls the last
_SEEDING_CUDA = ("manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state", "set_rng_state_all")
_OF_GENERATOR = ("manual_seed", "seed", "initial_seed", "set_state", "graphsafe_set_state", "set_offset")
_SCALING = ("scale", "unscale_", "step", "update")

Refuse = Callable[[str, Callable[..., Any]], Callable[..., Any]]


@contextlib.contextmanager
def refused() -> Iterator[None]:
    """Inside, torch.manual_seed and its like, a GradScaler's calls, and hooks for saved tensors are errors.

    Other threads of the user's may call them, and draw random numbers.

    Raises:
        CaptureError: from the call; or at the end, if a generator was seeded in another way.
    """
    generator, thread = torch.default_generator, _TracingThread()
    state, seed = _state(generator), generator.initial_seed()
    rows: tuple[tuple[Refuse, Sequence[str], Sequence[Any]], ...] = (
        (_seeding("torch"), _SEEDING, (torch, torch.random)),
        (_seeding("torch.cuda"), _SEEDING_CUDA, (torch.cuda, torch.cuda.random)),
        (_scaling, _SCALING, (torch.amp.GradScaler,)),
        (_packing, ("__enter__",), (saved_tensors_hooks,)),
    )
    with contextlib.ExitStack() as stack:
        for refusing, names, owners in rows:
            for owner, name in itertools.product(owners, names):
                before = getattr(owner, name)
                stack.enter_context(mock.patch.object(owner, name, thread.only(before, refusing(name, before))))
        for owner in (torch, torch.random):
            stack.enter_context(mock.patch.object(owner, "default_generator", _standing_in(generator, thread)))
        yield
    if (now := _state(generator)) == state or thread.others_called:  # what is drawn while tracing does not change it
        return
    alone = not any(map(thread.is_other, threading.enumerate()))
    if alone or generator.initial_seed() != seed or now == _state(torch.Generator().manual_seed(seed)):
        _seed("a method of torch.default_generator")


class _TracingThread:
    """The thread that traces, and whether another thread has called what is refused here."""

    def __init__(self) -> None:
        self._thread, self.others_called = threading.current_thread(), False

    def is_other(self, thread: threading.Thread) -> bool:
        """Whether a thread is the user's own; threads that Python has not made are autograd's, and run the step."""
        return thread is not self._thread and not isinstance(thread, threading._DummyThread)

    def only(self, before: Callable[..., Any], here: Callable[..., Any]) -> Callable[..., Any]:
        """A function that is `here` for this thread, and as before for others."""

        @functools.wraps(before)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self.is_other(threading.current_thread()):
                return here(*args, **kwargs)
            self.others_called = True
            return before(*args, **kwargs)

        return call


def _state(generator: torch.Generator) -> bytes:
    with disable_current_modes():
        return generator.get_state().numpy().tobytes()


def _seed(called: str, *args: Any) -> NoReturn:
    raise CaptureError(
        f"the step calls {called}, which no graph can hold",
        where=stacked(outwards(sys._getframe(1))),
        hint="leave it out: each run seeds torch's generator; what must be the same at every step belongs in a buffer",
        page="randomness",
    )


def _seeding(owner: str) -> Refuse:
    return lambda name, _: functools.partial(_seed, f"{owner}.{name}")


def _standing_in(generator: torch.Generator, thread: _TracingThread) -> torch.Generator:
    """In the place of torch's own generator: what a step calls of it is not a torch call."""
    refused = {method: functools.partial(_seed, f"torch.default_generator.{method}") for method in _OF_GENERATOR}
    methods = {name: staticmethod(thread.only(getattr(generator, name), refuse)) for name, refuse in refused.items()}
    return type("Generator", (torch.Generator,), {**methods, "get_state": staticmethod(generator.get_state)})()


def _refusing(passes: Callable[[Any], bool], text: str, cure: str) -> Refuse:
    """Refuses a method of all objects but those that pass."""

    def refusing(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def refuse(instance: Any, *args: Any, **kwargs: Any) -> Any:
            if passes(instance):
                return function(instance, *args, **kwargs)
            where = stacked(outwards(sys._getframe(1)))
            raise CaptureError(text.format(name), where=where, hint=cure, page="backward")

        return refuse

    return refusing


_scaling = _refusing(
    lambda scaler: not scaler.is_enabled(),
    "the step calls GradScaler.{}: a GradScaler looks at gradients, and a step that is captured has none yet",
    "return the loss itself, and take bfloat16, which needs no scale: --autocast bf16; or float16, for which a run "
    "scales the loss: --autocast fp16",
)
_packing = _refusing(
    # save_on_cpu and the like: the backward reads what the forward computed
    lambda hooks: type(hooks) is not saved_tensors_hooks and type(hooks).__module__.startswith("torch."),
    "the step packs what its forward saves for its backward (saved_tensors_hooks), and the backward of a graph reads "
    "what its forward computed",
    "leave the hooks out; torch.utils.checkpoint.checkpoint saves memory, too; what the backward is to read instead of "
    "the exact value, an autograd.Function saves with ctx.save_for_backward",
)


@contextlib.contextmanager
def without_checks() -> Iterator[list[str]]:
    """Inside, torch's own checks of traced values pass; the list gets a note for each place that makes one.

    `torch._check_tensor_all` and `torch._check_tensor_all_with` raise if an element is False. Libraries call them to
    inform torch.compile: transformers compares the image tokens of a text with its images. `torch.distributions` checks
    its parameters and samples unless the default validate_args is False.
    """
    notes: list[str] = []
    check: Any = getattr(torch, CHECK_TENSOR, None)
    validates = validates_args(Distribution)

    def passing(error_type: type[Exception], cond: Any, message: Any = None) -> None:
        if not isinstance(cond, torch.Tensor) or cond.dtype != torch.bool:
            check(error_type, cond, message)  # which refuses it
        frame = user_frame(sys._getframe(1))
        at = f" ({place(frame.f_code.co_filename, frame.f_lineno)})" if frame else ""
        note = f"the step checks values, which the emitted code does not{at}"
        if note not in notes:
            notes.append(note)

    Distribution.set_default_validate_args(False)
    try:
        with mock.patch.object(torch, CHECK_TENSOR, passing, create=True):
            yield notes
    finally:
        Distribution.set_default_validate_args(validates)

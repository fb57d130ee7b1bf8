"""Refuses, while a step is traced, what no torch call shows: tracing would drop it or freeze it silently."""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn
from unittest import mock

import torch
from torch.autograd.graph import saved_tensors_hooks

from fxpipe.errors import CaptureError
from fxpipe.torch_private import disable_current_modes
from fxpipe.tracing.user_lines import outwards, stacked

_SEEDING = ("manual_seed", "seed", "initial_seed", "set_rng_state")  # torch.random.fork_rng calls the last
_SEEDING_CUDA = ("manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state", "set_rng_state_all")
_OF_GENERATOR = ("manual_seed", "seed", "initial_seed", "set_state", "graphsafe_set_state", "set_offset")
_SCALING = ("scale", "unscale_", "step", "update")

Refuse = Callable[[str, Callable[..., Any]], Callable[..., Any]]


@contextlib.contextmanager
def refused() -> Iterator[None]:
    """Inside, torch.manual_seed and its like, a GradScaler's calls, and hooks for saved tensors are errors.

    Raises:
        CaptureError: from the call; or at the end, if a generator was seeded in another way.
    """
    generator = torch.default_generator
    state = _state(generator)
    rows: tuple[tuple[Refuse, Sequence[str], Sequence[Any]], ...] = (
        (_seeding("torch"), _SEEDING, (torch, torch.random)),
        (_seeding("torch.cuda"), _SEEDING_CUDA, (torch.cuda, torch.cuda.random)),
        (_scaling, _SCALING, (torch.amp.GradScaler,)),
        (_packing, ("__enter__",), (saved_tensors_hooks,)),
        (_standing_in, ("default_generator",), (torch, torch.random)),
    )
    with contextlib.ExitStack() as stack:
        for refusing, names, owners in rows:
            for owner, name in itertools.product(owners, names):
                stack.enter_context(mock.patch.object(owner, name, refusing(name, getattr(owner, name))))
        yield
    if _state(generator) != state:  # what the step draws while it is traced does not change it
        _seed("a method of torch.default_generator")


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


def _standing_in(name: str, _: Any) -> Any:
    """In the place of torch's own generator: what a step calls of it is not a torch call."""
    methods = {method: functools.partial(_seed, f"torch.{name}.{method}") for method in _OF_GENERATOR}
    return type("Generator", (torch.Generator,), methods)()


def _refusing(
    passes: Callable[[Any], bool], text: str, cure: str
) -> Callable[[str, Callable[..., Any]], Callable[..., Any]]:
    """Refuses a method of all objects but those that pass."""

    def refusing(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def refuse(own: Any, *args: Any, **kwargs: Any) -> Any:
            if passes(own):
                return function(own, *args, **kwargs)
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

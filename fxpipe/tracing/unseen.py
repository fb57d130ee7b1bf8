"""Refuses, while a step is traced, what no torch call shows: tracing would drop it or freeze it silently."""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

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
    generator, saved = torch.default_generator, list[tuple[Any, str, Any]]()
    state = _state(generator)
    rows: tuple[tuple[Refuse, Sequence[str], Sequence[Any]], ...] = (
        (_seeding("torch"), _SEEDING, (torch, torch.random)),
        (_seeding("torch.cuda"), _SEEDING_CUDA, (torch.cuda, torch.cuda.random)),
        (_scaling, _SCALING, (torch.amp.GradScaler,)),
        (_packing, ("__enter__",), (saved_tensors_hooks,)),
        (_standing_in, ("default_generator",), (torch, torch.random)),
    )
    for refusing, names, owners in rows:
        for owner, name in itertools.product(owners, names):
            saved.append((owner, name, getattr(owner, name)))
            setattr(owner, name, refusing(name, getattr(owner, name)))
    try:
        yield
    finally:
        for owner, name, before in saved:
            setattr(owner, name, before)
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


def _scaling(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def refuse(scaler: Any, *args: Any, **kwargs: Any) -> Any:
        if not scaler.is_enabled():
            return function(scaler, *args, **kwargs)
        raise CaptureError(
            f"the step calls GradScaler.{name}: a GradScaler looks at gradients, and a step that is captured has "
            "none yet",
            where=stacked(outwards(sys._getframe(1))),
            hint="return the loss itself, and take bfloat16, which needs no scale: --autocast bf16; or float16, "
            "for which a run scales the loss: --autocast fp16",
            page="backward",
        )

    return refuse


def _packing(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def refuse(hooks: Any) -> Any:
        if type(hooks) is not saved_tensors_hooks and type(hooks).__module__.startswith("torch."):
            return function(hooks)  # save_on_cpu and the like: the backward reads what the forward computed
        raise CaptureError(
            "the step packs what its forward saves for its backward (saved_tensors_hooks), and the backward of a graph "
            "reads what its forward computed",
            where=stacked(outwards(sys._getframe(1))),
            hint="leave the hooks out; torch.utils.checkpoint.checkpoint saves memory, too; what the backward is to "
            "read instead of the exact value, an autograd.Function saves with ctx.save_for_backward",
            page="backward",
        )

    return refuse

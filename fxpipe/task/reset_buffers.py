"""The hook `reset(model)`: which buffers start afresh with an epoch and with an evaluation, such as a hidden state.

    def reset(model):
        for layer in model.layers:
            layer.hidden.zero_()                       # in place
            layer.cell = torch.zeros_like(layer.cell)  # or another tensor of the same shape and dtype

It is called on a view of the model (`fxpipe.task.model_view`) on every worker: the worker's buffers are
live, all other buffers and all parameters are on the meta device. Only buffers may change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.errors import TaskError, listed
from fxpipe.plan.plan import Plan
from fxpipe.random_state import random_state_kept, seed_generators, seed_of
from fxpipe.task.model_view import replaced
from fxpipe.torch_private import BUFFERS, MODULES, PARAMETERS, version_of

Rows = Mapping[tuple[str, ...], Tensor]
"""Buffers by all of their names."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_HINT = "reset(model) may change only buffers: keep the state in a tensor registered with register_buffer()"


def buffers_after(
    model: nn.Module, hook: Callable[[nn.Module], Any], rows: Rows, where: str | None = None
) -> dict[str, Tensor]:
    """The values that `hook` leaves in the buffers of a view of the model; model and given buffers stay unchanged.

    These are all of `rows` that are buffers of the model, by first names, with their former strides.
    """
    by_name = {name: (names[0], value) for names, value in rows.items() for name in names}
    present = dict(model.named_buffers(remove_duplicate=False))
    live = {first: value.clone() for first, value in (by_name[name] for name in present if name in by_name)}
    live_by_id = {id(b): live[by_name[n][0]] if n in by_name else b.detach().to("meta") for n, b in present.items()}
    view: nn.Module = replaced(model, live_by_id)
    before = list(_all_else(view))
    versions = [version_of(tensor) for _, tensor in before if isinstance(tensor, Tensor)]
    try:
        with torch.no_grad():
            hook(view)
    except TaskError as error:
        error.hint = error.hint or "parameters, and buffers of other workers, have no values here"
        raise
    except Exception as error:
        raise TaskError(
            f"reset() raised {type(error).__name__}: {error}",
            where=where,
            hint="parameters, and buffers of other workers, have no values here",
        ) from error
    _refuse_other_changes(before, versions, list(_all_else(view)), where)
    buffers: dict[str, Tensor] = {}
    now = dict(view.named_buffers(remove_duplicate=False))
    if new_names := sorted(now.keys() - present.keys()):
        raise TaskError(f"reset(model) makes new buffers: {listed(new_names)}", where=where, hint=_HINT)
    for name in present:
        if name not in by_name:
            continue
        first, old = by_name[name]
        new = now.get(name)
        if first in buffers and buffers[first] is not new:
            raise TaskError(
                f"reset(model) replaces {name} in one of the modules that share it",
                where=where,
                hint="change it in place (zero_(), copy_()), so that all of them see the new value",
            )
        if new is None or new.is_meta or (new.shape, new.dtype) != (old.shape, old.dtype):
            result = "nothing" if new is None else "a tensor without values, made from another worker's"
            if new is not None and not new.is_meta:
                result = f"{new.dtype}{list(new.shape)}"
            raise TaskError(
                f"reset(model) makes {result} of buffer {name}, which is {old.dtype}{list(old.shape)}",
                where=where,
                hint="a buffer keeps its shape and dtype, and is computed from numbers or from itself",
            )
        buffers[first] = new
    return {n: torch.empty_like(by_name[n][1]).copy_(v.detach()) for n, v in buffers.items()}


def _all_else(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """What the model's modules hold next to buffers, by where it is."""
    for path, module in model.named_modules():
        stem = f"{path}." if path else ""
        for key, value in vars(module).items():
            if key in (PARAMETERS, MODULES):
                yield from ((stem + name, held) for name, held in value.items())
            elif key not in (BUFFERS, "training"):
                yield from _held(value, stem + key)


def _held(value: Any, place: str, depth: int = 4) -> Iterator[tuple[str, Any]]:
    members: list[tuple[Any, Any]] | None = None
    if isinstance(value, dict):
        members = list(value.items())
    elif isinstance(value, (list, tuple)):
        members = list(enumerate(value))
    if members is None or not depth:
        yield place, value
        return
    for key, member in members:
        yield from _held(member, f"{place}[{key!r}]", depth - 1)


def _refuse_other_changes(
    before: list[tuple[str, Any]], versions: list[int], after: list[tuple[str, Any]], where: str | None
) -> None:
    old, new = dict(before), dict(after)
    changed = [place for place in {**old, **new} if place not in old or place not in new]
    changed += [place for place in old if place in new and not _same(old[place], new[place])]
    tensors = [(place, value) for place, value in before if isinstance(value, Tensor)]
    changed += [place for (place, value), seen in zip(tensors, versions, strict=True) if version_of(value) != seen]
    if changed:
        raise TaskError(f"reset(model) changes {listed(sorted(set(changed)))}", where=where, hint=_HINT)


def _same(old: Any, new: Any) -> bool:
    return old is new or (type(old) is type(new) and isinstance(old, _PLAIN) and bool(old == new or old != old))


class BuffersReset:
    """Calls the hook, on a view of the model (`Task.reset`), on the buffers that a worker has.

    Torch, `random` and numpy are seeded from the run's seed and the place of the call, alike on all workers.
    """

    def __init__(self, plan: Plan, reset: Callable[[Rows], dict[str, Tensor]], seed: int) -> None:
        self._rows = {b.name: b for b in plan.buffers}
        self._reset = reset
        self._seed = seed
        self._device = torch.device(plan.device)
        self.every: int | None = None  # how many steps an epoch has; None where epochs are the user's

    def due(self, minibatch: int) -> bool:
        """Whether a minibatch, counted from 0, is the first of an epoch."""
        return self.every is not None and minibatch % self.every == 0

    def __call__(self, state: dict[str, Tensor], *place: object) -> None:
        """Put what the hook makes in the place of a worker's buffers; the tensors themselves stay as they are.

        State has buffers by their first names; whatever else it has is left alone. The place of the call, a minibatch
        or an evaluation, is for random numbers.
        """
        rows = {self._rows[name].names: value for name, value in state.items() if name in self._rows}
        with random_state_kept():
            seed_generators(seed_of(self._seed, "reset", *place), self._device.type)
            before = torch.get_rng_state()
            buffers = self._reset(rows)
            drew = not torch.equal(before, torch.get_rng_state())
        shared = [n for n, v in buffers.items() if len(self._rows[n].workers) > 1 and not torch.equal(v, state[n])]
        if drew and shared:
            raise TaskError(
                f"reset(model) draws random numbers and changes {listed(shared)}, of which several workers have copies "
                "that must stay alike",
                hint="take random numbers for a buffer that training changes, which has one worker; or none",
            )
        state.update(buffers)

"""What a model holds: its tensors, each memory once, and its state while the step is traced.

Parameters, buffers, and tensors that modules keep as plain attributes (masks, tables, running statistics) are inputs
of the captured step. While it is traced, traced tensors stand in their place; afterwards the model is as it was before,
whatever the step has cached, counted or replaced. A tensor that the step replaces (`self.ema = 0.9 * self.ema + …`) is
an output.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from fxpipe.errors import CaptureError

_INTERNAL = frozenset(nn.Module().__dict__)
_HOOKS = tuple(key for key in _INTERNAL if "hooks" in key and isinstance(nn.Module().__dict__[key], dict))
_COPIED = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"})
_LARGE = 10_000  # a container with more elements is a vocabulary, not a cache
_PLAIN = (bool, int, float, str)


class _Place(NamedTuple):
    """Where a module holds a row: the keys that lead to it from the module's `__dict__`."""

    module: nn.Module
    keys: tuple[Any, ...]
    row: int

    @property
    def registered(self) -> bool:
        return self.keys[0] in ("_parameters", "_buffers")


class HeldTensors:
    """The model's tensors, one row for each memory, with all of its names: parameters first, then all others.

    Attributes:
        parameters: how many rows are parameters.
        registered: how many are parameters or buffers; plain attributes follow.
        changed: Python attributes that the step changed while it was last traced, as `path: old → new`.

    Raises:
        CaptureError: a lazy or scripted module, parameters that overlap, or that have no values while others have.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.names: list[tuple[str, ...]] = []
        self.values: list[torch.Tensor] = []
        self.changed: list[str] = []
        self._rows: dict[Any, int] = {}
        self._row_of: dict[int, int] = {}  # by id of the tensor object
        self._places: list[_Place] = []
        _refuse_scripted(model)
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._add(name, parameter)
        self.parameters = len(self.values)
        for name, buffer in model.named_buffers(remove_duplicate=False):
            self._add(name, buffer)
        self.registered = len(self.values)
        self._refuse_without_values()
        self._add_places()
        self._refuse_overlaps()
        persistent = set(model.state_dict(keep_vars=True))
        self.persistent = [any(n in persistent for n in names) for names in self.names]

    @property
    def trained(self) -> bool:
        return any(v.requires_grad for v in self.values[: self.parameters])

    @property
    def inputs(self) -> list[torch.Tensor]:
        """What the step is traced on: of the rows only parameters may require gradients."""
        return [v if i < self.parameters else v.detach() for i, v in enumerate(self.values)]

    @property
    def hooked(self) -> list[str]:
        """Parameters with gradient hooks and modules with backward hooks."""
        parameters = zip(self.names[: self.parameters], self.values, strict=False)
        found = [names[0] for names, parameter in parameters if parameter._backward_hooks]
        modules = self.model.named_modules()
        return found + [path or "the model" for path, m in modules if m._backward_hooks or m._backward_pre_hooks]

    @contextlib.contextmanager
    def replaced(self, given: Sequence[torch.Tensor]) -> Iterator[None]:
        """The model with `given` in the place of its rows; then as it was.

        Containers are handed out as copies, the same copy wherever the same one is held.
        """
        originals = [(m, dict(m.__dict__)) for m in self.model.modules()]
        hooks = [
            (value, dict(value)) for _, state in originals for value in map(state.get, _HOOKS) if value is not None
        ]
        copies: dict[int, Any] = {}

        def stand_in(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return given[self._row_of[id(value)]] if id(value) in self._row_of else value
            if type(value) not in (list, tuple, dict, OrderedDict, set) or len(value) > _LARGE:
                return value
            if id(value) in copies:
                return copies[id(value)]
            if isinstance(value, tuple):
                return tuple(map(stand_in, value))
            made = copies[id(value)] = type(value)()
            if isinstance(value, dict):
                made.update((k, stand_in(v)) for k, v in value.items())
            elif isinstance(value, list):
                made.extend(map(stand_in, value))
            else:
                made.update(value)
            return made

        try:
            for module, state in originals:
                for key, value in state.items():
                    if key not in _INTERNAL or key in _COPIED:
                        module.__dict__[key] = stand_in(value)
            yield
            self._refuse_new(given)
            self.changed = list(self._changes(originals))
        finally:
            for module, state in originals:
                module.__dict__.clear()
                module.__dict__.update(state)
            for holder, before in hooks:
                if holder != before:  # models register hooks of their own in their first step
                    holder.clear()
                    holder.update(before)

    def hook(self, given: Sequence[torch.Tensor]) -> None:
        """Give the stand-ins the gradient hooks of their parameters.

        Raises:
            CaptureError: a hook that runs after accumulation, which has no place in a graph.
        """
        for i, parameter in enumerate(self.values[: self.parameters]):
            if getattr(parameter, "_post_accumulate_grad_hooks", None):
                raise CaptureError(
                    f"parameter {self.names[i][0]} has a post-accumulate-grad hook, which a pipeline cannot run",
                    hint="remove it; to change gradients use register_hook, to change weights the optimizer",
                )
            for call in (parameter._backward_hooks or {}).values():
                given[i].register_hook(call)

    def rebound(self, given: Sequence[torch.Tensor]) -> dict[int, Any]:
        """Inside `replaced`: by row, what the step has put in the place of a buffer or a plain attribute.

        Raises:
            CaptureError: it replaced a parameter, or one of several names of a buffer.
        """
        found: dict[int, Any] = {}
        kept: set[int] = set()
        for place in self._places:
            if place.row < self.parameters and not place.registered:
                continue
            current = _follow(place)
            if current is given[place.row]:
                kept.add(place.row)
                continue
            if place.row < self.parameters:
                raise CaptureError(
                    f"the step replaces parameter {self.names[place.row][0]}",
                    hint="only the optimizer may change parameters; keep such a value in a buffer",
                )
            found[place.row] = current
        for row in kept.intersection(found):
            if row < self.registered:
                raise CaptureError(
                    f"the step replaces {self.names[row][0]} in one of the modules that share it",
                    hint="update it in place (copy_), so that all of them see the new value",
                )
            del found[row]
        return found

    def _add(self, name: str, tensor: torch.Tensor) -> int:
        if isinstance(tensor, (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer)):
            raise CaptureError(
                f"{name} is lazy: it has no shape yet",
                hint="run the model once on a batch inside model(), so that its lazy modules are initialised",
            )
        row = self._rows.setdefault(_identity(tensor), len(self.values))
        if row == len(self.values):
            self.names.append(())
            self.values.append(tensor)
        self.names[row] += (name,)
        self._row_of[id(tensor)] = row
        return row

    def _add_places(self) -> None:
        for path, module in self.model.named_modules():
            for key, value in module.__dict__.items():
                if key in ("_parameters", "_buffers"):
                    self._places += [
                        _Place(module, (key, k), self._row_of[id(v)]) for k, v in value.items() if v is not None
                    ]
                elif key not in _INTERNAL:
                    self._add_plain(path, module, (key,), value)

    def _add_plain(self, path: str, module: nn.Module, keys: tuple[Any, ...], value: Any) -> None:
        if isinstance(value, torch.Tensor):
            row = self._rows.get(_identity(value))
            if row is None:
                row = self._add(".".join(str(k) for k in (path, *keys) if k != ""), value)
            self._row_of[id(value)] = row
            self._places.append(_Place(module, keys, row))
        elif type(value) in (list, tuple, dict, OrderedDict) and len(value) <= _LARGE and len(keys) < 3:
            for key, member in value.items() if isinstance(value, dict) else enumerate(value):
                self._add_plain(path, module, (*keys, key), member)

    def _refuse_new(self, given: Sequence[torch.Tensor]) -> None:
        """A parameter that the step makes would be drawn again at every step."""
        known = {id(tensor) for tensor in given}
        new = [name for name, parameter in self.model.named_parameters() if id(parameter) not in known]
        if new:
            raise CaptureError(
                f"the step makes parameters: {', '.join(new[:8])}",
                hint="make them in __init__, or run the model once on a batch inside model()",
            )

    def _changes(self, originals: Sequence[tuple[nn.Module, dict[str, Any]]]) -> Iterator[str]:
        paths = {module: path for path, module in self.model.named_modules()}
        for module, state in originals:
            for key, old in state.items():
                new = module.__dict__.get(key)
                if type(old) in _PLAIN and type(new) in _PLAIN and old != new:
                    path = paths.get(module, "")
                    yield f"{path}.{key} ({old!r} → {new!r})" if path else f"{key} ({old!r} → {new!r})"

    def _refuse_without_values(self) -> None:
        """Parameters may lie on the meta device, all of them or none; buffers may not."""
        without = [value.is_meta for value in self.values]
        buffers = [n[0] for n, meta in zip(self.names, without, strict=True) if meta][sum(without[: self.parameters]) :]
        if buffers:
            raise CaptureError(
                f"buffers without values, on the meta device: {', '.join(buffers[:8])}",
                hint="--meta leaves parameters without values, and what is made from them has none: make buffers from "
                "numbers. A model is made for this by fxpipe.meta.on_meta, not under torch.device('meta')",
            )
        valued = [n[0] for n, meta in zip(self.names[: self.parameters], without, strict=False) if not meta]
        if valued and any(without):
            raise CaptureError(
                f"some parameters have values, others lie on the meta device: {', '.join(valued[:8])} have values",
                hint="make the whole model by fxpipe.meta.on_meta",
            )

    def _refuse_overlaps(self) -> None:
        """Two parameters that share some of their memory, but not all: an update of one would change the other."""
        spans = []
        for names, tensor in zip(self.names[: self.parameters], self.values, strict=False):
            if tensor.numel() and tensor.device.type != "meta":
                last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
                spans.append((tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size(), names[0]))
        end, holder = 0, ""
        for start, stop, name in sorted(spans):
            if start < end:
                raise CaptureError(
                    f"parameters {holder} and {name} overlap: they are different views of the same memory",
                    hint="tie them as one nn.Parameter, or give each memory of its own",
                )
            end, holder = stop, name


def _follow(place: _Place) -> Any:
    current: Any = place.module.__dict__
    for key in place.keys:
        try:
            current = current[key]
        except (KeyError, IndexError, TypeError):
            return None
    return current


def _refuse_scripted(model: nn.Module) -> None:
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(
                f"{path or 'the model'} is a torch.jit.ScriptModule, which cannot be traced",
                hint="use the Python module itself: fxpipe compiles the step, scripting gains nothing",
            )


def _identity(tensor: torch.Tensor) -> Any:
    """Equal for tensors that are the same memory, seen the same way."""
    if tensor.layout != torch.strided or tensor.numel() == 0 or tensor.device.type == "meta":
        return id(tensor)
    return (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()))

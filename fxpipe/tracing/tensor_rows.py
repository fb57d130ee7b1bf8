"""The tensors that a model holds, each memory once, with all of its names in the model and in files."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from fxpipe.errors import CaptureError
from fxpipe.plan.plan import holder_of
from fxpipe.task.wrapped_tensors import (
    PACKING,
    attributes_held,
    pack_now,
    packed_as,
    packs,
    plain_tensors,
    state_of,
    wraps,
)
from fxpipe.torch_private import BUFFERS, PARAMETERS
from fxpipe.tracing.holders import is_container

NO_TENSORS: Mapping[str, torch.Tensor] = {}
REGISTERED = (PARAMETERS, BUFFERS)
INTERNAL = frozenset(nn.Module().__dict__)


class Place(NamedTuple):
    """Where a module holds the tensor of a row: the keys that lead to it from the module's `__dict__`."""

    module: nn.Module
    keys: tuple[Any, ...]
    row: int
    tensor: torch.Tensor

    @property
    def registered(self) -> bool:
        return self.keys[0] in REGISTERED


class TensorRows:
    """One row for each memory that the model holds: parameters first, then buffers, then all others.

    Args:
        state: names of parameters that are the step's state and not trained: they count as buffers.
        outside: by name, tensors that no module holds, which count as buffers: hooks may change them.

    Raises:
        CaptureError: a lazy or scripted module, or parameters that overlap.
    """

    def __init__(
        self, model: nn.Module, state: Collection[str] = (), outside: Mapping[str, torch.Tensor] = NO_TENSORS
    ) -> None:
        self.model = model
        self.names: list[tuple[str, ...]] = []
        self.values: list[torch.Tensor] = []
        self._rows: dict[Any, int] = {}
        self._row_of: dict[int, tuple[torch.Tensor, int]] = {}  # by the id of the tensor object, which is kept alive
        self._spans: list[tuple[int, int, int]] = []  # the parameters' memory: first byte, end, row; in order
        self._places: list[Place] = []
        self.packed: dict[int, str] = {}  # by the rows of packed weights, their form
        self._holders: dict[int, Any] = {}  # objects that hold tensors of packed weights, by their ids
        _refuse_scripted(model)
        pack_now(model)
        parameters = list(model.named_parameters(remove_duplicate=False))
        self._parameter_names = {name for name, _ in parameters}
        for name, parameter in parameters:
            if name not in state:
                self._add(name, parameter)
        self.parameters = len(self.values)  # how many rows are parameters
        for name, buffer in (*(p for p in parameters if p[0] in state), *model.named_buffers(remove_duplicate=False)):
            self._add(name, buffer)
        self.registered = len(self.values)  # how many are parameters or buffers; plain attributes follow
        self._add_places()
        for name, parameter in parameters:
            if not (parameter.requires_grad or wraps(parameter)):
                self._add_hanging(name, vars(parameter))
        for name, tensor in outside.items():
            self._add(name, tensor)
        self._refuse_overlaps()
        self.saved = self._saved_names()

    def hangs(self, row: int) -> bool:
        """Whether it is a tensor that hangs from a parameter, as that is packed."""
        return row >= self.registered and holder_of(self.names[row], self._parameter_names) is not None

    def _add(self, name: str, tensor: torch.Tensor) -> int:
        if isinstance(tensor, (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer)):
            raise CaptureError(
                f"{name} is lazy: it has no shape yet",
                hint="run the model once on a batch inside model(), so that its lazy modules are initialised",
            )
        if wraps(tensor):
            return self._add_wrapper(name, tensor)
        return self._add_row(name, tensor, packed_as(tensor))

    def _add_row(self, name: str, tensor: torch.Tensor, form: str) -> int:
        row = self._rows.setdefault(_identity(tensor), len(self.values))
        if row == len(self.values):
            self.names.append(())
            self.values.append(tensor)
        elif tensor.requires_grad and not self.values[row].requires_grad:
            self.values[row] = tensor
        self.names[row] += (name,)
        self._row_of[id(tensor)] = tensor, row
        if form:
            self.packed[row] = form
        return row

    def _saved_names(self) -> list[tuple[str, ...]]:
        """The names of each row in `state_dict()`; () if it is not there.

        A hook of the state dict may rename a tensor, which is then found by its memory, or copy it, found by its name.
        How a frozen weight is packed (`weight.quant_state…`, `weight_format`) is no tensor of the model: it gets a row.
        """
        entries = state_of(self.model)
        tensors = {name: value for name, value in entries.items() if isinstance(value, torch.Tensor)}
        state = dict(plain for entry in tensors.items() for plain in plain_tensors(*entry))
        by_name = {name: row for row, names in enumerate(self.names) for name in names}
        rows = {name: self._rows.get(_identity(tensor), by_name.get(name)) for name, tensor in state.items()}
        frozen = tuple(n for n, row in rows.items() if row is not None and not self.values[row].requires_grad)
        packing = tuple(f"{name}{end}" for name in frozen for end in PACKING)
        for name, tensor in state.items():
            if rows[name] is None and name.startswith(packing):
                rows[name] = self._add(name, tensor.detach())
        saved: dict[int | None, list[str]] = {}
        for name, row in rows.items():
            saved.setdefault(row, []).append(name)
        self.unsaved = (*saved.get(None, ()), *(name for name in entries if name not in tensors))
        return [tuple(saved.get(row, ())) for row in range(len(self.names))]

    def _add_wrapper(self, name: str, tensor: torch.Tensor) -> int:
        if tensor.requires_grad:
            raise CaptureError(
                f"{name} is trained, and is a {type(tensor).__name__}, which wraps other tensors",
                hint="freeze it (requires_grad_(False)) and train adapters; or train a plain tensor",
                page="tensor-kinds",
            )
        rows = [self._add_row(*plain, packed_as(tensor)) for plain in plain_tensors(name, tensor)]
        self._row_of[id(tensor)] = tensor, rows[0]
        return rows[0]

    def _add_hanging(self, name: str, attributes: Mapping[str, Any], depth: int = 3) -> bool:
        """Add the tensors in attributes, and in objects there: bitsandbytes' `weight.quant_state.absmax`."""
        holds = False
        for key, value in attributes.items():
            path = f"{name}.{key}"
            if isinstance(value, torch.Tensor):
                self._add(path, value)
                holds = True
            elif depth and self._hold(path, value, depth - 1):
                holds = True
        return holds

    def _hold(self, name: str, holder: Any, depth: int = 3) -> bool:
        if self._add_hanging(name, attributes_held(holder), depth):
            self._holders[id(holder)] = holder
        return id(holder) in self._holders

    def _add_places(self) -> None:
        for path, module in self.model.named_modules():
            for key, value in module.__dict__.items():
                if key in REGISTERED:
                    self._places += [
                        Place(module, (key, k), self._row_of[id(v)][1], v) for k, v in value.items() if v is not None
                    ]
                elif key not in INTERNAL:
                    self._add_plain(path, module, (key,), value)
                    if packs(value):
                        self._hold(f"{path}.{key}", value)

    def _add_plain(self, path: str, module: nn.Module, keys: tuple[Any, ...], value: Any) -> None:
        if isinstance(value, torch.Tensor):
            row = self._rows.get(_identity(value))
            if row is None:
                row = self._add(".".join(str(k) for k in (path, *keys) if k != ""), value)
            self._row_of[id(value)] = value, row
            self._places.append(Place(module, keys, row, value))
        elif (type(value) is tuple or is_container(value)) and not isinstance(value, set) and len(keys) < 3:
            for key, member in value.items() if isinstance(value, dict) else enumerate(value):
                self._add_plain(path, module, (*keys, key), member)

    def parameter_in(self, tensor: torch.Tensor) -> str | None:
        """The first name of the parameter that shares memory with a tensor, partly or wholly."""
        first, end = _span(tensor)
        at = bisect.bisect_right(self._spans, first, key=lambda span: span[0])
        near = [span for span in self._spans[max(at - 1, 0) : at + 1] if span[0] < end and first < span[1]]
        return self.names[near[0][2]][0] if near else None

    def _refuse_overlaps(self) -> None:
        """Refuse parameters that share some of their memory, but not all: an update of one would change the other."""
        spans = [(*_span(tensor), row) for row, tensor in enumerate(self.values[: self.parameters])]
        self._spans = sorted(span for span in spans if span[0] < span[1])
        for (_, end, one), (start, _, other) in itertools.pairwise(self._spans):
            if start < end:
                raise CaptureError(
                    f"parameters {self.names[one][0]} and {self.names[other][0]} overlap: they are different views of "
                    "the same memory",
                    hint="tie them as one nn.Parameter, or give each separate memory",
                )


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The range of memory from a tensor's first element to its last; empty if it has no values."""
    if tensor.layout != torch.strided or not tensor.numel() or tensor.device.type == "meta":
        return 0, 0
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _refuse_scripted(model: nn.Module) -> None:
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(
                f"{path or 'the model'} is a torch.jit.ScriptModule, which cannot be traced",
                hint="use the Python module itself: fxpipe compiles the step, scripting gains nothing",
            )


def _identity(tensor: torch.Tensor) -> Any:
    """Equal for tensors that are the same view of the same memory."""
    if tensor.layout != torch.strided or tensor.numel() == 0 or tensor.device.type == "meta":
        return id(tensor)
    return (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()))

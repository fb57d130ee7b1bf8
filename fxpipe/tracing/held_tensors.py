"""The tensors that a model holds, each memory once, and its state while the step is traced.

Parameters, buffers, and tensors that modules keep as plain attributes (masks, tables, running statistics) are inputs of
the captured step. During tracing, traced tensors take their place. Afterwards the model is as it was before, no matter
what the step has cached, counted or replaced. A tensor that the step replaces (`self.ema = 0.9 * self.ema + …`) is an
output.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fxpipe.errors import CaptureError
from fxpipe.task.bf16_parameters import COMPUTED, KEPT, check_parameters, narrowed
from fxpipe.task.wrapped_tensors import CPU_FORM, rewrapped, wraps
from fxpipe.torch_private import accumulated_hooks, backward_hooks, backward_pre_hooks, version_of
from fxpipe.tracing import origin
from fxpipe.tracing.holders import is_container
from fxpipe.tracing.hook_state import NO_HOOKS, OUTSIDE, Hooks, SharedState
from fxpipe.tracing.model_state import Change, PythonState
from fxpipe.tracing.tensor_rows import INTERNAL, NO_TENSORS, REGISTERED, Place, TensorRows


class HeldTensors(TensorRows):
    """The model's tensors, one row for each memory, with all of its names: parameters first, then all others.

    Args:
        state: names of parameters that are the step's state and not trained: they count as buffers.
        functions: the step's; the Python state that they reach is the step's, too.
        hooks: what a run calls between steps (`fxpipe.tracing.hook_state`).
        outside: by name, tensors that no module holds, which count as buffers: hooks may change them.
        params: 'bf16' computes in bfloat16, and keeps what is trained in float32; see `bf16_parameters`.

    Raises:
        CaptureError: a lazy or scripted module, parameters that overlap, or some parameters without values.
    """

    def __init__(
        self,
        model: nn.Module,
        state: Collection[str] = (),
        functions: Sequence[Callable[..., Any]] = (),
        params: str | None = None,
        hooks: Hooks = NO_HOOKS,
        outside: Mapping[str, torch.Tensor] = NO_TENSORS,
    ) -> None:
        super().__init__(model, state, outside)
        self._refuse_without_values()
        self._hooks = hooks
        self._functions = functions
        self.changes: list[Change] = []  # that the last call inside `replaced` made to Python state
        self.stand_ins: dict[int, torch.Tensor] = {}  # inside `replaced`, by the id of the tensor that they stand for
        self.params = params
        self.cast: set[int] = set()  # the rows that are kept in float32, and computed with in bfloat16
        self.rounded: set[int] = set()  # those kept in bfloat16, though the model has them in another type
        if params is not None:
            self._set_types()

    @property
    def trained(self) -> bool:
        return any(v.requires_grad for v in self.values[: self.parameters])

    @functools.cached_property
    def inputs(self) -> list[torch.Tensor]:
        """The tensors that the step is traced on, as a run keeps them: only parameters may require gradients."""
        return [self._input(row, v if row < self.parameters else v.detach()) for row, v in enumerate(self.values)]

    def _input(self, row: int, value: torch.Tensor) -> torch.Tensor:
        if row in self.rounded:
            return value.detach().to(COMPUTED)
        if row in self.cast and value.dtype != KEPT:
            return nn.Parameter(value.detach().to(KEPT))
        return value

    def _set_types(self) -> None:
        check_parameters(self.model)
        narrow = {self._row_of[id(tensor)][1] for tensor in narrowed(self.model)}
        trained = {row for row, v in enumerate(self.values[: self.parameters]) if v.requires_grad}
        self.cast = {row for row in trained if row in narrow or self.values[row].dtype == COMPUTED}
        self.rounded = narrow - trained

    @property
    def hooked(self) -> list[str]:
        """Parameters with gradient hooks and modules with backward hooks."""
        parameters = zip(self.names[: self.parameters], self.values, strict=False)
        hooked = [names[0] for names, parameter in parameters if backward_hooks(parameter)]
        modules = self.model.named_modules()
        return hooked + [path or "the model" for path, m in modules if backward_hooks(m) or backward_pre_hooks(m)]

    @functools.cached_property
    def python(self) -> PythonState:
        """All other state that the step can reach."""
        hooks = [hook for p in self.values[: self.parameters] for hook in (backward_hooks(p) or {}).values()]
        return PythonState(self.model, (*self._functions, *hooks))

    @functools.cached_property
    def shared(self) -> SharedState:
        """What the hooks reach of it."""
        return SharedState(self.python, self._hooks)

    def traced_step(self) -> origin.TracedStep:
        """What will be known about the step, which also follows the tensors that hooks reach."""
        step = origin.TracedStep()
        step.followed = self.shared.tensors.keys()
        return step

    def outside(self, met: Container[int]) -> dict[str, torch.Tensor]:
        """Of the tensors that hooks reach and the step has read (`met`), those without a row, by new names."""
        lost = [t for key, t in self.shared.tensors.items() if key in met and key not in self._row_of]
        return {f"{OUTSIDE}{self.shared.written(tensor)}": tensor for tensor in lost}

    @property
    def named(self) -> dict[int, str]:
        """The first name of each tensor that is no parameter, by its id."""
        return {key: self.names[row][0] for key, (_, row) in self._row_of.items() if row >= self.parameters}

    @contextlib.contextmanager
    def replaced(self, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """Inside, the model has these tensors as its rows; afterwards its state from before, but for generators.

        It computes with casts of the rows in `cast`.
        Other holders of the model's tensors (an object, a closure) keep them: `stand_ins` says what to use instead.
        """
        self._traced = [v.to(COMPUTED) if row in self.cast else v for row, v in enumerate(tensors)]
        self.stand_ins = {key: self._stand_in(tensor, self._traced[row]) for key, (tensor, row) in self._row_of.items()}
        for key, (tensor, _) in self._row_of.items():
            if wraps(tensor):
                self.stand_ins[key] = rewrapped(tensor, lambda plain: self.stand_ins[id(plain)])
        filled: set[int] = set()
        # Not changed in place: the backward, which reads them, comes after this.
        self._copies = {key: copy.copy(holder) for key, holder in self._holders.items()}
        for holder in self._copies.values():
            vars(holder).update({name: self._filled(held, filled) for name, held in vars(holder).items()})
        attributes = {key: self._attributes(tensor, filled) for key, (tensor, _) in self._row_of.items()}
        try:
            with self._of_their_classes(), self.python.preserved(draws=False):  # two calls draw different numbers
                for module in self.model.modules():
                    for name, value in list(module.__dict__.items()):
                        if name not in INTERNAL or name in REGISTERED:
                            module.__dict__[name] = self._filled(value, filled)
                    if CPU_FORM in module.__dict__:
                        module.__dict__[CPU_FORM] = False
                before = self.python.snapshot()
                yield
                self._refuse_new()
                self._refuse_attributes(attributes)
                self.changes = self.python.changes(before)
        finally:
            self.stand_ins = {}

    def _stand_in(self, tensor: torch.Tensor, replacement: torch.Tensor) -> torch.Tensor:
        """A parameter's memory under another name, such as a buffer made by detach(): without a gradient."""
        return replacement.detach() if replacement.requires_grad and not tensor.requires_grad else replacement

    def _filled(self, value: Any, filled: set[int]) -> Any:
        """A value with stand-ins in it; a container stays the same object, because others may hold it too."""
        if isinstance(value, torch.Tensor):
            return self.stand_ins.get(id(value), value)
        if id(value) in self._copies:
            return self._copies[id(value)]
        if type(value) is tuple:
            return tuple(self._filled(member, filled) for member in value)
        if is_container(value) and not isinstance(value, set) and id(value) not in filled:
            filled.add(id(value))
            for key, member in list(value.items() if isinstance(value, dict) else enumerate(value)):
                value[key] = self._filled(member, filled)
        return value

    def hook(self) -> None:
        """Inside `replaced`: give the stand-ins the gradient hooks of their parameters.

        Raises:
            CaptureError: a hook that runs after accumulation, which a graph cannot express.
        """
        for i, parameter in enumerate(self.values[: self.parameters]):
            if accumulated_hooks(parameter):
                raise CaptureError(
                    f"parameter {self.names[i][0]} has a post-accumulate-grad hook, which a pipeline cannot run",
                    hint="remove it; to change gradients use register_hook, to change weights the optimizer",
                )
            for call in (backward_hooks(parameter) or {}).values():
                self._traced[i].register_hook(call)

    def rebound(self) -> dict[int, Any]:
        """Inside `replaced`: by row, what the step has put in place of a buffer or a plain attribute.

        Raises:
            CaptureError: it replaced a parameter, or one of several names of a buffer; or it changed a cast.
        """
        for row in self.cast:
            if version_of(self._traced[row]):
                raise changed_in_place(self.names[row][0], None)
        new_values: dict[int, Any] = {}
        unchanged: set[int] = set()
        for place in self._places:
            if place.row < self.parameters and not place.registered:
                continue
            current = _follow(place)
            if current is self.stand_ins[id(place.tensor)]:
                unchanged.add(place.row)
                continue
            if place.row < self.parameters:
                raise CaptureError(
                    f"the step replaces parameter {self.names[place.row][0]}",
                    hint="only the optimizer may change parameters; keep such a value in a buffer",
                )
            new_values[place.row] = current
        for row in unchanged.intersection(new_values):
            if row < self.registered:
                raise CaptureError(
                    f"the step replaces {self.names[row][0]} in one of the modules that share it",
                    hint="update it in place (copy_), so that all of them see the new value",
                )
            del new_values[row]
        return new_values

    def put_back(self) -> None:
        """Inside `replaced`: undo the replacements that `rebound` returns: the pipeline keeps those values."""
        rows = self.rebound()
        for place in self._places:
            if place.row in rows:
                holder = _follow(place, -1)
                if isinstance(holder, (dict, list, collections.deque)):
                    holder[place.keys[-1]] = self.stand_ins[id(place.tensor)]

    def now(self) -> dict[str, torch.Tensor]:
        """The tensors that the model holds now, by first names; the new one where a tensor was replaced."""
        tensors = {names[0]: value for names, value in zip(self.names, self.values, strict=True)}
        for place in self._places:
            current = _follow(place)
            if current is not place.tensor and isinstance(current, torch.Tensor):
                tensors[self.names[place.row][0]] = current
        return tensors

    def _refuse_new(self) -> None:
        """Refuse parameters that the step makes: they would be drawn again at every step."""
        stand_in_ids = {id(tensor) for tensor in self.stand_ins.values()}
        new = [name for name, parameter in self.model.named_parameters() if id(parameter) not in stand_in_ids]
        if new:
            raise CaptureError(
                f"the step makes parameters: {', '.join(new[:8])}",
                hint="make them in __init__, or run the model once on a batch inside model()",
            )

    def _attributes(self, tensor: torch.Tensor, filled: set[int]) -> dict[str, Any]:
        """The `__dict__` of the stand-in of a tensor, with the attributes that the user has set on the tensor.

        Those of a user's subclass of nn.Parameter, too, methods and properties included.
        """
        stand_in = self.stand_ins[id(tensor)]
        attributes = vars(stand_in)
        users = {key: self._filled(held, filled) for key, held in vars(tensor).items() if key not in attributes}
        attributes.update(users)
        if wraps(tensor):
            return dict(attributes)  # it has the methods of its class
        kind = type(tensor)
        names = sorted(set(dir(kind)).difference(dir(nn.Parameter)))
        members = [(name, inspect.getattr_static(kind, name)) for name in names]
        for name, member in sorted(members, key=lambda row: isinstance(row[1], property)):  # which may use all others
            with contextlib.suppress(Exception):  # a property that reads values: the step fails where it needs it
                attributes.setdefault(name, member.__get__(stand_in, kind) if hasattr(member, "__get__") else member)
        return dict(attributes)

    @contextlib.contextmanager
    def _of_their_classes(self) -> Iterator[None]:
        """Inside, stand-ins have the classes of what they stand for: in `isinstance`, and as `__class__`."""
        pairs = [(self.stand_ins[key], type(tensor)) for key, (tensor, _) in self._row_of.items() if not wraps(tensor)]
        kinds = {id(stand_in): kind for stand_in, kind in pairs if kind not in (torch.Tensor, nn.Parameter)}

        def get(one: Any, name: str) -> Any:
            return kinds[id(one)] if name == "__class__" and id(one) in kinds else object.__getattribute__(one, name)

        patched: set[Any] = {type(stand_in) for stand_in, _ in pairs if id(stand_in) in kinds}
        for kind in patched:
            kind.__getattribute__ = get
        try:
            yield
        finally:
            for kind in patched:
                del kind.__getattribute__

    def _refuse_attributes(self, before: dict[int, dict[str, Any]]) -> None:
        """Refuse attributes that the step sets on the model's tensors: stand-ins get them, and they are lost."""
        for key, (tensor, row) in self._row_of.items():
            for name, value in vars(self.stand_ins[key]).items():
                users = name in vars(tensor) or (name not in before[key] and not name.startswith("_"))
                if users and before[key].get(name, self) is not value:
                    raise CaptureError(
                        f"the step sets {name} on {self.names[row][0]}: attributes of tensors are not kept",
                        hint="set it on the module",
                        page="python-state",
                    )

    def _refuse_without_values(self) -> None:
        """Check that all parameters or none are on the meta device, and no buffers."""
        without = [value.is_meta for value in self.values[: self.registered]]
        buffers = [n[0] for n, meta in zip(self.names, without, strict=False) if meta]
        del buffers[: sum(without[: self.parameters])]
        if buffers:
            raise CaptureError(
                f"buffers without values, on the meta device: {', '.join(buffers[:8])}",
                hint="--meta leaves parameters without values, so buffers made from them have none: make buffers "
                "from numbers. Make the model with fxpipe.task.meta.on_meta, not under torch.device('meta')",
            )
        valued = [n[0] for n, meta in zip(self.names[: self.parameters], without, strict=False) if not meta]
        if valued and any(without):
            raise CaptureError(
                f"some parameters have values, others are on the meta device: {', '.join(valued[:8])} have values",
                hint="make the whole model with fxpipe.task.meta.on_meta",
            )


def changed_in_place(name: str, where: str | None) -> CaptureError:
    """The error for a step that changes a parameter."""
    return CaptureError(
        f"the step changes parameter {name} in place",
        where=where,
        hint="only the optimizer may change what it trains (nn.Embedding does so with max_norm): use a "
        "changed copy, such as scale.clamp(max=4.6) for scale.clamp_(max=4.6)",
    )


def _follow(place: Place, stop: int | None = None) -> Any:
    """What its keys lead to now, or all but the last of them (`stop` -1); None where they lead nowhere."""
    current: Any = place.module.__dict__
    for key in place.keys[:stop]:
        try:
            current = current[key]
        except (KeyError, IndexError, TypeError):
            return None
    return current

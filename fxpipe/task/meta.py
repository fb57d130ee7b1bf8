"""Models larger than memory: parameters without values, on torch's meta device.

A model is made by its own code, but each parameter moves to the meta device when a module registers it: it keeps its
shape, dtype and name, and takes no memory. Buffers stay real, so masks and tables have their values. Initialising
parameters has no effect there. A run calls the same code again and lets a worker's own parameters
keep the values that this code gives them (`fxpipe.runtime.worker.initial_weights`).
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from fxpipe.errors import FxpipeError
from fxpipe.task.batch import to_device as batch_to_device
from fxpipe.task.wrapped_tensors import rewrapped
from fxpipe.torch_private import parse_to, pytree

OnBirth = Callable[[int, nn.Parameter], None]
HINT = "parameters have no values here (--meta): model() may set them in place, but not look at them or assign to .data"
_DEVICE = Tensor.device.__get__
_MOVES = (Tensor.to, Tensor.cpu, Tensor.cuda)


@dataclass(frozen=True)
class MetaModel:
    """A model whose parameters have no values, except those asked to keep theirs."""

    model: nn.Module
    # all parameters in the order in which they were first registered or deeply copied; some are not in the model
    births: tuple[nn.Parameter, ...]

    def numbers(self) -> dict[str, int]:
        """The birth numbers of the model's parameters, by every name, except of those that entered the model unseen."""
        numbers = {id(parameter): i for i, parameter in enumerate(self.births)}
        parameters = self.model.named_parameters(remove_duplicate=False)
        return {name: numbers[id(p)] for name, p in parameters if id(p) in numbers}


def on_meta(
    make: Callable[[], nn.Module],
    keep: Collection[int] = (),
    on_birth: OnBirth = lambda number, parameter: None,
    *,
    all_of_it: bool = True,
) -> MetaModel:
    """Call `make` so that no parameter of its model takes memory for longer than a moment, but for those of births to
    keep.

    `on_birth` is called with the number of every birth and the parameter, which then has no value. With `all_of_it`, if
    no parameter keeps its values, those that entered their modules unseen lose them, too. Not for a `make` that may
    return an existing model.
    """
    births = _Births(keep, on_birth)
    with births.watching(), births, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="for .*: copying from a non-meta parameter")
        try:
            model = make()
        except FxpipeError as error:
            error.hint = error.hint or HINT
            raise
    if all_of_it and not keep:
        for parameter in model.parameters():
            _forget_value(parameter)  # a parameter that entered its module unseen
    return MetaModel(model, tuple(births.found))


def to_device(device: str, model: nn.Module, batch: Any) -> tuple[nn.Module, Any]:
    """Like `fxpipe.task.batch.to_device`, but parameters without values stay on the meta device."""
    with _StayOnMeta():
        return batch_to_device(device, model, batch)


def are_on_meta(tensors: Sequence[Tensor]) -> bool:
    """Whether any of them has no value."""
    return any(tensor.is_meta for tensor in tensors)


class _StayOnMeta(TorchFunctionMode):
    """Lets no `.to(device)` give or take values: what is on the meta device stays there, and no other gets there."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        if func in _MOVES and (args[0].is_meta or _goes_to_meta(func, args, options)):
            return _without_device(func, args, options)
        return func(*args, **options)


class _Births(_StayOnMeta):
    """Sees every parameter when it is registered or deeply copied, and removes its value."""

    def __init__(self, keep: Collection[int], on_birth: OnBirth) -> None:
        super().__init__()
        self.found: list[nn.Parameter] = []
        self._keep = keep
        self._on_birth = on_birth
        self._numbers: dict[int, int] = {}  # by the id of a parameter, which `found` keeps alive
        self._devices: dict[int, torch.device] = {}  # where those had their values that were removed

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func == _DEVICE and id(args[0]) in self._devices:  # code that asks does the same with and without values
            return self._devices[id(args[0])]
        try:
            return super().__torch_function__(func, types, args, kwargs)
        except RuntimeError:  # with values made on such a device, as where a forward finds a size
            if not self._devices or _writes(func, kwargs or {}):
                raise
            args, kwargs = pytree.tree_map_only(Tensor, _on_meta, (tuple(args), kwargs or {}))
            return super().__torch_function__(func, types, args, kwargs)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch what modules register and what is deeply copied."""
        original, copied = nn.Module.register_parameter, nn.Parameter.__deepcopy__

        def register(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
            if isinstance(param, nn.Parameter) and not is_lazy(param):
                self._see(param)
            original(module, name, param)

        def copy(parameter: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
            duplicate: nn.Parameter = copied(parameter, memo)
            self._see(duplicate)
            if id(parameter) in self._devices:
                self._devices[id(duplicate)] = self._devices[id(parameter)]
            return duplicate

        nn.Module.register_parameter = register  # type: ignore[method-assign,assignment]
        nn.Parameter.__deepcopy__ = copy  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            nn.Module.register_parameter = original  # type: ignore[method-assign]
            nn.Parameter.__deepcopy__ = copied  # type: ignore[method-assign]

    def _see(self, parameter: nn.Parameter) -> None:
        if id(parameter) in self._numbers:
            return
        number = self._numbers[id(parameter)] = len(self.found)
        self.found.append(parameter)
        if number not in self._keep:
            if not parameter.is_meta:
                self._devices[id(parameter)] = parameter.device
            _forget_value(parameter)
        self._on_birth(number, parameter)


def _forget_value(parameter: nn.Parameter) -> None:
    """Move the parameter to the meta device; it stays the same object, so ties and lists of it stay valid."""
    if not parameter.is_meta and not is_lazy(parameter):
        torch.utils.swap_tensors(parameter, valueless(parameter))


def valueless(parameter: nn.Parameter) -> nn.Parameter:
    """A parameter of the same type on the meta device, with the attributes that the given one has."""
    stand_in = nn.Parameter(rewrapped(parameter.detach(), _on_meta), requires_grad=parameter.requires_grad)
    stand_in.__class__ = type(parameter)
    vars(stand_in).update(vars(parameter))
    return stand_in


def _writes(func: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    """Whether a function of torch changes a tensor that it is given."""
    name = getattr(func, "__name__", "_")
    return name.endswith(("_", "batch_norm", "instance_norm")) or "out" in kwargs or bool(kwargs.get("inplace"))


def _on_meta(plain: Tensor) -> Tensor:
    return torch.empty_like(plain, device="meta")


def _goes_to_meta(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    to = kwargs.get("device", kwargs.get("other", args[1] if len(args) > 1 else None)) if func is Tensor.to else None
    return str(to.device if isinstance(to, Tensor) else to) == "meta"


def _without_device(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    if func is not Tensor.to:
        return args[0]
    kwargs = {name: value for name, value in kwargs.items() if name != "copy"}
    _, dtype, _, layout = parse_to(*args[1:], **kwargs)
    moved = args[0] if dtype is None else args[0].to(dtype)
    return moved if layout is None else moved.to(memory_format=layout)

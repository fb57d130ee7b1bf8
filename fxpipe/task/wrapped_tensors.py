"""Tensors that wrap others: packed weights, such as torchao's NF4 or int4, whose codes and scales are what is kept.

A stage holds the plain tensors inside, each under a name of its own, and traced code makes the wrapper of them again,
as `torch.compile` does (`__tensor_flatten__`, `__tensor_unflatten__`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fxpipe.errors import TaskError, listed
from fxpipe.torch_private import is_traceable_wrapper_subclass

CPU_FORM = "support_avx512bf16_for_cpu"
"""The attribute by which bitsandbytes' layers of 4 bits, in eval mode, pack their weights for the CPU anew."""


SCALES = (".absmax", ".quant_map", ".nested_", ".quant_state.")
PACKING = (*SCALES, "_format")
"""How the names go on under which bitsandbytes saves how a weight is packed: `weight.absmax`, `weight_format`."""


def wraps(value: Any) -> bool:
    """Whether a value is a tensor that wraps others."""
    return isinstance(value, Tensor) and is_traceable_wrapper_subclass(value)


def packed_as(tensor: Tensor) -> str:
    """In which packed form a weight is: `NF4Tensor`, `Params4bit nf4`; empty for one that is stored as it computes."""
    kind = type(tensor).__name__
    packed = wraps(tensor) or getattr(tensor, "quant_state", None) is not None or kind == "Int8Params"
    return f"{kind} {getattr(tensor, 'quant_type', '')}".rstrip() if packed else ""


def plain_tensors(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The plain tensors of one that may wrap others, by names that begin with its own: `weight.codes`."""
    if not wraps(tensor):
        yield name, tensor
        return
    for key in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
        yield from plain_tensors(f"{name}.{key}", getattr(tensor, key))


def attributes_held(value: Any) -> dict[str, Any]:
    """The attributes of an object that only holds them: of no tensor, module, function or class."""
    if isinstance(value, (type, ModuleType, nn.Module, Tensor)) or callable(value):
        return {}
    return getattr(value, "__dict__", {})


def packs(value: Any) -> bool:
    """Whether it is an object of bitsandbytes, such as a module's `state` of 8 bits."""
    return type(value).__module__.startswith("bitsandbytes.") and not isinstance(value, (nn.Module, Tensor))


def pack_now(model: nn.Module) -> None:
    """Let bitsandbytes' modules of 8 bits do now what their first forward would do: move scales into their state.

    Those of 4 bits that have run in eval mode get the form of train mode.

    Raises:
        TaskError: a module of 8 bits has no values (`--meta`).
    """
    for path, module in model.named_modules():
        init, state = getattr(module, "init_8bit_state", None), getattr(module, "quant_state", None)
        if init is not None and module.weight.is_meta:
            hint = "pack it in 4 bits, or compile without --meta"
            raise TaskError(f"{path} is packed in 8 bits by bitsandbytes, and has no values (--meta)", hint=hint)
        if init is not None and getattr(module.weight, "CB", None) is not None:
            init()
        if getattr(state, "packing_format_for_cpu", False):
            module.state_dict()  # brings the weight back into the form that it was trained in


def rewrapped(tensor: Tensor, replace: Callable[[Tensor], Tensor]) -> Tensor:
    """A tensor with others in place of the plain ones that it consists of."""
    if not wraps(tensor):
        return replace(tensor)
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    inner = {name: rewrapped(getattr(tensor, name), replace) for name in names}
    wrapper: Tensor = type(tensor).__tensor_unflatten__(inner, context, tensor.shape, tensor.stride())  # type: ignore[attr-defined]
    return wrapper


def state_of(model: nn.Module) -> dict[str, Any]:
    """What `state_dict()` says, tensors not copied.

    Where a weight has no values (`--meta`), bitsandbytes' text of how it is packed has a number of the greatest length.
    """
    with _NumbersOfMeta():
        return model.state_dict(keep_vars=True)


class _NumbersOfMeta(TorchFunctionMode):
    """Gives a number for a tensor without values, of as many digits as a number may have."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.item and args[0].is_meta:
            return -sys.float_info.min  # -2.2250738585072014e-308
        return func(*args, **(kwargs or {}))


def lengthened(text: Tensor, length: int) -> Tensor:
    """Bitsandbytes' text (JSON, as bytes) with blanks up to a length."""
    return nn.functional.pad(text, (0, length - text.numel()), value=ord(" "))


def load_weights(model: nn.Module, weights: str | Path | Mapping[str, Tensor]) -> None:
    """Load what a run has written (`model.safetensors`) into the user's own model, packed weights included.

    `model.load_state_dict` does that for models without packed weights, of whose parts it knows nothing.

    Args:
        weights: the file, or its tensors: by the names of `model.state_dict()`; of a tensor that wraps others, by
            `name.part`.

    Raises:
        TaskError: names, shapes or types are not the model's, which is then unchanged.
        RuntimeError: the same, of a model without packed weights.
    """
    tensors = weights if isinstance(weights, Mapping) else load_file(weights)
    pack_now(model)
    states = [module.state for module in model.modules() if hasattr(module, "init_8bit_state")]
    held = [*model.parameters(), *model.buffers(), *(t for s in states for t in vars(s).values())]
    if not states and not any(map(packed_as, held)):
        model.load_state_dict(tensors)
        return
    live, names = {id(tensor) for tensor in held}, dict[int, str]()
    places: dict[str, Tensor | None] = {}  # None: how a weight is packed
    for name, value in model.state_dict(keep_vars=True).items():
        names[id(value)] = name
        for part, plain in plain_tensors(name, value):
            places[part] = plain if id(value) in live else None
    wrong = [f"{name} is missing" for name in places if name not in tensors]
    wrong += [f"{name} is not in the model" for name in tensors if name not in places]
    for name, place in places.items():
        value = tensors.get(name)
        if place is None and not any(end in name for end in PACKING):
            wrong.append(f"{name} is a copy that a hook of the state dict makes")
        elif place is not None and value is not None and (value.shape, value.dtype) != (place.shape, place.dtype):
            wrong.append(f"{name} is {value.dtype}{list(value.shape)}, not {place.dtype}{list(place.shape)}")
    if wrong:
        raise TaskError(f"the weights do not fit the model: {listed(wrong, 4)}", hint="make the model that was trained")
    with torch.no_grad():
        for name, place in places.items():
            if place is not None:
                place.copy_(tensors[name])
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            state, prefix = getattr(parameter, "quant_state", None), f"{names.get(id(parameter))}."
            if state is not None:
                parts = {name.removeprefix(prefix): part for name, part in tensors.items() if name.startswith(prefix)}
                parameter.quant_state = module.quant_state = type(state).from_dict(parts, parameter.device)  # type: ignore[attr-defined]

"""Tensors that wrap others: packed weights, such as torchao's NF4 or int4, whose codes and scales are what is kept.

A stage holds the plain tensors inside, each under a name of its own, and traced code makes the wrapper of them again,
as `torch.compile` does (`__tensor_flatten__`, `__tensor_unflatten__`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from fxpipe.torch_private import is_traceable_wrapper_subclass

CPU_FORM = "support_avx512bf16_for_cpu"
"""The attribute by which bitsandbytes' layers of 4 bits, in eval mode, pack their weights for the CPU anew."""


def wraps(value: Any) -> bool:
    """Whether a value is a tensor that wraps others."""
    return isinstance(value, Tensor) and is_traceable_wrapper_subclass(value)


def plain_tensors(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The plain tensors of one that may wrap others, by names that begin with its own: `weight.codes`."""
    if not wraps(tensor):
        yield name, tensor
        return
    for key in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
        yield from plain_tensors(f"{name}.{key}", getattr(tensor, key))


def attributes_held(value: Any) -> dict[str, Any]:
    """The attributes of an object that only holds them: of no tensor, module, function or class."""
    if isinstance(value, (type, nn.Module, Tensor)) or callable(value):
        return {}
    return getattr(value, "__dict__", {})


def packs(value: Any) -> bool:
    """Whether it is an object of bitsandbytes, such as a module's `state` of 8 bits."""
    return type(value).__module__.startswith("bitsandbytes.") and not isinstance(value, (nn.Module, Tensor))


def pack_now(model: nn.Module) -> None:
    """Let bitsandbytes' modules of 8 bits do now what their first forward would do: move scales into their state."""
    for module in model.modules():
        init = getattr(module, "init_8bit_state", None)
        if init is not None and getattr(module.weight, "CB", None) is not None:
            init()


def rewrapped(tensor: Tensor, replace: Callable[[Tensor], Tensor]) -> Tensor:
    """A tensor with others in place of the plain ones that it consists of."""
    if not wraps(tensor):
        return replace(tensor)
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    inner = {name: rewrapped(getattr(tensor, name), replace) for name in names}
    wrapper: Tensor = type(tensor).__tensor_unflatten__(inner, context, tensor.shape, tensor.stride())  # type: ignore[attr-defined]
    return wrapper


def load_weights(model: nn.Module, weights: str | Path | Mapping[str, Tensor]) -> None:
    """Load what a run has written (`model.safetensors`) into the user's own model, packed weights included.

    `model.load_state_dict` does that for models without packed weights, of whose parts it knows nothing.

    Args:
        weights: the file, or its tensors: by the names of `model.state_dict()`; of a tensor that wraps others, by
            `name.part`.

    Raises:
        KeyError: there is no tensor of a name.
    """
    tensors = weights if isinstance(weights, Mapping) else load_file(weights)
    if not any(wraps(parameter) or hasattr(parameter, "quant_state") for parameter in model.parameters()):
        model.load_state_dict(tensors)
        return
    held = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    with torch.no_grad():
        for name, value in model.state_dict(keep_vars=True).items():
            for plain_name, plain in plain_tensors(name, value) if id(value) in held else ():
                plain.copy_(tensors[plain_name])
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(path, recurse=False):
            state, prefix = getattr(parameter, "quant_state", None), f"{name}."
            if state is not None:  # of bitsandbytes
                parts = {key.removeprefix(prefix): part for key, part in tensors.items() if key.startswith(prefix)}
                parameter.quant_state = module.quant_state = type(state).from_dict(parts, parameter.device)

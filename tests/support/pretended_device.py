"""A device that is not here: it computes with the CPU's kernels in the CPU's memory, and refuses the CPU's tensors.

What runs on it finds a tensor that is left on the CPU, as CUDA would: in what is captured, in passes, in emitted code,
in the run. It is torch's PrivateUse1, of which a process has one, for good: set it up in a process of its own.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils import backend_registration

from fxpipe.device_copies import WITHOUT_FLOAT64

NAME = "privateuseone"
SET_UP = getattr(backend_registration, "_setup_privateuseone_for_python_backend", None)
LACKS = "" if SET_UP else "this torch has no backends in Python"
"""Why there is no such device, for `skipif`."""

MIXED = "a tensor of the CPU meets one of the device"

NARROW = "a narrow device has no tensors"

_CPU, _OTHER = 1, 12
"""Numbers of the devices in DLPack."""

_libraries: list[torch.library.Library] = []


class _Generator(torch.Generator):
    """One of the device draws the CPU's numbers."""

    def __new__(cls, device: Any = "cpu") -> torch.Generator:  # type: ignore[misc]
        return super().__new__(cls, "cpu" if torch.device(device).type == NAME else device)


class _Module:
    """What torch asks of a device's module."""

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        """Its random numbers are the CPU's."""

    def get_rng_state(self, device: Any) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: Any) -> None:
        torch.set_rng_state(state)

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


def set_up(narrow: bool = False) -> None:
    """Let this process have the device, for good; a narrow one has no float64, as MPS."""
    assert SET_UP, LACKS
    if narrow:
        WITHOUT_FLOAT64.add(NAME)
        Tensor.__repr__ = _written(Tensor.__repr__)  # type: ignore[method-assign]
    if _libraries:
        return
    SET_UP(NAME, _Module())
    torch.Generator = _Generator  # type: ignore[misc]
    F.scaled_dot_product_attention = _attending(F.scaled_dot_product_attention)
    Tensor.__deepcopy__ = _deep_copied(Tensor.__deepcopy__)  # type: ignore[method-assign]
    # `Module.to` keeps parameters that are one, as between the CPU and CUDA, and leaves those alone that are there.
    torch.__future__.set_swap_module_params_on_conversion(True)
    nn.Module._apply = _applied(nn.Module._apply)  # type: ignore[method-assign]
    every, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    every.fallback(_on_the_cpu, "PrivateUse1")
    every.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for name, kernel in _KERNELS.items():
        aten.impl(name, _kernel(name, kernel), "PrivateUse1")
    for operator in _CALLED_BY_TORCH:
        aten.impl(operator, functools.partial(_on_the_cpu, operator), "PrivateUse1")
    aten.impl("as_strided", lambda whole, *place: whole.detach().as_strided_(*place), "PrivateUse1")
    for operator in _PRODUCTS:
        aten.impl(operator, _cast(operator), "AutocastPrivateUse1")
    _libraries.extend((every, aten))


def _applied(otherwise: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """`Module._apply`: torch swaps each parameter with one that it makes, which it cannot make of every class."""

    def apply(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        tensors = (*module.parameters(recurse), *module.buffers(recurse))
        with torch.no_grad():
            return module if all(fn(tensor) is tensor for tensor in tensors) else otherwise(module, fn, recurse)

    return apply


def _attending(otherwise: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`scaled_dot_product_attention`: torch asks CUDA alone which kernel it has; the device has the one for float32."""

    def attend(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, **more: Any,
    ) -> Tensor:  # fmt: skip
        if not is_there(query):
            return otherwise(query, key, value, attn_mask, dropout_p, is_causal, **more)
        operator = torch.ops.aten._scaled_dot_product_efficient_attention
        found: Tensor = operator(query, key, value, attn_mask, True, dropout_p, is_causal, **more)[0]
        return found

    return attend


def _written(otherwise: Callable[..., str]) -> Callable[..., str]:
    """`Tensor.__repr__`: torch reads tensors of MPS on the CPU, since it writes numbers as float64."""

    def written(tensor: Tensor, **more: Any) -> str:
        return otherwise(tensor.detach().cpu() if is_there(tensor) else tensor, **more)

    return written


def _deep_copied(otherwise: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`Tensor.__deepcopy__`: torch's own copies a storage, which no allocator of the device can make."""

    def copied(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
        if not is_there(tensor) or id(tensor) in memo:
            return otherwise(tensor, memo)
        return memo.setdefault(id(tensor), tensor.detach().clone().requires_grad_(tensor.requires_grad))

    return copied


def _relabelled(tensor: Tensor, device: int) -> Tensor:
    """The same memory as another device's."""
    if device == _OTHER and NAME in WITHOUT_FLOAT64 and tensor.dtype in (torch.float64, torch.complex128):
        raise TypeError(f"{NARROW} in {tensor.dtype}")
    capsule = torch.utils.dlpack.to_dlpack(tensor.detach())
    place = ctypes.pythonapi.PyCapsule_GetPointer
    place.restype, place.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    ctypes.c_int32.from_address(place(capsule, b"dltensor") + 8).value = device
    return torch.utils.dlpack.from_dlpack(capsule)


def is_there(value: Any) -> bool:
    """Whether it is a tensor of the device."""
    return isinstance(value, Tensor) and value.device.type == NAME


def _on_the_cpu(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operator with the kernel of the CPU."""
    if operator is torch.ops.aten._copy_from.default:
        target = _down(args[1])
        target.copy_(_down(args[0]))
        return args[1]
    _check(operator, args, kwargs)
    given: dict[int, tuple[Tensor, Tensor, Any]] = {}  # their stand-ins, and how these are laid out

    def down(value: Any) -> Any:
        if not is_there(value):
            return _down(value)
        # Without elements it has no memory to share, and may be made larger.
        found = _down(value) if value.numel() else torch.empty(value.shape, dtype=value.dtype)
        given[id(found)] = value, found, (found.shape, found.stride())
        return found

    made = operator(*pytree.tree_map(down, args), **pytree.tree_map(down, kwargs))
    for value, found, before in given.values():
        if (found.shape, found.stride()) != before:
            value.data = _up(found)
    alias = operator._schema.returns[0].alias_info if operator._schema.returns else None
    if alias is not None and not alias.is_write:
        return _view(args[0], made)
    return pytree.tree_map(lambda v: given[id(v)][0] if id(v) in given else _up(v), made)


def _view(whole: Tensor, stand_in: Tensor) -> Tensor:
    """Of the memory, as the stand-in is one of the memory's stand-in; autograd must know that it is shared."""
    if stand_in.dtype != whole.dtype:
        return _up(stand_in)
    begin = whole.storage_offset() + (stand_in.data_ptr() - whole.data_ptr()) // whole.itemsize
    return whole.detach().as_strided_(stand_in.shape, stand_in.stride(), begin)


def _check(operator: Any, args: Any, kwargs: Any) -> None:
    """Refuse a tensor of the CPU, except a scalar where elements are computed one by one, as CUDA does."""
    alone = torch.Tag.pointwise in getattr(operator, "tags", ())
    for value in pytree.tree_leaves((args, kwargs)):
        if isinstance(value, Tensor) and not is_there(value) and (value.dim() or not alone):
            raise RuntimeError(f"{MIXED} in {operator}")


def _down(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == NAME:
        return torch.device("cpu")
    return _relabelled(value, _CPU) if is_there(value) else value


def _up(value: Any) -> Any:
    return _relabelled(value, _OTHER) if isinstance(value, Tensor) else value


def _kernel(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel of the device by a function of CPU tensors."""
    read, left = _ON_THE_HOST.get(name, ((), ()))

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if any(is_there(args[place]) for place in read):
            raise RuntimeError(f"{name} reads on the host what is on the device")
        _check(name, [value for place, value in enumerate(args) if place not in read], kwargs)
        made = run(*pytree.tree_map(_down, args), **pytree.tree_map(_down, kwargs))
        if isinstance(made, Tensor):
            return _up(made)
        return tuple(value if place in left else _up(value) for place, value in enumerate(made))

    return kernel


def _convolution_backward(gradient: Tensor, input: Tensor, weight: Tensor, *rest: Any) -> Any:
    bias = [gradient.shape[1]]
    return torch.ops.aten.convolution_backward(gradient, input, weight, bias, *rest)


def _layer_norm(x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """As on CUDA, statistics have at least 32 bits."""
    out, *statistics = torch.ops.aten.native_layer_norm(x, *rest)
    return out, *(value.to(torch.promote_types(x.dtype, torch.float32)) for value in statistics)


def _layer_norm_backward(
    gradient: Tensor, x: Tensor, shape: list[int], mean: Tensor, inverse: Tensor, *rest: Any
) -> Any:
    statistics = (mean.to(x.dtype), inverse.to(x.dtype))
    return torch.ops.aten.native_layer_norm_backward(gradient, x, shape, *statistics, *rest)


def _lstm_cell(of_input: Tensor, of_state: Tensor, cell: Tensor, *biases: Tensor | None) -> tuple[Tensor, ...]:
    gates = sum((bias for bias in biases if bias is not None), of_input + of_state).chunk(4, 1)
    i, f, o = (gates[k].sigmoid() for k in (0, 1, 3))
    g = gates[2].tanh()
    new = f * cell + i * g
    return o * new.tanh(), new, torch.cat([i, f, g, o], 1)


def _lstm_cell_backward(
    of_state: Tensor | None, of_cell: Tensor | None, cell: Tensor, new: Tensor, gates: Tensor, biases: bool
) -> tuple[Tensor | None, ...]:
    i, f, g, o = gates.chunk(4, 1)
    state, carried = (torch.zeros_like(new) if v is None else v for v in (of_state, of_cell))
    carried = carried + state * o * (1 - new.tanh() ** 2)
    own = (
        carried * g * i * (1 - i),
        carried * cell * f * (1 - f),
        carried * i * (1 - g**2),
        state * new.tanh() * o * (1 - o),
    )
    found = torch.cat(own, 1)
    return found, carried * f, found.sum(0) if biases else None


def _attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, want_sums: bool, dropout: float = 0.0, causal: bool = False,
    *, scale: float | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """As on CUDA, seed and offset are in the CPU's memory."""
    seed = torch.randint(1 << 40, ())
    scores = _scores(q, k, bias, causal, scale)
    out = (scores.softmax(-1) * _kept(scores, dropout, seed)) @ v
    sums = scores.logsumexp(-1).float()
    return out, F.pad(sums, (0, -sums.shape[-1] % 32)), seed, torch.zeros((), dtype=torch.int64)


def _attention_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, sums: Tensor, seed: Tensor,
    offset: Tensor, dropout: float, wanted: list[bool], causal: bool = False, *, scale: float | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    scores = _scores(q, k, bias, causal, scale)
    weights, kept = scores.softmax(-1), _kept(scores, dropout, seed)
    of_weights = gradient @ v.mT * kept
    of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True))
    scaled = of_scores * (scale or q.shape[-1] ** -0.5)
    return scaled @ k, scaled.mT @ q, (weights * kept).mT @ gradient, of_scores if wanted[3] else None


def _scores(q: Tensor, k: Tensor, bias: Tensor | None, causal: bool, scale: float | None) -> Tensor:
    found = q @ k.mT * (scale or q.shape[-1] ** -0.5)
    if causal:
        found = found.masked_fill(~torch.ones(found.shape[-2:], dtype=torch.bool).tril(), float("-inf"))
    return found if bias is None else found + bias


def _kept(scores: Tensor, dropout: float, seed: Tensor) -> Tensor:
    draw = torch.Generator().manual_seed(int(seed))
    return (torch.rand(scores.shape, generator=draw) >= dropout).to(scores.dtype) / (1 - dropout)


_KERNELS: dict[str, Callable[..., Any]] = {
    "convolution_overrideable": torch.ops.aten.convolution.default,
    "convolution_backward_overrideable": _convolution_backward,
    "mse_loss": torch.ops.aten.mse_loss.default,
    "native_layer_norm": _layer_norm,
    "native_layer_norm_backward": _layer_norm_backward,
    "_thnn_fused_lstm_cell": _lstm_cell,
    "_thnn_fused_lstm_cell_backward_impl": _lstm_cell_backward,
    "_scaled_dot_product_efficient_attention": _attention,
    "_scaled_dot_product_efficient_attention_backward": _attention_backward,
}
"""Where torch's own kernels for the device are not those of the CPU, or there are none."""

_ON_THE_HOST = {
    "_scaled_dot_product_efficient_attention": ((), (2, 3)),
    "_scaled_dot_product_efficient_attention_backward": ((7, 8), ()),
}
"""Arguments and results in the CPU's memory: seed and offset."""

_CALLED_BY_TORCH = (
    torch.ops.aten._copy_from.default,
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
)
"""By `torch.tensor`, for which torch finds no fallback inside of a dispatch mode."""

_PRODUCTS = (
    *(getattr(torch.ops.aten, name).default for name in ("mm", "addmm", "bmm", "baddbmm", "linear", "matmul")),
    torch.ops.aten.conv2d.default,
    torch.ops.aten.conv_transpose2d.input,
)
"""What autocast computes in fewer bits."""


def _cast(operator: Any) -> Callable[..., Any]:
    """An operator under autocast."""

    def cast(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype(NAME)
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)):
            return operator(*(v.to(dtype) if is_there(v) and v.is_floating_point() else v for v in args), **kwargs)

    return cast

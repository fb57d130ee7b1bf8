"""A tensor that wraps others, as packed weights of libraries do: codes of 8 bits, and a scale for each row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ATEN = torch.ops.aten


class Packed(Tensor):
    """Rows of int8 codes, each with its scale; as float tensors it can only be read."""

    codes: Tensor
    scales: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scales: Tensor) -> Packed:
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scales.dtype, device=codes.device)  # type: ignore[attr-defined,no-any-return]

    def __init__(self, codes: Tensor, scales: Tensor) -> None:
        self.codes, self.scales = codes, scales

    @staticmethod
    def of(weight: Tensor) -> Packed:
        """The nearest packed form of a weight (rows, columns)."""
        scales = weight.detach().abs().amax(1, keepdim=True) / 127
        return Packed((weight.detach() / scales).round().to(torch.int8), scales)

    def unpacked(self) -> Tensor:
        """The floating-point numbers, computed anew."""
        return self.codes.to(self.scales.dtype) * self.scales

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scales"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: Any, shape: Any, stride: Any) -> Packed:
        return Packed(inner["codes"], inner["scales"])

    def _each(self, change: Callable[[Tensor], Tensor]) -> Packed:
        return Packed(change(self.codes), change(self.scales))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packed, kwargs = args[0], dict(kwargs or {})
        if func is ATEN._to_copy.default:  # of other digits are the scales alone
            kwargs.pop("memory_format", None)
            dtype, device = kwargs.pop("dtype", None), kwargs.pop("device", None)
            return Packed(packed.codes.to(device), packed.scales.to(device, dtype))
        if func in (ATEN.detach.default, ATEN.clone.default, ATEN.alias.default):
            return packed._each(lambda inner: func(inner, **kwargs))
        raise NotImplementedError(f"{func} of a packed tensor")


class Adapted(nn.Module):
    """A frozen packed layer, and an adapter that is trained."""

    def __init__(self, width: int, rank: int = 2) -> None:
        super().__init__()
        plain = nn.Linear(width, width)
        self.weight = nn.Parameter(Packed.of(plain.weight), requires_grad=False)
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, width)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        assert isinstance(weight, Packed)
        return torch.tanh(F.linear(x, weight.unpacked()) + self.up(self.down(x)))


def adapted(width: int = 6, layers: int = 4, classes: int = 5) -> nn.Sequential:
    """Packed layers with adapters, and a trained head."""
    return nn.Sequential(*(Adapted(width) for _ in range(layers)), nn.Linear(width, classes))


def parts(name: str, value: Any) -> list[tuple[str, Tensor]]:
    """The plain tensors of an entry of a state dict, by their names in files."""
    if not hasattr(value, "__tensor_flatten__"):
        return [(name, value)]
    inner = ((f"{name}.{key}", getattr(value, key)) for key in value.__tensor_flatten__()[0])
    return [plain for pair in inner for plain in parts(*pair)]

"""Carrying over: what a message leaves out is added to the next one of the same edge."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fxpipe.codecs.blocks import float_refusal, in_range
from fxpipe.codecs.codec import OUTER, Codec, EdgeState
from fxpipe.plan.spec import TensorSpec


@dataclass(frozen=True)
class CarryOver(Codec):
    """Sends C(x + β·e), where e is what earlier messages have left out: e ← x + β·e - decoded, and β is 1 in most.

    With β = 1 the sum of what arrives differs from the exact sum only by the last e, however coarse C is. It suits
    values that are added up: gradients, whose sum moves the weights, and differences of weights (not weights
    themselves: a decoded value may be far from its x). An activation is read once, and no later message corrects it.

    A message with a value that is not finite does not change the memory. Without a state, e is 0.

    Source: Seide et al., 1-bit SGD (2014); Karimireddy et al., Error Feedback Fixes SignSGD (arXiv 1901.09847). They
    call it error feedback, which in fxpipe means the correction of late steps.

    Attributes:
        carried: β, the share of what was left out that is added to the next message.
    """

    kinds: ClassVar[tuple[str, ...]] = ("gradient", "weights", OUTER)
    carried: ClassVar[float] = 1.0

    def refusal(self, tensor: TensorSpec) -> str:
        if refusal := float_refusal(tensor):
            return refusal
        packed = self.packed(tensor)
        if packed.bytes >= tensor.bytes:
            return f"tensors that it makes smaller: this has {tensor.bytes} bytes, and would take {packed.bytes}"
        return ""

    def keeps_state(self, kind: str) -> bool:
        return kind in self.kinds

    def encode(self, value: Tensor, state: EdgeState | None) -> Tensor:
        state = state or EdgeState()
        target = value.to(torch.float32, copy=True)
        if "left_out" in state.memory:
            target.add_(state.memory["left_out"], alpha=self.carried)
        packed, memory = self.compress(target, state)
        memory["left_out"] = target - self.decode(packed, value.shape, torch.float32)
        finite = (target - target).sum() == 0  # ∞ - ∞ is NaN
        for name, tensor in memory.items():
            before = state.memory.get(name, torch.zeros_like(tensor))
            state.memory[name] = torch.where(finite, tensor, before)
        return packed

    @abstractmethod
    def compress(self, target: Tensor, state: EdgeState) -> tuple[Tensor, dict[str, Tensor]]:
        """C of a float32 tensor, packed; and what else to remember, by name."""


def in_range_if_finite(values: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 values in a dtype: finite ones are clamped to its range, since sums may exceed it; others become NaN."""
    return in_range(values.clone(), dtype).add_(values - values).to(dtype)  # ∞ - ∞ is NaN

"""What the sending worker keeps for one edge, for codecs that draw random numbers or remember."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fxpipe.random_state import seed_of


@dataclass
class EdgeState:
    """The state of one edge at its sender.

    Attributes:
        memory: tensors by name, from one message to the next: what was not sent yet, or a basis to begin with. A codec
            replaces them, and never changes them in place. They are part of checkpoints.
        place: gives the run's seed, and the edge, minibatch and microbatch of the message.
    """

    memory: dict[str, Tensor] = field(default_factory=dict)
    place: Callable[[], tuple[object, ...]] = tuple

    def uniform(self, like: Tensor) -> Tensor:
        """Random numbers in [0, 1), float32, as many as `like` has; the same for the same message of the same run.

        They do not come from torch's own generators: what a model draws is the same with codecs and without.
        """
        return torch.rand(like.shape, generator=self._generator(like.device), device=like.device)

    def random_int16(self, like: Tensor) -> Tensor:
        """Random int16, uniform over all of them, as many as `like` has: for a fourth of what `uniform` costs on a CPU.

        Each 64 random bits make four.
        """
        bits = torch.empty(-(-like.numel() // 4), dtype=torch.int64, device=like.device)
        bits.random_(-(2**63), None, generator=self._generator(like.device))
        return bits.view(torch.int16)[: like.numel()].view(like.shape)

    def _generator(self, device: torch.device) -> torch.Generator:
        return torch.Generator(device).manual_seed(seed_of(*self.place()))

"""Sums the gradients of a minibatch's microbatches."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor, nn


class GradientSum:
    """The gradients of one worker's trained parameters, added over microbatches in their order.

    Args:
        parameters: the parameters that the gradients are of.
        order: for each gradient that a backward returns, the index of its parameter.
        divisor: of what is taken.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], order: Sequence[int], divisor: int) -> None:
        self._parameters = parameters
        self._order = order
        self._divisor = divisor
        self._sums: list[Tensor | None] = [None] * len(parameters)
        self._closed: deque[list[Tensor | None]] = deque()  # of earlier minibatches, whose updates are to come

    def add(self, gradients: Sequence[Tensor | None], taken: set[int]) -> None:
        """Add one microbatch's gradients.

        Optimizers and later additions write into a gradient. So a gradient is copied, as autograd does, if it shares
        memory with another gradient, with a weight that the action read or with a value that it sent (`taken`: storage
        addresses), or if its layout is not that of its parameter.
        """
        old: list[Tensor] = []
        new: list[Tensor] = []
        taken = set(taken)
        for index, gradient in zip(self._order, gradients, strict=True):
            if gradient is None:
                continue
            present = self._sums[index]
            if present is not None:
                old.append(present)
                new.append(gradient)
                continue
            address = gradient.untyped_storage().data_ptr()
            parameter = self._parameters[index]
            if address in taken or gradient.stride() != parameter.stride():
                gradient = torch.empty_like(parameter, requires_grad=False).copy_(gradient)
            taken.add(address)
            self._sums[index] = gradient
        if old:
            torch._foreach_add_(old, new)

    def close(self, minibatch: int) -> None:
        """All gradients of the minibatch are there: the next sum starts empty."""
        self._closed.append(self._sums)
        self._sums = [None] * len(self._parameters)

    def take(self) -> list[Tensor | None]:
        """The oldest sum over a minibatch's microbatches that was closed, divided, by parameter."""
        sums = self._closed.popleft()
        present = [gradient for gradient in sums if gradient is not None]
        if self._divisor > 1 and present:
            torch._foreach_div_(present, self._divisor)
        return sums

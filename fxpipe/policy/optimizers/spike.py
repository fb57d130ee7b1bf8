"""Spike compensation: one update makes up for what a late gradient has missed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fxpipe.errors import PolicyError
from fxpipe.task.several_optimizers import name_of, parts_of


class SpikeCompensation:
    """Turns SGD's update into the spike-compensated one, for gradients that arrive D updates late.

    A gradient acts through momentum over many updates: if it had arrived in time, the first D of them would already
    have moved the weights. So the update applies those at once, as a spike, and momentum applies the rest as usual:

        W ← W − lr·(a·buf + b·g),   a = γ^D,   b = 1 + γ + … + γ^{D−1} = (1 − γ^D)/(1 − γ)

    where buf is the momentum buffer with g in it, and g holds the weight decay and the sign of `maximize` as SGD has
    them. The buffer itself is SGD's own. With D = 0 this is SGD, bit for bit: nothing is computed.

    `optimizer.step()` has made W − lr·buf, so what is left to add is lr·((1−a)·buf − b·g). The weight decay in g needs
    the weights before the update: they are W_after + lr·buf, so no copy is kept.

    At a constant rate the weights are always X − lr·(γ + … + γ^D)·buf, where X is what SGD alone would have made of the
    same gradients: D updates further, by momentum alone.

    Cost: no memory; the late parameters are read twice, and once more with weight decay.

    From: Kosson et al. 2020 (Pipelined Backpropagation at Scale), arXiv 2003.11666.

    Args:
        optimizer: torch.optim.SGD itself, with momentum in every group, without nesterov and dampening.
        delays: D of each parameter, by the parameter; 0 if it is missing.

    Raises:
        PolicyError: any other optimizer.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, delays: Mapping[Tensor, int]) -> None:
        _refuse(optimizer)
        assert all(delay >= 0 for delay in delays.values()), "a gradient cannot be early"
        self.optimizer = optimizer
        self._delays = {id(parameter): delay for parameter, delay in delays.items() if delay > 0}

    @torch.no_grad()
    def after_step(self) -> None:
        """Call right after every `optimizer.step()`, while the gradients and the rate are still those of the step."""
        for group in self.optimizer.param_groups:
            gamma, lr, decay = (float(group[key]) for key in ("momentum", "lr", "weight_decay"))
            if gamma == 0:  # a scheduler did this: a = 0, b = 1, which is what SGD without momentum has done
                continue
            for delay, weights in self._late([p for p in group["params"] if p.grad is not None]).items():
                a, b = gamma**delay, sum(gamma**i for i in range(delay))
                buffers = self._buffers(weights)
                if decay:
                    torch._foreach_mul_(weights, 1 - lr * b * decay)
                torch._foreach_add_(weights, buffers, alpha=lr * (1 - a - b * lr * decay))
                gradients = [weight.grad for weight in weights if weight.grad is not None]
                torch._foreach_add_(weights, gradients, alpha=lr * b if group["maximize"] else -lr * b)

    def _late(self, parameters: Sequence[Tensor]) -> dict[int, list[Tensor]]:
        """Those that are late and have moved, by delay."""
        late: dict[int, list[Tensor]] = defaultdict(list)
        for parameter in parameters:
            moved = self.optimizer.state.get(parameter, {}).get("momentum_buffer") is not None
            if id(parameter) in self._delays and moved:
                late[self._delays[id(parameter)]].append(parameter)
        return late

    def _buffers(self, weights: Sequence[Tensor]) -> list[Tensor]:
        return [self.optimizer.state[weight]["momentum_buffer"] for weight in weights]


def _refuse(optimizer: torch.optim.Optimizer) -> None:
    kind = name_of(optimizer)
    if any(type(part) is not torch.optim.SGD for part in parts_of(optimizer)):
        raise PolicyError(
            f"spike compensation is defined for torch.optim.SGD with momentum, not for {kind}: "
            "it splits a gradient by how momentum would have spread it",
            hint="optimizer = torch.optim.SGD(…, momentum=0.9), or leave out +sc",
        )
    for number, group in enumerate(optimizer.param_groups):
        where = f" in parameter group {number}" if len(optimizer.param_groups) > 1 else ""
        if not group["momentum"] > 0:
            raise PolicyError(
                f"spike compensation needs momentum, and SGD{where} has none",
                hint="give SGD momentum > 0, or leave out +sc",
            )
        for option in ("nesterov", "dampening"):
            if group[option]:
                raise PolicyError(
                    f"spike compensation is defined for plain momentum, and SGD{where} has {option}",
                    hint=f"leave out {option}, or +sc",
                )

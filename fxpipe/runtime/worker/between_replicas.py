"""What replicas of a worker tell each other of minibatches besides gradients: losses, buffers, what was read.

And what they must have alike: the data that they read, and the optimizers that all make their updates.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fxpipe.errors import RunError, listed
from fxpipe.plan.spec import Plan
from fxpipe.runtime.wires.collective import Collective, Key
from fxpipe.runtime.worker.observer import Observer


class BetweenReplicas:
    """One replica's end of that, for one worker.

    Args:
        collective: its end of what the worker's replicas exchange.
        buffers: the worker's, by name; what comes from the others replaces them.
        observers: hear of losses over all replicas.
        device: of the buffers.

    Attributes:
        losses: of minibatches, over all replicas, that nobody has taken yet.
        handed_at: the minibatch after which buffers were last handed out.
    """

    def __init__(
        self,
        plan: Plan,
        collective: Collective,
        buffers: dict[str, Tensor],
        observers: Sequence[Observer],
        device: torch.device,
    ) -> None:
        self._collective, self._buffers, self._observers, self._device = collective, buffers, observers, device
        self._apart, self._divisor = plan.outer, plan.loss_divisor
        self.losses: dict[int, Tensor] = {}
        self.handed_at = -1
        self._own_losses: dict[int, Tensor] = {}  # of minibatches whose sum over the replicas is under way
        self._batches: set[int] = set()  # the minibatches whose numbers are being compared
        self._handed: dict[int, dict[str, list[str]]] = {}  # the buffers that minibatches begin with, by type

    def reset(self) -> None:
        """Forget whatever an interrupted segment left."""
        for left in (self.losses, self._own_losses, self._batches, self._handed):
            left.clear()

    def compare_batch(self, minibatch: int, number: int) -> None:
        """On worker 0: all replicas must have read the same minibatch, of which this is a number."""
        self._batches.add(minibatch)
        start_comparison(("batch", minibatch), number, self._collective, self._device)

    def add_loss(self, minibatch: int, total: Tensor) -> None:
        """Begin to add up the replicas' sums of the losses of their microbatches, with metrics after them."""
        self._own_losses[minibatch] = total
        self._collective.start_sum(("loss", minibatch), total.reshape(-1).clone())

    def gathered(self, minibatch: int) -> None:
        """The gradients of a minibatch have come from all replicas: so have its loss, and the numbers of its batch.

        Raises:
            RunError: the replicas have read different batches.
        """
        if minibatch in self._batches:
            self._batches.remove(minibatch)
            numbers = self._collective.take(("batch", minibatch)).tolist()
            check_read_alike(numbers, f"step {minibatch + 1}", "train_data()")
        if minibatch in self._own_losses:
            self._take_loss(minibatch)

    def take_losses(self) -> dict[int, Tensor]:
        """Wait for all losses that are under way; those that nobody has taken."""
        for minibatch in list(self._own_losses):
            self._take_loss(minibatch)
        found, self.losses = self.losses, {}
        return found

    def meets(self, minibatch: int) -> bool:
        """Whether replicas have the same buffers after a minibatch."""
        apart = self._apart
        return apart is None or (not apart.delay and (minibatch + 1) % apart.every == 0)

    def hand_out_buffers(self, names: Sequence[str], minibatch: int) -> None:
        """Begin to give all replicas the buffers, as a minibatch's forwards have left them, that the next begins with.

        They are replica 0's. Of replicas that train apart they are the mean, which has no sense for whole numbers, such
        as how many batches were seen: these are replica 0's there, too.
        """
        if not names or self.handed_at == minibatch:
            return
        self.handed_at = minibatch
        of_dtypes: dict[str, list[str]] = {}
        for name in dict.fromkeys(names):
            value = self._buffers[name]
            averaged = self._apart is not None and (value.is_floating_point() or value.is_complex())
            of_dtypes.setdefault(f"{'mean of ' if averaged else ''}buffers {value.dtype}", []).append(name)
        for kind, of_dtype in of_dtypes.items():
            flat = torch.cat([self._buffers[name].reshape(-1) for name in of_dtype])
            start = self._collective.start_sum if kind.startswith("mean") else self._collective.start_copy
            start((kind, minibatch), flat)
        taken = {kind: own for kind, own in of_dtypes.items() if self._collective.replica or kind.startswith("mean")}
        if taken:
            self._handed[minibatch + 1] = taken

    def take_buffers(self, minibatch: int) -> None:
        """Begin a minibatch with replica 0's buffers, or the replicas' mean, if they were changed in the one before."""
        for kind, names in self._handed.pop(minibatch, {}).items():
            flat, place = self._collective.take((kind, minibatch - 1)), 0
            if kind.startswith("mean"):
                flat /= self._collective.replicas
            for name in names:
                old = self._buffers[name]
                self._buffers[name] = torch.empty_like(old).copy_(flat[place : place + old.numel()].view(old.shape))
                place += old.numel()

    def _take_loss(self, minibatch: int) -> None:
        total = self._collective.take(("loss", minibatch)).reshape(self._own_losses.pop(minibatch).shape)
        loss = self.losses[minibatch] = total / self._divisor if self._divisor > 1 else total
        for observer in self._observers:
            observer.loss(minibatch, loss)


def unlike_first(numbers: Sequence[object]) -> str:
    """The replicas whose number is not that of replica 0, for a message; empty if there are none."""
    others = [f"replica {j}" for j, number in enumerate(numbers) if number != numbers[0]]
    return listed(others) if others else ""


def start_comparison(key: Key, number: int, collective: Collective, device: torch.device | str) -> None:
    """Begin to compare a number with those of the worker's other replicas, which are what is then taken of this key."""
    found = torch.zeros(collective.replicas, dtype=torch.int64)
    found[collective.replica] = number
    collective.start_sum(key, found.to(device))


def check_read_alike(numbers: Sequence[object], what: str, hook: str) -> None:
    """Compare what each replica of worker 0 has read.

    Args:
        numbers: of each replica, what stands for the data that it has read.
        what: it is, such as `step 3`.
        hook: that gives the data.

    Raises:
        RunError: a replica has read other data than replica 0; names all that have.
    """
    if others := unlike_first(numbers):
        raise RunError(
            f"the replicas of worker 0 read different batches in {what}: {others} not those of replica 0",
            where=hook,
            hint="every replica reads all data and takes its share: they must come in the same order in every "
            "process, as with random numbers of the process's own generators, which are seeded alike",
        )


_KEY = ("optimizer", -1)
"""What the comparison of optimizers is called among replicas."""


def check_optimizers_alike(
    worker: int, optimizer: Any, scheduler: Any, names: Mapping[int, str], collective: Collective, device: torch.device
) -> None:
    """Compare a replica's optimizer with those of the worker's other replicas; waits for them.

    Classes count, and options that are numbers, texts or None: of each parameter, and of the scheduler of the rate.

    Args:
        optimizer, scheduler: None where there is none.
        names: of parameters, by their id.

    Raises:
        RunError: a replica has another one than replica 0.
    """
    described = zlib.crc32(repr(_description(optimizer, scheduler, names)).encode())
    start_comparison(_KEY, described, collective, device)
    numbers = collective.take(_KEY).tolist()
    if others := unlike_first(numbers):
        raise RunError(
            f"the replicas of worker {worker} do not have the same optimizer: {others} another than replica 0",
            where="optimizer()",
            hint="all processes must be given the same classes, learning rates and other options: replicas with the "
            "same sums of gradients would make different updates",
        )


def _description(optimizer: Any, scheduler: Any, names: Mapping[int, str]) -> list[Any]:
    if optimizer is None:
        return []
    options = [
        (
            sorted(names.get(id(p), "") for p in group["params"]),
            _plain({k: v for k, v in group.items() if k != "params"}),
        )
        for group in optimizer.param_groups
    ]
    state = scheduler.state_dict() if hasattr(scheduler, "state_dict") else {}
    return [type(optimizer).__qualname__, options, type(scheduler).__qualname__, _plain(state)]


def _plain(value: Any) -> Any:
    """What of a value is the same in two processes if they mean the same."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else tuple(value.shape)
    if isinstance(value, Mapping):
        return [(str(key), _plain(value[key])) for key in sorted(value, key=str)]
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value if value is None or isinstance(value, bool | int | float | str) else type(value).__qualname__

"""What replicas of a worker exchange in addition to gradients: losses, buffers, numbers of the batches they read.

And the checks that they read the same data and have the same optimizer.
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
    """What one replica of one worker sends to and receives from the others.

    Args:
        collective: does the exchange.
        buffers: the worker's, by name; those received from other replicas replace them.
        observers: receive losses over all replicas.
        device: of the buffers.

    Attributes:
        losses: over all replicas, by minibatch; those not yet taken.
        handed_at: the minibatch after which buffers were last sent.
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
        self._outer, self._divisor = plan.outer, plan.loss_divisor
        self.losses: dict[int, Tensor] = {}
        self.handed_at = -1
        self._own_losses: dict[int, Tensor] = {}  # by minibatch, while their sum over the replicas is in flight
        self._batches: set[int] = set()  # the minibatches whose numbers are being compared
        self._handed: dict[int, dict[str, list[str]]] = {}  # by minibatch and dtype, the buffers that it begins with

    def reset(self) -> None:
        """Forget what an interrupted segment left."""
        for left in (self.losses, self._own_losses, self._batches, self._handed):
            left.clear()

    def compare_batch(self, minibatch: int, number: int) -> None:
        """On worker 0: begin to check that all replicas read the same minibatch; the number is its checksum."""
        self._batches.add(minibatch)
        start_comparison(("batch", minibatch), number, self._collective, self._device)

    def add_loss(self, minibatch: int, total: Tensor) -> None:
        """Begin to add up the replicas' loss sums, each over its own microbatches and followed by metrics."""
        self._own_losses[minibatch] = total
        self._collective.start_sum(("loss", minibatch), total.reshape(-1).clone())

    def gathered(self, minibatch: int) -> None:
        """The gradients of a minibatch have arrived from all replicas; so have its loss and its checksums.

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
        """Wait for all losses in flight; returns those not yet taken."""
        for minibatch in list(self._own_losses):
            self._take_loss(minibatch)
        found, self.losses = self.losses, {}
        return found

    def meets(self, minibatch: int) -> bool:
        """Whether replicas have the same buffers after a minibatch."""
        outer = self._outer
        return outer is None or (not outer.delay and (minibatch + 1) % outer.every == 0)

    def hand_out_buffers(self, names: Sequence[str], minibatch: int) -> None:
        """After a minibatch's forwards, begin to give all replicas the buffers that the next minibatch begins with.

        They are those of replica 0. Replicas that train separately take the mean, except of whole numbers, such as a
        count of batches: these are replica 0's there, too.
        """
        if not names or self.handed_at == minibatch:
            return
        self.handed_at = minibatch
        of_dtypes: dict[str, list[str]] = {}
        for name in dict.fromkeys(names):
            value = self._buffers[name]
            averaged = self._outer is not None and (value.is_floating_point() or value.is_complex())
            of_dtypes.setdefault(f"{'mean of ' if averaged else ''}buffers {value.dtype}", []).append(name)
        for kind, of_dtype in of_dtypes.items():
            flat = torch.cat([self._buffers[name].reshape(-1) for name in of_dtype])
            start = self._collective.start_sum if kind.startswith("mean") else self._collective.start_copy
            start((kind, minibatch), flat)
        taken = {kind: own for kind, own in of_dtypes.items() if self._collective.replica or kind.startswith("mean")}
        if taken:
            self._handed[minibatch + 1] = taken

    def take_buffers(self, minibatch: int) -> None:
        """Before a minibatch: receive replica 0's buffers, or the mean of all, if the last minibatch changed them."""
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
    """The replicas whose number differs from replica 0's, for a message; empty if there are none."""
    others = [f"replica {j}" for j, number in enumerate(numbers) if number != numbers[0]]
    return listed(others) if others else ""


def start_comparison(key: Key, number: int, collective: Collective, device: torch.device | str) -> None:
    """Begin to gather a number from each replica of the worker, to be taken by this key and compared."""
    found = torch.zeros(collective.replicas, dtype=torch.int64)
    found[collective.replica] = number
    collective.start_sum(key, found.to(device))


def check_read_alike(numbers: Sequence[object], what: str, hook: str) -> None:
    """Compare what the replicas of worker 0 have read.

    Args:
        numbers: a checksum of the data, for each replica.
        what: names the data, such as `step 3`.
        hook: gives the data.

    Raises:
        RunError: replicas read different data from replica 0; names them all.
    """
    if others := unlike_first(numbers):
        raise RunError(
            f"the replicas of worker 0 read different batches in {what}: {others} unlike replica 0",
            where=hook,
            hint="every replica reads all data and takes its share, so every process must read the same batches in the "
            "same order; fxpipe seeds the default generators of Python, numpy and torch alike in all processes",
        )


_KEY = ("optimizer", -1)
"""The key of the comparison of optimizers."""


def check_optimizers_alike(
    worker: int, optimizer: Any, scheduler: Any, names: Mapping[int, str], collective: Collective, device: torch.device
) -> None:
    """Compare a replica's optimizer with those of the worker's other replicas; waits for them.

    It compares classes, and options that are numbers, texts or None: of each parameter, and of the scheduler.

    Args:
        optimizer, scheduler: None where there is none.
        names: of parameters, by `id(parameter)`.

    Raises:
        RunError: a replica has a different one from replica 0.
    """
    described = zlib.crc32(repr(_description(optimizer, scheduler, names)).encode())
    start_comparison(_KEY, described, collective, device)
    numbers = collective.take(_KEY).tolist()
    if others := unlike_first(numbers):
        raise RunError(
            f"the replicas of worker {worker} have different optimizers: {others} unlike replica 0",
            where="optimizer()",
            hint="use the same classes, learning rates and other options in all processes: otherwise replicas make "
            "different updates from the same gradients",
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
    """The part of a value that can be compared between processes."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else tuple(value.shape)
    if isinstance(value, Mapping):
        return [(str(key), _plain(value[key])) for key in sorted(value, key=str)]
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value if value is None or isinstance(value, bool | int | float | str) else type(value).__qualname__

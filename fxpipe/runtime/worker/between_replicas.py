"""What replicas of a worker exchange in addition to gradients: losses, buffers, numbers of the batches they read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fxpipe.errors import RunError
from fxpipe.runtime.wires.collective import Collective, check_read_alike
from fxpipe.runtime.worker.gradients import Vector, row_by_row
from fxpipe.runtime.worker.outer_step import OuterStep
from fxpipe.runtime.worker.part import UpdatePart
from fxpipe.runtime.worker.setting import WorkerSetting


class OneReplica(UpdatePart):
    """The losses of a worker's only replica, which exchanges nothing.

    Attributes:
        losses: over all replicas, by minibatch; those not yet taken.
    """

    def __init__(self, setting: WorkerSetting) -> None:
        self._divisor = setting.plan.loss_divisor
        self.losses: dict[int, Tensor] = {}
        self._sum: Tensor | None = None  # of the minibatch's microbatches so far

    @classmethod
    def of(cls, setting: WorkerSetting) -> Iterator[UpdatePart]:
        yield OneReplica(setting) if setting.collective is None else BetweenReplicas(setting, setting.collective)

    def reset(self) -> None:
        self.losses.clear()
        self._sum = None

    def add_loss(self, minibatch: int, loss: Tensor, last: bool) -> Tensor | None:
        """Add a microbatch's loss sum, followed by metrics; after the minibatch's last one, return its loss, unless
        that is yet to come into `losses`."""
        loss = loss.detach().float()
        self._sum = loss if self._sum is None else self._sum + loss
        if not last:
            return None
        total, self._sum = self._sum, None
        return self._loss(minibatch, total)

    def take_losses(self) -> dict[int, Tensor]:
        """Wait for all losses in flight; returns those not yet taken."""
        losses, self.losses = self.losses, {}
        return losses

    def hand_out_buffers(self, names: Sequence[str], minibatch: int) -> None:
        """After a minibatch's forwards, begin to give all replicas the buffers that the next minibatch begins with."""

    def take_buffers(self, minibatch: int) -> None:
        """Before a minibatch: receive the buffers that it begins with, if the last minibatch changed them."""

    def _loss(self, minibatch: int, total: Tensor) -> Tensor | None:
        return total / self._divisor if self._divisor > 1 else total


class BetweenReplicas(OneReplica):
    """What one replica of one worker sends to and receives from the others.

    Buffers that are received from other replicas replace the worker's, and observers get losses over all replicas. If
    replicas train separately, each has its own loss.
    """

    def __init__(self, setting: WorkerSetting, collective: Collective) -> None:
        super().__init__(setting)
        self._collective, self._buffers, self._observers = collective, setting.buffers, setting.observers
        self._outer = setting.part(OuterStep)
        self._handed_at = -1  # the minibatch after which buffers were last sent
        self._own_losses: dict[int, Tensor] = {}  # by minibatch, while their sum over the replicas is in flight
        self._batches: set[int] = set()  # the minibatches whose numbers are being compared
        self._handed: dict[int, dict[str, Vector[str]]] = {}  # by minibatch and kind, the buffers that it begins with

    def load(self, states: Sequence[Any], version: int, same: bool) -> None:
        if self._outer is not None and self._outer.all_same(version):
            self._handed_at = version - 1

    def reset(self) -> None:
        super().reset()
        for left in (self._own_losses, self._batches, self._handed):
            left.clear()

    def compare_batch(self, minibatch: int, number: int) -> None:
        """Begin to check that all replicas read the same minibatch, unless outer steps do that."""
        if self._outer is None:
            self._batches.add(minibatch)
            self._collective.start_comparison(("batch", minibatch), number)

    def gathered(self, minibatch: int) -> None:
        """The minibatch's loss and its checksums have arrived from all replicas, too."""
        if minibatch in self._batches:
            self._batches.remove(minibatch)
            check_read_alike(self._collective, ("batch", minibatch), f"step {minibatch + 1}", "train_data()")
        if minibatch in self._own_losses:
            self._take_loss(minibatch)

    def take_losses(self) -> dict[int, Tensor]:
        for minibatch in list(self._own_losses):
            self._take_loss(minibatch)
        return super().take_losses()

    def hand_out_buffers(self, names: Sequence[str], minibatch: int) -> None:
        """They are those of replica 0. Replicas that train separately take the mean after the minibatch of an outer
        step, except of whole numbers, such as a count of batches: these are replica 0's there, too."""
        outer = self._outer
        if outer is None or (not outer.spec.delay and outer.due(minibatch + 1)):
            self._hand_out(names, minibatch)

    def _hand_out(self, names: Sequence[str], minibatch: int) -> None:
        if not names or self._handed_at == minibatch:
            return
        self._handed_at = minibatch
        kinds: dict[str, list[str]] = {}
        for name in dict.fromkeys(names):
            value = self._buffers[name]
            averaged = self._outer is not None and (value.is_floating_point() or value.is_complex())
            kinds.setdefault(f"{'mean of ' if averaged else ''}buffers {value.dtype}", []).append(name)
        replica, replicas = self._collective.replica, self._collective.replicas
        for kind, of_kind in kinds.items():
            vector = Vector({name: row_by_row(self._buffers[name]) for name in of_kind})
            flat = vector.joined({name: self._buffers[name] for name in of_kind})
            if kind.startswith("mean"):
                self._collective.start_sum((kind, minibatch), flat, replicas)
            else:
                sizes = [len(flat)] + [0] * (replicas - 1)
                self._collective.start_gather((kind, minibatch), flat[: sizes[replica]], sizes)
            self._handed.setdefault(minibatch + 1, {})[kind] = vector

    def take_buffers(self, minibatch: int) -> None:
        for kind, vector in self._handed.pop(minibatch, {}).items():
            for name, value in vector.views(self._collective.take((kind, minibatch - 1))).items():
                self._buffers[name] = torch.empty_like(self._buffers[name]).copy_(value)

    def begin_meeting(self, version: int, buffers: Sequence[str]) -> None:
        if self._outer is not None:
            self.take_buffers(version)
            self._hand_out(buffers, version - 1)

    def end_meeting(self, version: int) -> None:
        if self._outer is not None:
            self.take_buffers(version)

    def _loss(self, minibatch: int, total: Tensor) -> Tensor | None:
        """Begin to add up the replicas' loss sums, each over its own microbatches."""
        if self._outer is not None:
            return super()._loss(minibatch, total)
        self._own_losses[minibatch] = total
        self._collective.start_sum(("loss", minibatch), total.reshape(-1).clone())
        return None

    def _take_loss(self, minibatch: int) -> None:
        total = self._collective.take(("loss", minibatch)).reshape(self._own_losses.pop(minibatch).shape)
        loss = self.losses[minibatch] = total / self._divisor if self._divisor > 1 else total
        for observer in self._observers:
            observer.loss(minibatch, loss)


_KEY = ("optimizer", -1)
"""The key of the comparison of optimizers."""


def check_optimizers_alike(
    worker: int, optimizer: Any, scheduler: Any, names: Mapping[int, str], collective: Collective
) -> None:
    """Compare a replica's optimizer with those of the worker's other replicas; waits for them.

    It compares classes, and options that are numbers, texts or None: of each parameter, and of the scheduler.
    """
    collective.start_comparison(_KEY, _description(optimizer, scheduler, names))
    if others := collective.unlike_first(_KEY):
        raise RunError(
            f"the replicas of worker {worker} have different optimizers: {others} unlike replica 0",
            where="optimizer()",
            hint="use the same classes, learning rates and other options in all processes: otherwise replicas make "
            "different updates from the same gradients",
        )


def _description(optimizer: Any, scheduler: Any, names: Mapping[int, str]) -> list[Any]:
    if optimizer is None:
        return []
    options = []
    for group in optimizer.param_groups:
        parameters = sorted(names.get(id(p), "") for p in group["params"])
        options.append((parameters, _plain({k: v for k, v in group.items() if k != "params"})))
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

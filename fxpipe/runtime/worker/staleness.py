"""How far the weights that forwards used are from those that their updates changed: `fxpipe run --log-staleness`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxpipe.device_copies import widest
from fxpipe.policy.demand import Demand, WeightReads
from fxpipe.runtime.worker.part import UpdatePart
from fxpipe.runtime.worker.setting import WorkerSetting
from fxpipe.runtime.worker.versions import ReadVersions
from fxpipe.schedule.action import Action


@dataclass
class _Sample:
    """The weights that the forward of one minibatch uses, as far as they exist yet."""

    minibatch: int
    used: dict[str, tuple[Tensor, int, int]]  # copy, version, ahead; by name


class StalenessLog(UpdatePart):
    """Compares, on the worker that owns them, the weights a forward used with those that its update changed.

    It samples one minibatch at a time: it keeps a copy of what the forward of the first microbatch reads until that
    minibatch's update, and then takes the next minibatch. So it costs one copy of the weights, and a worker with s
    updates between forward and update reports every (s+1)-th minibatch. If several workers' forwards read a parameter,
    it compares what the owner reads, or what the first of them reads if the owner does not.
    """

    def __init__(self, setting: WorkerSetting) -> None:
        self.demand, self.worker = setting.recipe.demand, setting.worker
        self.trained = setting.trained
        self._optimizer = setting.optimizer
        self._reads = _forwards(self.demand, self.worker, self.trained)
        self._reach = max((reading.lags[0] for reading, _ in self._reads), default=0)
        self._sample: _Sample | None = None
        self._sums: dict[tuple[int, int, int], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])

    @classmethod
    def of(cls, setting: WorkerSetting) -> Iterator[UpdatePart]:
        if setting.options.log_staleness and setting.replica == 0:  # one log is enough
            yield cls(setting)

    def emptied(self) -> None:
        """Drop the sample that was begun."""
        self._sample = None

    def reached(self, versions: ReadVersions) -> None:
        """Take what the sampled minibatch's forward reads of the live version."""
        if not self._reads:
            return
        version, predictions = versions.live, versions.predictions
        sample = self._sample = self._sample or _Sample(version + self._reach, {})
        action = Action("F", sample.minibatch)
        for reading, names in self._reads:
            if self.demand.version(reading, action, versions.start) == version:
                ahead = self.demand.ahead(reading, action, version)
                tensors = predictions.look(names, ahead)
                for name in names:
                    sample.used[name] = tensors[name].detach().clone(), version, ahead
        predictions.forget_all()

    def gathered(self, minibatch: int) -> None:
        """The weights are still those that the update will change: compare, if the minibatch is the sampled one."""
        optimizer, sample = self._optimizer, self._sample
        if optimizer is None or sample is None or sample.minibatch != minibatch:
            return
        self._sample = None
        number = {id(p): group for group, members in enumerate(optimizer.param_groups) for p in members["params"]}
        rows: dict[tuple[int, int, int], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        for name, (used, version, ahead) in sample.used.items():
            live = self.trained[name]
            if id(live) not in number:
                continue
            row = rows[number[id(live)], minibatch - version, ahead]
            row[0] += _square(used - live.detach())
            row[1] += _square(live.detach())
            row[2] += live.numel()
        for key, (difference, weights, count) in rows.items():
            total = self._sums[key]
            total[0] += 1
            total[1] += (difference / max(count, 1)) ** 0.5
            total[2] += (weights / max(count, 1)) ** 0.5

    def summary(self) -> list[dict[str, Any]]:
        """The means since the run began or went on: a row for each group, staleness and distance of prediction.

        A row is `{"group", "stale", "ahead", "samples", "rmse", "rms"}`: the optimizer's parameter group, how many
        updates old the forward's version was, how many updates ahead it was predicted, how many minibatches were
        compared, the root mean square of the difference, and that of the weights themselves.
        """
        return [
            {"group": group, "stale": stale, "ahead": ahead, "samples": int(n), "rmse": rmse / n, "rms": rms / n}
            for (group, stale, ahead), (n, rmse, rms) in sorted(self._sums.items())
        ]


def _forwards(demand: Demand, owner: int, trained: Iterable[str]) -> list[tuple[WeightReads, tuple[str, ...]]]:
    """For every trained parameter one forward that reads it: the owner's own if there is one, else the first.

    Returns:
        What forwards read of the owner's weights, and the names of those parameters among that.
    """
    missing = set(trained)
    reads = []
    for reader in (owner, *range(demand.plan.workers)):
        for reading in demand.readings(reader, "F"):
            names = tuple(name for name in reading.names if reading.owner == owner and name in missing)
            if names:
                reads.append((reading, names))
                missing.difference_update(names)
    return reads


def _square(tensor: Tensor) -> float:
    real = None if tensor.is_complex() else widest(tensor.device)
    return float(torch.linalg.vector_norm(tensor, dtype=real)) ** 2

"""An update that the replicas of a worker share: each updates its own parameters, and sends the others the result."""

from __future__ import annotations

from collections.abc import Iterator

from fxpipe.runtime.wires.collective import Collective
from fxpipe.runtime.worker.gradients import buckets_of, shares_of, vector_of
from fxpipe.runtime.worker.part import UpdatePart
from fxpipe.runtime.worker.setting import WorkerSetting


class SharedUpdate(UpdatePart):
    """An update that the replicas of a worker share: each updates its own parameters, and sends the others the result.

    sums of gradients, each to the replica that updates its parameter     `ReplicatedSum`
    → norms of gradients, each from the replica that has the sum          if they are clipped
    → each replica: a step of its own optimizer, over its own parameters
    → new weights, to all replicas                                        by bucket
    """

    def __init__(self, setting: WorkerSetting, collective: Collective) -> None:
        trained, updaters = setting.trained, setting.shares
        self._collective = collective
        self._parameters = list(trained.values())
        self._vector = vector_of(self._parameters)
        self._updaters = [updaters[name] for name in trained]
        buckets = buckets_of(setting)
        groups = {f"weights of {name}": indices for name, indices in buckets.items()}
        known = {index for indices in buckets.values() for index in indices}
        for index, parameter in enumerate(self._parameters):
            if index not in known:  # it never gets a gradient, but some optimizers write to it
                rest = f"weights of rest {parameter.dtype}"
                groups[rest] = [*groups.get(rest, ()), index]
        self._groups = {name: sorted(indices, key=self._updaters.__getitem__) for name, indices in groups.items()}

    @classmethod
    def of(cls, setting: WorkerSetting) -> Iterator[UpdatePart]:
        if setting.shares and setting.collective is not None:
            yield cls(setting, setting.collective)

    def apply(self, minibatch: int) -> None:
        """Send the weights that this replica has updated, and wait for those that the others have."""
        for name, members in self._groups.items():
            weights = {index: self._parameters[index] for index in members}
            updated = [index for index in members if self._updaters[index] == self._collective.replica]
            flat = self._vector.joined(weights, updated)
            sizes = shares_of(self._vector, members, self._updaters, self._collective.replicas)
            self._collective.start_gather((name, minibatch), flat, sizes)
        for name, members in self._groups.items():
            for index, value in self._vector.views(self._collective.take((name, minibatch)), members).items():
                if self._updaters[index] != self._collective.replica:
                    self._parameters[index].detach().copy_(value)

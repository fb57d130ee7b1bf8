"""An update that the replicas of a worker share out: each updates its own parameters, and hands out their new weights.

sums of gradients, each to the replica that updates its parameter     `ReplicatedSum`
→ norms of gradients, of each parameter by who has its sum            if they are clipped
→ each replica: a step of its own optimizer, over its own parameters
→ new weights, to all replicas                                        by bucket
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from fxpipe.runtime.wires.collective import Collective
from fxpipe.runtime.worker.clip import norms_of
from fxpipe.runtime.worker.gradients import VectorPart, in_one


class SharedUpdate:
    """One replica's end.

    Args:
        trained: the worker's trained parameters by name.
        updaters: by the same names, the replica that updates each.
        buckets: by name, the indices of their parameters; those of one have one dtype.
    """

    def __init__(
        self,
        trained: Mapping[str, nn.Parameter],
        updaters: Mapping[str, int],
        buckets: Mapping[str, Sequence[int]],
        collective: Collective,
    ) -> None:
        self._collective = collective
        self._parameters = list(trained.values())
        self._parts = [VectorPart(parameter) for parameter in self._parameters]
        self._updaters = [updaters[name] for name in trained]
        self.own = {name: p for name, p in trained.items() if updaters[name] == collective.replica}
        groups = {f"weights of {name}": indices for name, indices in buckets.items()}
        known = {index for indices in buckets.values() for index in indices}
        for index, parameter in enumerate(self._parameters):
            if index not in known:  # it never gets a gradient, and some optimizers write into it all the same
                rest = f"weights of rest {parameter.dtype}"
                groups[rest] = [*groups.get(rest, ()), index]
        self._groups = {name: sorted(indices, key=self._updaters.__getitem__) for name, indices in groups.items()}
        self._norms: tuple[int, list[float]] = (-1, [])

    def start_norms(self, minibatch: int) -> None:
        """Tell the others the norms of the gradients of this replica's parameters."""
        own = torch.tensor(norms_of(self._parameters), dtype=torch.float64, device=self._device)
        self._collective.start_gather(("norms", minibatch), own, [len(own)] * self._collective.replicas)

    def norms(self, minibatch: int, parameters: Sequence[nn.Parameter]) -> list[float]:
        """The norms of all gradients, as `norms_of` gives them; waits for the other replicas."""
        if self._norms[0] != minibatch:
            flat = self._collective.take(("norms", minibatch)).view(self._collective.replicas, -1)
            places = torch.tensor(self._updaters, device=flat.device).unsqueeze(0)
            self._norms = minibatch, flat.gather(0, places)[0].tolist()
        return self._norms[1]

    def start_weights(self, minibatch: int) -> None:
        """Hand out the weights that this replica has updated."""
        for name, members in self._groups.items():
            own = [i for i in members if self._updaters[i] == self._collective.replica]
            weights = [self._parameters[i].detach() for i in own]
            flat = in_one(weights, [self._parts[i] for i in own], self._parameters[members[0]])
            self._collective.start_gather((name, minibatch), flat, self._sizes(members))

    def take_weights(self, minibatch: int) -> None:
        """Take the weights that the others have updated; waits for them."""
        for name, members in self._groups.items():
            flat, place = self._collective.take((name, minibatch)), 0
            for index in members:
                part = self._parts[index]
                if self._updaters[index] != self._collective.replica:
                    self._parameters[index].detach().copy_(part.of(flat, place))
                place += part.size

    def _sizes(self, members: Sequence[int]) -> list[int]:
        sizes = [0] * self._collective.replicas
        for index in members:
            sizes[self._updaters[index]] += self._parts[index].size
        return sizes

    @property
    def _device(self) -> torch.device:
        return self._parameters[0].device

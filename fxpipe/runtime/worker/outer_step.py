"""Outer steps: replicas train separately, and after every H updates they compute common weights.

Each replica trains from the common weights c. After every H updates, replicas average how far each has moved, and an
outer step makes new common weights, from which all continue (DiLoCo, Douillard et al. 2023, arXiv 2311.08105):

    g = mean over replicas of (c − w)        the outer gradient, added up in the order of replicas
    c = SGD with Nesterov momentum (c, g)    as in torch.optim.SGD
    w = c

With a delay of one, the exchange that begins at one outer step ends at the next, H updates later, and a replica keeps
the updates that it made meanwhile; b are its weights when the exchange began (with a rate of 1 and no momentum, this is
CoCoD-SGD, Shen et al. 2019, arXiv 1906.12043):

    g = mean over replicas of (c − b)
    c = SGD with Nesterov momentum (c, g)
    w = c + (w − b)                          then the next exchange begins, with b = w

Each update counts in exactly one g: c − b is the sum of a replica's H updates before the exchange.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.plan.spec import OuterSpec
from fxpipe.runtime.wires.collective import Collective
from fxpipe.runtime.worker.between_replicas import check_read_alike, start_comparison

BATCHES = "batches"


class OuterStep:
    """The outer steps of one replica of a worker.

    Args:
        trained: the parameters that the worker trains, by name; live, with the common weights.
        collective: does the exchange.
        device: of the parameters.

    Attributes:
        spec: the interval, the delay and the rates.
    """

    def __init__(
        self,
        spec: OuterSpec,
        trained: Mapping[str, nn.Parameter],
        collective: Collective,
        device: torch.device | str,
    ) -> None:
        self.spec = spec
        self._collective, self._device = collective, device
        self._of_dtype: dict[str, dict[str, nn.Parameter]] = {}
        for name, parameter in trained.items():
            self._of_dtype.setdefault(str(parameter.dtype), {})[name] = parameter
        self._common = {dtype: nn.Parameter(flat) for dtype, flat in self._live().items()}
        self._optimizer: torch.optim.Optimizer | None = None
        if self._common:
            momentum = spec.momentum
            parameters = list(self._common.values())
            self._optimizer = torch.optim.SGD(parameters, spec.lr, momentum, nesterov=momentum > 0)
        self._since = 0  # the version at which the newest exchange began
        self._under_way: int | None = None  # the same, until it ends
        self._begun: dict[str, Tensor] = {}  # the weights when it began, if it has a delay
        self._read: dict[int, int] = {}  # checksums of minibatches that are not compared yet
        self._compared: tuple[int, int] = (0, 0)  # the first minibatch being compared, and how many

    def due(self, version: int) -> bool:
        """Whether there is an outer step after this many updates."""
        return version % self.spec.every == 0

    def read(self, minibatch: int, number: int) -> None:
        """On worker 0: a minibatch with this checksum was read; outer steps compare the replicas' checksums."""
        self._read[minibatch] = number

    def begin(self, version: int) -> None:
        """The update to a version is made: begin the exchange that its outer step waits for."""
        if self.due(version) and not self.spec.delay:
            self._start(version)

    def end(self, version: int) -> None:
        """Make the outer step of a version, if there is one; waits for other replicas.

        Raises:
            RunError: the replicas have read different batches.
            PeerLost: another replica is gone.
        """
        if not self.due(version):
            return
        self._finish()
        if self.spec.delay:
            self._start(version)
            self._begun = self._live()

    def begin_meeting(self, version: int) -> None:
        """Nothing is in flight: end the present exchange, and begin one for the updates since it began."""
        self._finish()
        if version > self._since:
            self._start(version)

    def end_meeting(self) -> None:
        """Make that outer step: afterwards all replicas have the same weights."""
        self._finish()

    @property
    def first(self) -> bool:
        """Whether this is the first replica, whose shard has the common weights and momentum."""
        return self._collective.replica == 0

    def all_same(self, version: int) -> bool:
        """Whether all replicas have the same weights and buffers at the live version."""
        return self._since == version and self._under_way is None

    def made_by_all(self, version: int) -> int:
        """How many updates all replicas must have made if this one has made `version` updates."""
        return (version // self.spec.every - self.spec.delay) * self.spec.every

    def common(self) -> dict[str, Tensor]:
        """The weights that all replicas have in common, by name; live."""
        return {
            name: flat
            for dtype, common in self._common.items()
            for name, flat in self._parts(dtype, common.detach()).items()
        }

    def state(self, version: int) -> dict[str, Any]:
        """What a replica needs to continue from the live version, except what all have in common.

        Minibatches that are not compared yet are left out: after resuming, only those read from then on are compared.
        """
        return {
            "since": self._since,
            "under_way": self._under_way,
            "weights": {} if self.all_same(version) else self._live(),
            "begun": dict(self._begun),
        }

    def momentum(self) -> dict[str, Tensor]:
        """The momentum of outer steps by dtype, the same in all replicas; live."""
        states = {} if self._optimizer is None else self._optimizer.state
        found = {dtype: states.get(common, {}).get("momentum_buffer") for dtype, common in self._common.items()}
        return {dtype: value for dtype, value in found.items() if value is not None}

    def load(self, found: Mapping[str, Any] | None, momentum: Mapping[str, Tensor], version: int) -> None:
        """Continue from what `state` and `momentum` gave at a version; the common weights have been loaded.

        Args:
            found: None starts from the common weights.
        """
        if found is None:
            self._since = version
            return
        self._since, self._under_way = found["since"], found["under_way"]
        self._begun = {dtype: value.to(self._device) for dtype, value in found["begun"].items()}
        for dtype, flat in found["weights"].items():
            self._put(dtype, flat)
        for dtype, value in momentum.items():
            assert self._optimizer is not None
            self._optimizer.state[self._common[dtype]]["momentum_buffer"] = value.to(self._device, copy=True)

    def go_on(self) -> None:
        """A segment begins: repeat the exchange that was in flight at the checkpoint, if there was one."""
        if self._under_way is not None:
            self._exchange(self._under_way, self._begun)

    def _live(self) -> dict[str, Tensor]:
        """Copies of the weights, by dtype, one vector each."""
        return {
            dtype: torch.cat([parameter.detach().reshape(-1) for parameter in parameters.values()])
            for dtype, parameters in self._of_dtype.items()
        }

    def _start(self, version: int) -> None:
        self._exchange(version, self._live())
        read = [minibatch for minibatch in sorted(self._read) if minibatch < version]
        numbers = [self._read.pop(minibatch) for minibatch in read]
        self._compared = min(read, default=0), len(read)
        if numbers:
            digest = zlib.crc32(repr(numbers).encode())
            start_comparison((BATCHES, version), digest, self._collective, self._device)
        self._since = self._under_way = version

    def _exchange(self, version: int, weights: Mapping[str, Tensor]) -> None:
        for dtype, flat in weights.items():
            moved = self._common[dtype].detach() - flat
            self._collective.start_sum((f"outer {dtype}", version), moved, self._collective.replicas)

    def _finish(self) -> None:
        """Make the outer step whose exchange is in flight, if there is one."""
        if self._under_way is None:
            return
        version, self._under_way = self._under_way, None
        for dtype, common in self._common.items():
            common.grad = self._collective.take((f"outer {dtype}", version))
        self._check_batches(version)
        if self._optimizer is None:
            return
        self._optimizer.step()
        begun, self._begun = self._begun, {}
        for dtype, common in self._common.items():
            common.grad = None
            self._put(dtype, common.detach() + (self._live()[dtype] - begun[dtype]) if begun else common.detach())

    def _put(self, dtype: str, flat: Tensor) -> None:
        for name, value in self._parts(dtype, flat).items():
            self._of_dtype[dtype][name].detach().copy_(value)

    def _parts(self, dtype: str, flat: Tensor) -> dict[str, Tensor]:
        """Views of a vector of this dtype's weights, by name."""
        found, place = {}, 0
        for name, parameter in self._of_dtype[dtype].items():
            found[name] = flat[place : place + parameter.numel()].view(parameter.shape)
            place += parameter.numel()
        return found

    def _check_batches(self, version: int) -> None:
        first, count = self._compared
        if count:
            numbers = self._collective.take((BATCHES, version)).tolist()
            check_read_alike(numbers, f"steps {first + 1} to {version}", "train_data()")

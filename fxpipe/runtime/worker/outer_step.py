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

With a codec, each replica sends its c − w encoded, and all average what they decode of all replicas' messages. A codec
that carries over keeps what it leaves out of each parameter, as float32. It is kept when the outer step is made: so an
exchange that begins again after a checkpoint sends the same bytes.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.codecs.codec import OUTER, EdgeState
from fxpipe.codecs.outer_message import outer_message
from fxpipe.plan.packing import contiguous_stride
from fxpipe.plan.spec import OuterSpec, TensorSpec
from fxpipe.runtime.wires.collective import Collective
from fxpipe.runtime.worker.between_replicas import check_read_alike, start_comparison

BATCHES = "batches"
Memories = dict[str, dict[str, Tensor]]
"""What a codec remembers of each parameter, by name."""


class OuterStep:
    """The outer steps of one replica of a worker.

    Args:
        trained: the parameters that the worker trains, by name; live, with the common weights.
        collective: does the exchange.
        device: of the parameters.
        place: the run's seed and the worker, for the codec's random numbers.

    Attributes:
        spec: the interval, the delay, the rates and the codec.
    """

    def __init__(
        self,
        spec: OuterSpec,
        trained: Mapping[str, nn.Parameter],
        collective: Collective,
        device: torch.device | str,
        place: tuple[object, ...] = (),
    ) -> None:
        self.spec = spec
        self._place = (*place, "outer", collective.replica)
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
        specs = {n: TensorSpec(p.shape, contiguous_stride(p.shape), str(p.dtype)[6:]) for n, p in trained.items()}
        self._message = outer_message(spec.codec, specs) if spec.codec and specs else None
        self._memories: Memories = {}
        self._next_memories: Memories = {}  # when the exchange under way has ended
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
            "memories": dict(self._memories),
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
        self._memories = {
            name: {key: value.to(self._device) for key, value in memory.items()}
            for name, memory in found.get("memories", {}).items()
        }
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
        moved = {dtype: self._common[dtype].detach() - flat for dtype, flat in weights.items()}
        replicas = self._collective.replicas
        if self._message is None:
            for dtype, flat in moved.items():
                self._collective.start_sum((f"outer {dtype}", version), flat, replicas)
            return
        values = {name: value for dtype, flat in moved.items() for name, value in self._parts(dtype, flat).items()}
        states = {
            name: EdgeState(dict(self._memories.get(name, {})), partial(tuple, (*self._place, version, name)))
            for name in values
        }
        block = self._message.pack(values, states)
        self._next_memories = {name: state.memory for name, state in states.items() if state.memory}
        self._collective.start_gather((OUTER, version), block, [self._message.bytes] * replicas)

    def _mean(self, version: int) -> dict[str, Tensor]:
        """The mean over replicas of what an exchange sent, by dtype; waits for other replicas."""
        if self._message is None:
            return {dtype: self._collective.take((f"outer {dtype}", version)) for dtype in self._common}
        found = {dtype: torch.zeros_like(common.detach()) for dtype, common in self._common.items()}
        sums = {name: value for dtype, flat in found.items() for name, value in self._parts(dtype, flat).items()}
        for block in self._collective.take((OUTER, version)).split(self._message.bytes):
            for name, value in self._message.unpack(block).items():
                sums[name] += value
        for flat in found.values():
            flat /= self._collective.replicas
        self._memories, self._next_memories = self._next_memories, {}
        return found

    def _finish(self) -> None:
        """Make the outer step whose exchange is in flight, if there is one."""
        if self._under_way is None:
            return
        version, self._under_way = self._under_way, None
        for dtype, mean in self._mean(version).items():
            self._common[dtype].grad = mean
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

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

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NotRequired, TypedDict

import torch
from torch import Tensor, nn

from fxpipe.checkpoint.shard import Count, Tensors
from fxpipe.codecs.codec import OUTER, EdgeState
from fxpipe.codecs.packs import outer_message
from fxpipe.plan.mesh import OuterSpec
from fxpipe.runtime.wires.collective import Collective, check_read_alike
from fxpipe.runtime.worker.gradients import Vector, row_by_row
from fxpipe.runtime.worker.part import UpdatePart
from fxpipe.runtime.worker.setting import WorkerSetting

BATCHES = "batches"
Memories = dict[str, dict[str, Tensor]]
"""What a codec remembers of each parameter, by name."""


class OuterState(TypedDict):
    """Each replica's own state, except what all have in common."""

    since: Count
    under_way: Count | None
    weights: Tensors
    begun: Tensors
    memories: NotRequired[dict[str, Tensors]]  # of parameters, if a codec encodes what outer steps send


class OuterStep(UpdatePart):
    """The outer steps of one replica of a worker.

    Args:
        trained: the parameters that the worker trains, by name; live, with the common weights.
        collective: does the exchange.
        place: the run's seed and the worker, for the codec's random numbers.

    Attributes:
        spec: the interval, the delay, the rates and the codec.
    """

    entry = "outer"
    form = OuterState

    def __init__(
        self,
        spec: OuterSpec,
        trained: Mapping[str, nn.Parameter],
        collective: Collective,
        place: tuple[object, ...] = (),
    ) -> None:
        self.spec = spec
        self._place = (*place, "outer", collective.replica)
        self._collective, self._trained = collective, trained
        specs = {name: row_by_row(parameter) for name, parameter in trained.items()}
        dtypes = dict.fromkeys(parameter.dtype for parameter in trained.values())
        self._vectors = {
            str(dtype): Vector({name: specs[name] for name, p in trained.items() if p.dtype == dtype})
            for dtype in dtypes
        }
        self._common = {dtype: nn.Parameter(flat) for dtype, flat in self._live().items()}
        self._optimizer: torch.optim.Optimizer | None = None
        if self._common:
            momentum = spec.momentum
            parameters = list(self._common.values())
            self._optimizer = torch.optim.SGD(parameters, spec.lr, momentum, nesterov=momentum > 0)
        self._message = outer_message(spec.codec, specs) if spec.codec and specs else None
        self._memories: Memories = {}
        self._next_memories: Memories = {}  # when the exchange under way has ended
        self._since = 0  # the version at which the newest exchange began
        self._under_way: int | None = None  # the same, until it ends
        self._begun: dict[str, Tensor] = {}  # the weights when it began, if it has a delay
        self._read: dict[int, int] = {}  # checksums of minibatches that are not compared yet
        self._compared: tuple[int, int] = (0, 0)  # the first minibatch being compared, and how many

    @classmethod
    def of(cls, setting: WorkerSetting) -> Iterator[UpdatePart]:
        outer = setting.plan.outer
        if outer is not None and setting.collective is not None:
            yield cls(outer, setting.trained, setting.collective, (setting.options.seed, setting.worker))

    def due(self, version: int) -> bool:
        """Whether there is an outer step after this many updates."""
        return version % self.spec.every == 0

    def compare_batch(self, minibatch: int, number: int) -> None:
        """Outer steps compare the replicas' checksums."""
        self._read[minibatch] = number

    def apply(self, minibatch: int) -> None:
        """Make the outer step of the version that the optimizer has made, if there is one; waits for other replicas."""
        version = minibatch + 1
        if not self.due(version):
            return
        if not self.spec.delay:
            self._start(version)
        self._finish()
        if self.spec.delay:
            self._start(version)
            self._begun = self._live()

    def begin_meeting(self, version: int, buffers: Sequence[str]) -> None:
        """End the present exchange, and begin one for the updates since it began."""
        self._finish()
        if version > self._since:
            self._start(version)

    def end_meeting(self, version: int) -> None:
        """Make that outer step: afterwards all replicas have the same weights."""
        self._finish()

    def all_same(self, version: int) -> bool:
        """Whether all replicas have the same weights and buffers at the live version."""
        return self._since == version and self._under_way is None

    def made_by_all(self, version: int) -> int:
        """How many updates all replicas must have made if this one has made `version` updates."""
        return (version // self.spec.every - self.spec.delay) * self.spec.every

    def common(self) -> dict[str, Tensor]:
        """The weights that all replicas have in common, by name; live."""
        return self._by_name({dtype: common.detach() for dtype, common in self._common.items()})

    def state(self, version: int) -> Any:
        """What a replica needs to continue, except what all have in common.

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

    def load_momentum(self, momentum: Mapping[str, Tensor]) -> None:
        """Continue from what `momentum` gave."""
        for dtype, value in momentum.items():
            assert self._optimizer is not None
            common = self._common[dtype]
            self._optimizer.state[common]["momentum_buffer"] = value.to(common.device, copy=True)

    def load(self, states: Sequence[Any], version: int, same: bool) -> None:
        """The common weights have been loaded; under other cuts all replicas begin with them."""
        if not same or not states:
            self._since = version
            return
        state: OuterState = states[0]
        self._since, self._under_way = state["since"], state["under_way"]
        self._begun = {dtype: value.to(self._common[dtype].device) for dtype, value in state["begun"].items()}
        self._memories = {
            name: {key: value.to(self._trained[name].device) for key, value in memory.items()}
            for name, memory in state.get("memories", {}).items()
        }
        self._put(state["weights"])

    def begin(self) -> None:
        """Repeat the exchange that was in flight at the checkpoint, if there was one."""
        if self._under_way is not None:
            self._exchange(self._under_way, self._begun)

    def _live(self) -> dict[str, Tensor]:
        """Copies of the weights, by dtype, one vector each."""
        return {dtype: vector.joined(self._trained) for dtype, vector in self._vectors.items()}

    def _by_name(self, vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Views of vectors of weights, one for each dtype, by name."""
        views = [self._vectors[dtype].views(flat) for dtype, flat in vectors.items()]
        return {name: value for of_dtype in views for name, value in of_dtype.items()}

    def _put(self, vectors: Mapping[str, Tensor]) -> None:
        """Replace the live weights by these."""
        for name, value in self._by_name(vectors).items():
            self._trained[name].detach().copy_(value)

    def _start(self, version: int) -> None:
        self._exchange(version, self._live())
        read = [minibatch for minibatch in sorted(self._read) if minibatch < version]
        numbers = [self._read.pop(minibatch) for minibatch in read]
        self._compared = min(read, default=0), len(read)
        if numbers:
            self._collective.start_comparison((BATCHES, version), numbers)
        self._since = self._under_way = version

    def _exchange(self, version: int, weights: Mapping[str, Tensor]) -> None:
        moved = {dtype: self._common[dtype].detach() - flat for dtype, flat in weights.items()}
        replicas = self._collective.replicas
        if self._message is None:
            for dtype, flat in moved.items():
                self._collective.start_sum((f"outer {dtype}", version), flat, replicas)
            return
        values = self._by_name(moved)
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
        sums = self._by_name(found)
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
        first, count = self._compared
        if count:
            steps = f"steps {first + 1} to {version}"
            check_read_alike(self._collective, (BATCHES, version), steps, "train_data()")
        if self._optimizer is None:
            return
        self._optimizer.step()
        begun, self._begun = self._begun, {}
        live = self._live() if begun else {}
        for dtype, common in self._common.items():
            common.grad = None
            weights = common.detach()
            self._put({dtype: weights + (live[dtype] - begun[dtype]) if begun else weights})


class OuterMomentum(UpdatePart):
    """The momentum of outer steps, which all replicas have in common."""

    entry = "outer_momentum"
    form = Tensors
    alike = True

    def __init__(self, outer: OuterStep) -> None:
        self._outer = outer

    @classmethod
    def of(cls, setting: WorkerSetting) -> Iterator[UpdatePart]:
        if (outer := setting.part(OuterStep)) is not None:
            yield cls(outer)

    def state(self, version: int) -> Any:
        return self._outer.momentum()

    def load(self, states: Sequence[Any], version: int, same: bool) -> None:
        if same and states:
            self._outer.load_momentum(states[0])

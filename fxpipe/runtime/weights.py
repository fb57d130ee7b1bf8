"""One worker's weights: the parameters it owns, replicas of others', and what each action reads of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.errors import RunError, TaskError
from fxpipe.plan import ParameterSpec, Phase, Plan
from fxpipe.policy.predict import Predictor
from fxpipe.runtime.demand import PHASES, Demand, Message, Reading
from fxpipe.runtime.gradients import GradientSum
from fxpipe.runtime.layout import Pack
from fxpipe.runtime.transport import Transport

MakeOptimizer = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
MakeScheduler = Callable[[torch.optim.Optimizer], Any]
Key = tuple[int, int, int]  # owner, version, ahead


@dataclass
class _Copy:
    """Weights of one key, and how many more (phase, minibatch) pairs will read them."""

    tensors: dict[str, Tensor]
    uses: int


@dataclass
class _Part:
    """The `weights` argument of one function: what never changes stands in `weights` already."""

    weights: tuple[Any, ...]
    readings: list[Reading]
    held: int = -1
    tuple: tuple[Any, ...] = field(default=())


class WeightStore:
    """What one worker's forward and backward read, and where its gradients go.

    Args:
        initial: the initial values of all parameters the worker owns or reads, by name; given away.
        make_optimizer: called with the owned trained parameters, if there are any.
        make_scheduler: the learning-rate scheduler of that optimizer, or None; stepped after every update.
        keep_gradients: `gradients()` is wanted; otherwise they are freed right after the update.

    Attributes:
        parameters: the owned ones by name, live: the optimizer updates them in place.
        version: how many updates this worker has made.
        sum: takes the backward's gradients, for the next `update`.
    """

    def __init__(
        self,
        plan: Plan,
        worker: int,
        demand: Demand,
        transport: Transport,
        initial: Mapping[str, Tensor],
        make_optimizer: MakeOptimizer,
        make_scheduler: MakeScheduler | None = None,
        keep_gradients: bool = False,
    ) -> None:
        self.worker = worker
        self.demand = demand
        self.transport = transport
        self.version = 0
        self.microbatches = plan.microbatches
        self.keep_gradients = keep_gradients
        self.parameters: dict[str, nn.Parameter] = {
            p.name: nn.Parameter(initial[p.name], requires_grad=p.trained) for p in plan.owned(worker)
        }
        self.trained = [p.name for p in plan.owned(worker) if p.trained]
        self._index = {name: i for i, name in enumerate(self.trained)}
        self._live = [self.parameters[name] for name in self.trained]
        order = [self._index[demand.parameters[n].name] for n in plan.stages[worker].backward.gradients]
        storages = {p.untyped_storage().data_ptr() for p in self.parameters.values()}
        self.sum = GradientSum(self._live, order, storages)
        self.optimizer = make_optimizer([(n, self.parameters[n]) for n in self.trained]) if self.trained else None
        self._refuse_foreign_parameters()
        self.scheduler = make_scheduler(self.optimizer) if self.optimizer and make_scheduler else None
        if self.scheduler is not None and not callable(getattr(self.scheduler, "step", None)):
            raise TaskError(
                f"lr_scheduler() returned {type(self.scheduler).__name__}, which has no step()",
                hint="return a torch.optim.lr_scheduler, or None",
            )
        predicts = demand.policy.needs_prediction and self.optimizer is not None
        self.predictor = Predictor(self.optimizer, self._live) if predicts else None  # type: ignore[arg-type]
        self._readers = demand.readers(worker)
        self._packs: dict[tuple[str, ...], Pack] = {}
        self._copies: dict[Key, _Copy] = {}
        self._predicted: dict[int, dict[str, Tensor]] = {}
        self._parts = {phase: self._part(plan, phase, initial) for phase in PHASES}
        self._owner_lags = self._shared_lags()
        self._expected: dict[int, int] = {}
        self.start = 0
        self.stop: int | None = None
        self._initial = {n: t for n, t in initial.items() if n not in self.parameters and demand.parameters[n].trained}

    def begin(self, start: int, stop: int | None = None) -> None:
        """Begin a segment: the pipeline is empty, every owner is at version `start`.

        The replicas of version 0 are the initial weights; those of a later start are sent here.
        """
        assert self.version == start, f"worker {self.worker} is at version {self.version}, not {start}"
        self.start, self.stop = start, stop
        self._copies.clear()
        self._forget_all()
        for part in self._parts.values():
            part.held, part.tuple = -1, ()
        owners = {r.owner for part in self._parts.values() for r in part.readings} - {self.worker}
        self._expected = dict.fromkeys(owners, start - 1)
        if start > 0:
            self._send_replicas()
            return
        for owner in owners:
            for message in self.demand.messages(owner, self.worker, 0, 0, stop):
                tensors = {name: self._initial[name] for name in message.names}
                self._copies[owner, 0, message.ahead] = _Copy(tensors, message.uses)
            self._expected[owner] = 0
        self._initial = {}

    def expect(self, phase: Phase, minibatch: int) -> None:
        """Tell the transport which replicas an action will wait for."""
        for reading in self._parts[phase].readings:
            if reading.owner == self.worker:
                continue
            version = self.demand.version(reading, minibatch, self.start)
            while self._expected[reading.owner] < version:
                self._expected[reading.owner] += 1
                for message in self._messages(reading.owner, self._expected[reading.owner]):
                    size = self._pack(message.names).bytes
                    self.transport.expect_weights(reading.owner, message.version, message.ahead, size)

    def waits_for(self, phase: Phase, minibatch: int) -> list[Key]:
        """The replicas that an action reads and that have not been received yet."""
        keys = [self._key(r, minibatch) for r in self._parts[phase].readings if r.owner != self.worker]
        return [key for key in keys if key not in self._copies]

    def read(self, phase: Phase, minibatch: int) -> tuple[Any, ...]:
        """The `weights` argument for an action; waits for replicas. Microbatches read the same tensors."""
        part = self._parts[phase]
        if not part.readings:
            return part.weights
        if part.held != minibatch:
            weights = list(part.weights)
            for reading in part.readings:
                tensors = self._take(reading, minibatch)
                for name, position in zip(reading.names, reading.positions, strict=True):
                    weights[position] = tensors[name]
            part.held, part.tuple = minibatch, tuple(weights)
        return part.tuple

    def release(self, phase: Phase, minibatch: int) -> None:
        """The last microbatch's `phase` is over: forget what no later action reads."""
        part = self._parts[phase]
        part.held, part.tuple = -1, ()
        for reading in part.readings:
            key = self._key(reading, minibatch)
            if self._lives(reading, key[1]):
                if (phase, reading.lag) not in self._owner_lags:
                    self._forget(key[2])
                continue
            copy = self._copies[key]
            copy.uses -= 1
            if not copy.uses:
                del self._copies[key]

    def update(self, minibatch: int) -> None:
        """One optimizer step with the microbatches' mean gradient; then replicas of the new version go out.

        Raises:
            RunError: the user's optimizer or scheduler failed.
        """
        assert self.version == minibatch, f"update {self.version} by minibatch {minibatch}"
        self._keep_past()
        if self.optimizer is not None:
            for parameter, gradient in zip(self._live, self.sum.take_mean(self.microbatches), strict=True):
                parameter.grad = gradient
            self._step(minibatch)
            if not self.keep_gradients:
                for parameter in self._live:
                    parameter.grad = None
        self._forget_all()
        self.version += 1
        self._send_replicas()

    @property
    def lr(self) -> float | None:
        """The learning rate of the optimizer's first group; None on a worker that trains nothing."""
        return None if self.optimizer is None else float(self.optimizer.param_groups[0]["lr"])

    def gradients(self) -> dict[str, Tensor]:
        """The mean gradients of the last update, by parameter name (needs `keep_gradients`)."""
        found = {name: self.parameters[name].grad for name in self.trained}
        return {name: gradient.detach().clone() for name, gradient in found.items() if gradient is not None}

    def _step(self, minibatch: int) -> None:
        assert self.optimizer is not None
        try:
            if self.predictor:
                self.predictor.before_step()
            self.optimizer.step()
            if self.predictor:
                self.predictor.observe()
        except Exception as error:
            raise self._update_failed(error, minibatch, self.optimizer) from error
        try:
            if self.scheduler is not None:
                self.scheduler.step()
        except Exception as error:
            raise self._update_failed(error, minibatch, self.scheduler) from error

    def _update_failed(self, error: Exception, minibatch: int, what: object) -> RunError:
        return RunError(
            f"the update after step {minibatch + 1} failed on worker {self.worker}: {type(error).__name__}: {error}",
            where=f"{type(what).__name__}.step()",
            hint="it is called once after every update, without arguments",
        )

    def _refuse_foreign_parameters(self) -> None:
        """An optimizer over other tensors would train nothing here, and nobody would notice."""
        if self.optimizer is None:
            return
        own = {id(parameter) for parameter in self._live}
        foreign = [p for group in self.optimizer.param_groups for p in group["params"] if id(p) not in own]
        if foreign:
            raise TaskError(
                f"optimizer() holds {len(foreign)} parameters that it was not given: they are not the worker's own",
                hint="build it from named_parameters: [p for _, p in named_parameters]",
            )

    def _part(self, plan: Plan, phase: Phase, initial: Mapping[str, Tensor]) -> _Part:
        stage = plan.stages[self.worker]
        names = stage.forward.weights if phase == "F" else stage.backward.weights
        specs: list[ParameterSpec] = [self.demand.parameters[name] for name in names]
        weights = tuple(
            self.parameters[p.name] if p.owner == self.worker else None if p.trained else initial[p.name] for p in specs
        )
        readings = [
            reading
            for reading in self.demand.readings(self.worker, phase)
            if reading.owner != self.worker or reading.past or self.predictor
        ]
        return _Part(weights, readings)

    def _shared_lags(self) -> set[tuple[str, int]]:
        """Forward readings whose prediction the backward of the same minibatch reads again."""
        backward = {r.lag for r in self._parts["B"].readings if r.owner == self.worker and not r.past}
        return {("F", lag) for lag in backward}

    def _key(self, reading: Reading, minibatch: int) -> Key:
        version = self.demand.version(reading, minibatch, self.start)
        return (reading.owner, version, self.demand.ahead(reading, minibatch, version))

    def _lives(self, reading: Reading, version: int) -> bool:
        return reading.owner == self.worker and (version == self.version or not reading.past)

    def _take(self, reading: Reading, minibatch: int) -> Mapping[str, Tensor]:
        key = owner, version, ahead = self._key(reading, minibatch)
        if self._lives(reading, version):
            assert version == self.version, f"{reading} of {minibatch} wants {version}, live is {self.version}"
            return self._predict(reading.names, ahead)
        if key not in self._copies:
            assert owner != self.worker, f"{reading} of {minibatch}: version {version} was not kept"
            for message in self._messages(owner, version):
                if message.ahead == ahead:
                    block = self.transport.recv_weights(owner, version, ahead)
                    tensors = self._pack(message.names).unpack(block)
                    self._copies[key] = _Copy(dict(zip(message.names, tensors, strict=True)), message.uses)
        return self._copies[key].tensors

    def _predict(self, names: Sequence[str], ahead: int) -> Mapping[str, Tensor]:
        """The live weights, or their prediction, computed once a version."""
        if ahead == 0 or self.predictor is None:
            return self.parameters
        found = self._predicted.setdefault(ahead, {})
        missing = [name for name in names if name not in found]
        if missing:
            values = self.predictor.predict(ahead, [self._index[name] for name in missing])
            found.update(zip(missing, values, strict=True))
        return found

    def _forget(self, ahead: int) -> None:
        """Predictions that nobody reads any more; their memory serves the next ones."""
        found = self._predicted.pop(ahead, {})
        if found and self.predictor is not None:
            self.predictor.give_back(list(found.values()), [self._index[name] for name in found])

    def _forget_all(self) -> None:
        for ahead in list(self._predicted):
            self._forget(ahead)

    def _messages(self, owner: int, version: int) -> list[Message]:
        return self.demand.messages(owner, self.worker, version, self.start, self.stop)

    def _send_replicas(self) -> None:
        for reader in self._readers:
            for message in self.demand.messages(self.worker, reader, self.version, self.start, self.stop):
                tensors = self._predict(message.names, message.ahead)
                block = self._pack(message.names).pack([tensors[name] for name in message.names])
                self.transport.send_weights(reader, message.version, message.ahead, block)
        self._forget_all()

    def _keep_past(self) -> None:
        """Before the live version goes: copies for those own actions that will still read it."""
        for message in self._messages(self.worker, self.version):
            tensors = self._predict(message.names, message.ahead)
            copies = {name: tensors[name].detach().clone() for name in message.names}
            self._copies[self.worker, message.version, message.ahead] = _Copy(copies, message.uses)

    def _pack(self, names: tuple[str, ...]) -> Pack:
        if names not in self._packs:
            self._packs[names] = Pack([self.demand.parameters[name].tensor for name in names])
        return self._packs[names]

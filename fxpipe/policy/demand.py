"""Which weights every action reads, and so what every owner sends: pure functions of plan, schedule and policy.

Both ends of a weight edge compute the same messages from them, so workers never negotiate about weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fxpipe.plan.plan import ParameterSpec, Plan
from fxpipe.plan.spec import PHASES, Phase
from fxpipe.plan.urgency import turn_of
from fxpipe.policy.base import Policy, ahead_of, lag_of
from fxpipe.schedule.action import Action
from fxpipe.schedule.base import Schedule
from fxpipe.schedule.versions import versions_of

Reader = tuple[Phase, tuple[int, ...]]  # a phase and its lags: identifies what reads an owner's weights on one worker


@dataclass(frozen=True)
class WeightReads:
    """What one phase of a worker reads of one owner's trained parameters, all at the same lags.

    Attributes:
        lags: by microbatch: an action of minibatch m reads version max(start, m − lag), where `start` is the
            minibatch after the last flush.
        past: the weights are the worker's own, and some action reads a version after it was replaced, so copies are
            kept.
        names: the parameters.
        positions: their indices in the `weights` argument.
    """

    phase: Phase
    owner: int
    lags: tuple[int, ...]
    past: bool
    names: tuple[str, ...]
    positions: tuple[int, ...]

    @property
    def key(self) -> Reader:
        """Identifies it among the worker's reads of the owner."""
        return self.phase, self.lags


@dataclass(frozen=True)
class WeightMessage:
    """Weights of one version, predicted `ahead` updates, for one reader.

    Attributes:
        uses: how many actions read it, by `WeightReads.key`.
        by_reader: by the same keys, the names that these actions read, wherever the run ends.
    """

    version: int
    ahead: int
    uses: dict[Reader, int]
    by_reader: dict[Reader, tuple[str, ...]]

    @property
    def names(self) -> tuple[str, ...]:
        """All names, each once."""
        return tuple(dict.fromkeys(name for names in self.by_reader.values() for name in names))


class Demand:
    """The weights that every worker reads under a schedule and a policy.

    If the policy's backward keeps the weights of its forward, B reads the version that F saw: on its own worker or, if
    B's worker has no forward of that parameter, on the nearest worker that has one. If W is separate from B, W reads
    the version that its B reads.

    Raises:
        PolicyError: the policy asks for a version that does not exist yet.
    """

    def __init__(self, plan: Plan, schedule: Schedule, policy: Policy) -> None:
        self.plan = plan
        self.schedule = schedule
        self.policy = policy
        self.versions = versions_of(schedule)
        self.parameters: dict[str, ParameterSpec] = {n: p for p in plan.parameters for n in p.names}
        self._forwards: dict[str, list[int]] = {}
        for worker, stage in enumerate(plan.stages):
            for name in dict.fromkeys(self.parameters[n].name for n in stage.forward.weights):
                self._forwards.setdefault(name, []).append(worker)
        self._readings = {(w, ph): self._group(w, ph) for w in range(plan.workers) for ph in PHASES}

    def of_worker(self, worker: int) -> Demand:
        """The demand of one replica of a worker, if workers have different numbers of replicas; else this one.

        Its microbatches are those of a replica. It covers other workers' weights only if they do not depend on the
        microbatch. With a flush they never do; without one, `fxpipe.policy.recipe.choose` has refused to read any.
        """
        if not self.schedule.replicas:
            return self
        return Demand(self.plan, self.schedule.of_worker(worker), self.policy)

    def readings(self, worker: int, phase: Phase) -> tuple[WeightReads, ...]:
        """All trained weights that `worker` reads in `phase`, by owner and lag."""
        return self._readings[worker, phase]

    def readings_of(self, owner: int, reader: int) -> Iterator[WeightReads]:
        """What `reader` reads of `owner`'s trained weights, by phase."""
        return (r for phase in PHASES for r in self.readings(reader, phase) if r.owner == owner)

    def readers(self, owner: int) -> tuple[int, ...]:
        """The other workers that hold copies of `owner`'s trained parameters."""
        return tuple(
            worker for worker in range(self.plan.workers) if worker != owner and any(self.readings_of(owner, worker))
        )

    def turn(self, owner: int, reader: int) -> int:
        """The turn of the messages from an owner to a reader: the same for all, so that they keep their order.

        It is computed from their maximum size: all that the reader reads of the owner, whole.
        """
        names = {self.parameters[name].name for r in self.readings_of(owner, reader) for name in r.names}
        return turn_of("weights", sum(self.parameters[name].tensor.bytes for name in names))

    def delays(self, owner: int) -> dict[str, int]:
        """By parameter of `owner`: how many updates late its gradients are in steady state, at most."""
        delays: dict[str, int] = {}
        for worker in range(self.plan.workers):
            for reading in (r for r in self.readings(worker, "F") if r.owner == owner):
                for name in reading.names:
                    delays[name] = max(delays.get(name, 0), *reading.lags)
        return delays

    def reach(self, owner: int) -> int:
        """How many updates back any worker reads `owner`'s weights."""
        every = (r for w in range(self.plan.workers) for phase in PHASES for r in self.readings(w, phase))
        return max((lag for reading in every if reading.owner == owner for lag in reading.lags), default=0)

    def version(self, reading: WeightReads, action: Action, start: int) -> int:
        """How many updates the weights that an action reads have had; `start` is the minibatch after the last flush."""
        return max(start, action.minibatch - reading.lags[action.microbatch])

    def newest(self, action: Action, reader: int, owner: int, start: int) -> int:
        """The newest version of `owner`'s weights that an action on `reader` could read."""
        return self.versions.version(action, reader, owner, start)

    def ahead(self, reading: WeightReads, action: Action, version: int) -> int:
        """How many updates after `version` the policy predicts for an action.

        Raises:
            PolicyError: the policy's answer is invalid.
        """
        return ahead_of(self.policy, action, version, reading.owner, self.schedule)

    def messages(
        self, owner: int, reader: int, version: int, start: int, stop: int | None, since: int = 0
    ) -> list[WeightMessage]:
        """What `reader` needs of `owner`'s `version`: one message for each prediction distance, in rising order.

        Args:
            start: the minibatch after the caller's last flush; its version serves all minibatches of the warm-up.
            stop: the first minibatch that will not run; None while the end is unknown.
            since: the first minibatch that counts; earlier ones are over.

        With `reader == owner`: what its own actions read of `version`, in place while that is the live version.
        """
        uses: dict[int, dict[Reader, int]] = {}
        names: dict[int, dict[Reader, tuple[str, ...]]] = {}
        for reading in self.readings_of(owner, reader):
            for action in self._reads(reading, version, start):
                ahead = self.ahead(reading, action, version)
                names.setdefault(ahead, {})[reading.key] = reading.names
                if action.minibatch >= since and (stop is None or action.minibatch < stop):
                    of_reader = uses.setdefault(ahead, {})
                    of_reader[reading.key] = of_reader.get(reading.key, 0) + 1
        return [WeightMessage(version, ahead, uses[ahead], names[ahead]) for ahead in sorted(uses)]

    def _reads(self, reading: WeightReads, version: int, start: int) -> Iterator[Action]:
        """The actions that read `version`, in an endless run."""
        for microbatch, lag in enumerate(reading.lags):
            first = version if version == start else version + lag
            for minibatch in range(first, version + lag + 1):
                yield Action(reading.phase, minibatch, microbatch)

    def _group(self, worker: int, phase: Phase) -> tuple[WeightReads, ...]:
        places: dict[tuple[int, int | None], list[tuple[str, int]]] = {}
        for position, name in enumerate(self.plan.stages[worker].part(phase).weights):
            parameter = self.parameters[name]
            if parameter.trained:
                where = parameter.owner, self._forward_of(parameter, worker, phase)
                places.setdefault(where, []).append((parameter.name, position))
        groups: dict[tuple[int, tuple[int, ...]], list[tuple[str, int]]] = {}
        for (owner, forward), members in places.items():
            groups.setdefault((owner, self._lags(worker, phase, owner, forward)), []).extend(members)
        readings: list[WeightReads] = []
        for (owner, lags), members in sorted(groups.items()):
            newest = [self.versions.lag(phase, worker, owner, j) for j in range(len(lags))]
            past = owner == worker and any(lag > least for lag, least in zip(lags, newest, strict=True))
            members = sorted(members, key=lambda member: member[1])
            names, positions = zip(*members, strict=True)
            readings.append(WeightReads(phase, owner, lags, past, names, positions))
        return tuple(readings)

    def _lags(self, worker: int, phase: Phase, owner: int, forward: int | None) -> tuple[int, ...]:
        read: tuple[Phase, int] = ("F" if phase == "F" else "B", worker) if forward is None else ("F", forward)
        microbatches = range(self.schedule.microbatches)
        return tuple(lag_of(self.policy, self.versions, (phase, j, worker), owner, read) for j in microbatches)

    def _forward_of(self, parameter: ParameterSpec, worker: int, phase: Phase) -> int | None:
        """The worker whose forward's weights a backward reads; None if it reads those of its own worker."""
        if phase == "F" or not self.policy.keeps_forward:
            return None
        forwards = self._forwards.get(parameter.name, ())
        return min(forwards, key=lambda w: (abs(w - worker), w), default=None)

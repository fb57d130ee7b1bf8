"""Which weights every action reads, and therefore what every owner sends: pure functions of plan, schedule and policy.

Both ends of a weight edge compute the same messages from here, so that nothing about weights is ever negotiated.
"""

from __future__ import annotations

from dataclasses import dataclass

from fxpipe.plan import ParameterSpec, Phase, Plan
from fxpipe.policy.base import Policy
from fxpipe.schedule.base import Schedule
from fxpipe.schedule.versions import Versions

PHASES: tuple[Phase, Phase] = ("F", "B")


@dataclass(frozen=True)
class Reading:
    """What one phase of a worker reads of one owner's trained parameters, all at one lag.

    Attributes:
        lag: an action of minibatch m reads version max(start, m − lag).
        past: own weights of a version that is over when they are read (weight stashing): copies are kept.
        names: the parameters.
        positions: their places in the `weights` argument.
    """

    phase: Phase
    owner: int
    lag: int
    past: bool
    names: tuple[str, ...]
    positions: tuple[int, ...]


@dataclass(frozen=True)
class Message:
    """Weights of one version, predicted `ahead` updates, for `uses` (phase, minibatch) pairs of one reader."""

    version: int
    ahead: int
    names: tuple[str, ...]
    uses: int


class Demand:
    """The weights that every worker reads under a schedule and a policy.

    With a policy whose backward keeps the weights of its forward, B reads the version that F saw: on its own
    worker, or, where B's worker has no forward of that parameter, on the nearest worker that has.
    """

    def __init__(self, plan: Plan, schedule: Schedule, policy: Policy) -> None:
        self.plan = plan
        self.policy = policy
        self.versions = Versions(schedule)
        self.parameters: dict[str, ParameterSpec] = {n: p for p in plan.parameters for n in p.names}
        self._readings = {(w, ph): self._group(w, ph) for w in range(plan.workers) for ph in PHASES}

    def readings(self, worker: int, phase: Phase) -> tuple[Reading, ...]:
        """Everything trained that `worker` reads in `phase`, by owner and lag."""
        return self._readings[worker, phase]

    def readers(self, owner: int) -> tuple[int, ...]:
        """The other workers that hold replicas of `owner`'s trained parameters."""
        return tuple(
            worker
            for worker in range(self.plan.workers)
            if worker != owner and any(r.owner == owner for ph in PHASES for r in self.readings(worker, ph))
        )

    def version(self, reading: Reading, minibatch: int, start: int) -> int:
        """How many updates the weights have had that an action of `minibatch` reads."""
        return max(start, minibatch - reading.lag)

    def ahead(self, reading: Reading, minibatch: int, version: int) -> int:
        """How many updates past `version` the policy predicts for it."""
        return self.policy.ahead(
            phase=reading.phase,
            minibatch=minibatch,
            version=version,
            owner=reading.owner,
            workers=self.plan.workers,
        )

    def messages(self, owner: int, reader: int, version: int, start: int, stop: int | None) -> list[Message]:
        """What `reader` needs of `owner`'s `version`: one message for each prediction distance, in rising order.

        Args:
            start: the minibatch the pipeline began with; its version serves all minibatches of the warm-up.
            stop: the first minibatch that never comes; None while there is no end in sight.

        With `reader == owner`: the copies a worker must keep for itself once `version` is over.
        """
        names: dict[int, dict[str, None]] = {}
        uses: dict[int, int] = {}
        for reading in (r for phase in PHASES for r in self.readings(reader, phase)):
            if reading.owner != owner or (reader == owner and not reading.past):
                continue
            first = start if version == start else version + reading.lag
            if reader == owner:  # while the version lives, it is read in place
                first = max(first, version + self.versions.lag(reading.phase, owner, owner) + 1)
            for minibatch in range(first, version + reading.lag + 1):
                if stop is not None and minibatch >= stop:
                    break
                ahead = self.ahead(reading, minibatch, version)
                names.setdefault(ahead, {}).update(dict.fromkeys(reading.names))
                uses[ahead] = uses.get(ahead, 0) + 1
        return [Message(version, ahead, tuple(names[ahead]), uses[ahead]) for ahead in sorted(names)]

    def _group(self, worker: int, phase: Phase) -> tuple[Reading, ...]:
        groups: dict[tuple[int, int, bool], list[tuple[str, int]]] = {}
        for position, name in enumerate(self._weights(worker, phase)):
            parameter = self.parameters[name]
            if parameter.trained:
                lag = self._lag(parameter, worker, phase)
                past = parameter.owner == worker and lag > self.versions.lag(phase, worker, worker)
                groups.setdefault((parameter.owner, lag, past), []).append((parameter.name, position))
        return tuple(
            Reading(phase, owner, lag, past, tuple(n for n, _ in members), tuple(i for _, i in members))
            for (owner, lag, past), members in sorted(groups.items())
        )

    def _lag(self, parameter: ParameterSpec, worker: int, phase: Phase) -> int:
        if phase == "B" and self.policy.backward_keeps_forward:
            forwards = [w for w in range(self.plan.workers) if self._reads_forward(w, parameter)]
            if forwards:
                nearest = min(forwards, key=lambda w: (abs(w - worker), w))
                return self.versions.lag("F", nearest, parameter.owner)
        return self.versions.lag(phase, worker, parameter.owner)

    def _reads_forward(self, worker: int, parameter: ParameterSpec) -> bool:
        return not set(parameter.names).isdisjoint(self.plan.stages[worker].forward.weights)

    def _weights(self, worker: int, phase: Phase) -> tuple[str, ...]:
        stage = self.plan.stages[worker]
        return stage.forward.weights if phase == "F" else stage.backward.weights

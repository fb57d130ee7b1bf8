"""A policy: which weights each forward and each backward sees, and a picture of that."""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass, fields
from typing import ClassVar

from fxpipe.errors import PolicyError
from fxpipe.plan.spec import Phase
from fxpipe.policy.repair import REPAIRS, Repair
from fxpipe.schedule.action import Action
from fxpipe.schedule.base import Schedule
from fxpipe.schedule.order import label_of, picture_of, play, read, timeline
from fxpipe.schedule.versions import Versions, versions_of


@dataclass(frozen=True)
class Policy(ABC):
    """Which weights each forward and each backward sees.

    The schedule decides the newest version of an owner's weights that an action can read (`schedule.Versions`). The
    policy decides which version it reads (`lag`) and how far ahead the weights are predicted from it (`ahead`). The
    same functions serve a worker's own weights and weight copies.

    The other fields of a policy are its options, all of them switches: `pipeoptim+keep` is `PipeOptim(keep=True)`. Your
    own policy is a class in a file, decorated with `@register` (`examples/own_policy.py`).

    Attributes:
        repairs: of the updates, in the order of `fxpipe.policy.repair`: `lwp+ef` has error feedback.
    """

    name: ClassVar[str]
    """Its name on the command line."""
    keeps_forward: ClassVar[bool] = False
    """A backward reads the same tensors as its forward, also of a forward on another worker. May be a property."""
    predicts: ClassVar[bool] = False
    """Whether some actions see predicted weights. May be a property."""
    weight_form: ClassVar[bool] = False
    """Whether predictions repeat the last update itself, with any optimizer (`fxpipe.policy.optimizers.predict`)."""
    with_flush: ClassVar[bool] = False
    """Whether it also makes sense with a flush, where no weights are stale."""
    one_pipeline: ClassVar[bool] = False
    """Whether an action's weights depend on what its microbatch saw on other workers."""

    repairs: tuple[Repair, ...] = ()

    def lag(self, newest: Versions, phase: Phase, microbatch: int, reader: int, owner: int) -> int:
        """How many updates late an action on `reader` reads `owner`'s weights: by default the least possible.

        A policy may return more than `newest.lag`, never less.
        """
        return newest.lag(phase, reader, owner, microbatch)

    def ahead(self, action: Action, version: int, owner: int, schedule: Schedule) -> int:
        """How many updates past `version` to predict `owner`'s weights for `action`; ≥ 0."""
        return 0

    def read_as(self, action: Action) -> Action:
        """The action whose weights an action reads: a backward may read its forward's; W reads those of its B."""
        if action.phase != "F" and self.keeps_forward:
            return Action("F", action.minibatch, action.microbatch)
        return Action("B", action.minibatch, action.microbatch) if action.phase == "W" else action

    def check(self, schedule: Schedule) -> None:
        """Refuse a schedule with which this policy makes no sense.

        Raises:
            PolicyError: says why.
        """
        if schedule.synchronous and (self.repairs or not self.with_flush):
            raise PolicyError(
                f"policy '{self}' makes no sense with schedule '{schedule.name}', "
                "which updates after a flush, so that weights are never stale",
                hint="use policy latest or schedule async",
            )

    @classmethod
    def options(cls) -> tuple[str, ...]:
        """What may follow this policy after a plus: the repairs and its own switches."""
        return (*REPAIRS, *(field.name for field in fields(cls) if field.name != "repairs"))

    def __str__(self) -> str:
        """The policy as on the command line: `pipeoptim+keep`; `policy.make` reads it."""
        chosen = [repair.name for repair in self.repairs]
        return "+".join([self.name, *chosen, *(o for o in self.options() if o not in REPAIRS and getattr(self, o))])


@dataclass(frozen=True)
class PredictingPolicy(Policy):
    """A policy whose actions see weights predicted by the optimizer's own rule."""

    predicts: ClassVar[bool] = True


def lag_of(
    policy: Policy,
    newest: Versions,
    action: tuple[Phase, int, int],
    owner: int,
    read_as: tuple[Phase, int] | None = None,
) -> int:
    """How many updates late an action reads `owner`'s weights, by `policy.lag`.

    Args:
        action: its phase, microbatch and worker.
        read_as: the phase and the worker whose weights it reads; None means its own.

    Raises:
        PolicyError: that version does not exist yet.
    """
    phase, microbatch, worker = action
    least = newest.lag(phase, worker, owner, microbatch)
    of_phase, reader = read_as or (phase, worker)
    lag = policy.lag(newest, of_phase, microbatch, reader, owner)
    if lag < least:
        raise PolicyError(
            f"policy '{policy}' asks for {phase} on worker {worker} to read worker {owner}'s weights "
            f"{lag} updates late, but with schedule '{newest.schedule.name}' the least is {least}",
            hint="lag() must not be below newest.lag()",
        )
    return lag


def ahead_of(policy: Policy, action: Action, version: int, owner: int, schedule: Schedule) -> int:
    """How many updates past `version` `owner`'s weights are predicted for `action`, by `policy.ahead`.

    Raises:
        PolicyError: fewer than 0, or any if the policy does not predict.
    """
    ahead = policy.ahead(policy.read_as(action), version, owner, schedule)
    if ahead < 0 or (ahead and not policy.predicts):
        raise PolicyError(
            f"policy '{policy}' asks for version {version} of worker {owner}'s weights predicted "
            f"{ahead} updates ahead for {action}",
            hint="ahead() must return 0, or more if the class says `predicts = True`",
        )
    return ahead


def sees(policy: Policy, schedule: Schedule, minibatches: int) -> str:
    """The schedule's grid, with the version of its worker's own weights that each action sees; see `sight_rows`.

    Raises:
        PolicyError: the policy refuses the schedule, or asks for weights that do not exist.
        ScheduleError: the schedule is unlawful or has no fixed lags.
    """
    return picture_of(schedule, sight_rows(policy, schedule, minibatches))


def sight_rows(policy: Policy, schedule: Schedule, minibatches: int) -> list[list[str]]:
    """A row of cells for each rank: its workers' actions, each with its version of own weights; `..` for waiting.

    `F3@1+2` is the forward of minibatch 3 with the weights after 1 update, predicted 2 updates ahead.

    Raises:
        PolicyError: the policy refuses the schedule, or asks for weights that do not exist.
        ScheduleError: the schedule is unlawful or has no fixed lags.
    """
    policy.check(schedule)
    versions, plain = versions_of(schedule), label_of(schedule)

    def label(worker: int, action: Action) -> str:
        version, ahead = sight(policy, versions, action, worker)
        return f"{plain(worker, action)}@{version}" + (f"+{ahead}" if ahead else "")

    return timeline(schedule, play(schedule, read(schedule, minibatches)), label)


def sight(policy: Policy, versions: Versions, action: Action, worker: int) -> tuple[int, int]:
    """The version of its own weights that `action` on `worker` reads, and how far ahead of it they are predicted.

    Raises:
        PolicyError: the policy asks for weights that do not exist.
    """
    reads = policy.read_as(action).phase, worker
    version = max(
        0, action.minibatch - lag_of(policy, versions, (action.phase, action.microbatch, worker), worker, reads)
    )
    return version, ahead_of(policy, action, version, worker, versions.schedule)

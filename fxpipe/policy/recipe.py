"""The recipe of a run: its schedule, its policy, and what follows from them."""

from __future__ import annotations

from dataclasses import dataclass

from fxpipe import policy as policies
from fxpipe import schedule as schedules
from fxpipe.errors import PolicyError, ScheduleError
from fxpipe.plan.plan import Plan
from fxpipe.policy.base import Policy
from fxpipe.policy.demand import Demand
from fxpipe.schedule.base import Schedule


@dataclass(frozen=True)
class Recipe:
    """How a plan is run: the schedule, the policy, and what follows from them for the weights of a run."""

    schedule: Schedule
    policy: Policy
    demand: Demand

    def of_worker(self, worker: int) -> Recipe:
        """The recipe of one replica of a worker, if workers have different numbers of replicas; else this one."""
        if not self.schedule.replicas:
            return self
        demand = self.demand.of_worker(worker)
        return Recipe(demand.schedule, self.policy, demand)


def choose(plan: Plan, schedule: str | None = None, policy: str | Policy | None = None) -> Recipe:
    """The schedule and policy asked for, by default the plan's; another schedule brings its own default policy.

    Raises:
        ScheduleError, PolicyError: an unknown name; a schedule for other workers; a combination that makes no sense; a
            separate W, if the stages have no function for it; without a flush, a policy or tied weights that cannot
            work with different numbers of replicas.
    """
    order = schedules.of_plan(plan, schedule)
    if order.weights_apart and not plan.weights_apart:
        name = order.name if order.name in schedules.SCHEDULES else "FILE.csv"
        raise ScheduleError(
            f"schedule '{order.name}' has separate weight gradients (W), and these stages make them in their backward",
            hint=f"compile the model for it: fxpipe compile MODEL -n {plan.ranks} --schedule {name}",
        )
    if policy is None:
        policy = plan.policy if order.name == plan.schedule else policies.default_for(order)
    chosen = policies.make(policy) if isinstance(policy, str) else policy
    chosen.check(order)
    if plan.sharded:
        check_shares(chosen)
    demand = Demand(plan, order, chosen)
    refuse_crossing(plan, demand)
    return Recipe(order, chosen, demand)


def refuse_crossing(plan: Plan, demand: Demand) -> None:
    """Refuse what depends on the versions that an action sees on other workers, if they are unknown: without a
    flush, if workers have different numbers of replicas.

    Raises:
        ScheduleError: a worker reads another worker's weights.
        PolicyError: the policy follows a microbatch from worker to worker.
    """
    if not demand.schedule.replicas or demand.schedule.synchronous:
        return
    numbers = ", ".join(map(str, plan.replicas))
    hint = f"use another policy, --schedule 1f1b, or one number of replicas for all workers (--dp R), not {numbers}"
    if demand.policy.one_pipeline:
        what = f"policy '{demand.policy}' follows a microbatch through one pipeline: with {numbers} replicas they cross"
        raise PolicyError(what, hint=hint)
    for owner in range(plan.workers):
        for reader in demand.readers(owner):
            raise ScheduleError(
                f"with {numbers} replicas and schedule '{demand.schedule.name}', worker {reader} reads weights of "
                f"worker {owner}, and its replicas would see different versions",
                hint="use --schedule 1f1b, or --cuts same if no weights are tied",
            )


def check_shares(policy: Policy) -> None:
    """Refuse a policy that needs the optimizer's state of all parameters of a worker.

    Raises:
        PolicyError: it predicts weights, or corrects steps.
    """
    if policy.predicts:
        what = "predicts weights, for which every replica needs the velocity of every parameter"
    elif not all(repair.shares for repair in policy.repairs):
        what = "corrects the steps of late gradients, for which every replica needs the steps of every parameter"
    else:
        return
    raise PolicyError(
        f"policy '{policy}' {what}; with --shard optimizer each has only its own share",
        hint="use policy latest or stash, also with a synchronous schedule, or compile without --shard",
    )

"""The facts of a build as one dict of plain JSON, which `inspect --json` prints and the report's page contains.

Times are milliseconds unless the name says seconds, sizes are bytes, and workers are numbers. Modules and nodes are
referred to by their row. A module's `forward` and `backward` are rows of worker, milliseconds and nodes, and W is part
of backward. A unit's `apart` says whether its forward, backward and W are not all on one worker; a module's counts such
units.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

import fxpipe
from fxpipe.inspection.modules import ModuleTree, node_table, unit_rows
from fxpipe.inspection.sentences import evaluation_facts, microbatch_facts, outer_facts, shape_facts
from fxpipe.inspection.subject import Subject
from fxpipe.inspection.timeline import grid_rows, outlook
from fxpipe.inspection.workers import balance_rows, edge_rows, worker_rows
from fxpipe.observe.rates import samples_of
from fxpipe.passes.analysis.summary import Traffic
from fxpipe.plan.plan import Plan, holder_of
from fxpipe.planner.candidates import PINNED
from fxpipe.planner.separate_cuts import why_shared
from fxpipe.policy import POLICIES
from fxpipe.policy.recipe import Recipe, choose
from fxpipe.schedule.graph import graph_of_edges

Facts = dict[str, Any]


def facts(
    subject: Subject, *, schedule: str | None = None, policy: str | None = None, run: dict[str, Any] | None = None
) -> Facts:
    """All facts of a build under its schedule and policy, or those of the run, or others; another schedule brings its
    default policy."""
    recipe = recipe_of(subject, schedule, policy, run)
    tree = ModuleTree(subject)
    forecast, timeline = (None, None) if recipe is None else outlook(subject, recipe)
    traffic = None if recipe is None else Traffic(subject.plan, recipe.demand)
    partitions = balance_rows(subject, recipe)
    efficiency = next((row["efficiency"] for row in partitions if row["chosen"]), None)
    return {
        "fxpipe": fxpipe.__version__,
        "build": {**build_facts(subject), "efficiency": efficiency},
        "modules": tree.rows,
        "nodes": node_table(subject, tree),
        "units": unit_rows(subject),
        "workers": worker_rows(subject, recipe, traffic),
        "edges": edge_rows(subject, traffic),
        "partitions": partitions,
        "schedules": [asdict(row) for row in subject.costs.schedules],
        "forecast": forecast,  # None, as the timeline, if the policy is defined in the model file
        "timeline": timeline,
        "grid": grid_facts(subject, recipe, run),
        "run": run,
    }


def recipe_of(
    subject: Subject, schedule: str | None, policy: str | None, run: dict[str, Any] | None = None
) -> Recipe | None:
    """How the build is run; None if the policy is defined in the model file, which is not imported here."""
    policy_name, plan = policy, subject.plan
    if (schedule, policy) == (None, None):
        schedule, policy_name = _ran_with(run)
    if policy_name is None and schedule in (None, plan.schedule):
        policy_name = plan.policy
    if policy is None and policy_name is not None and policy_name.split("+")[0] not in POLICIES:
        return None
    return choose(plan, schedule, policy_name)


def _ran_with(run: dict[str, Any] | None) -> tuple[str | None, str | None]:
    return (None, None) if run is None else (run.get("schedule"), run.get("policy"))


def build_facts(subject: Subject) -> Facts:
    """The build as a whole."""
    plan, costs = subject.plan, subject.costs
    cuts = costs.partitions[-1].mode if costs.partitions else PINNED
    return {
        "folder": None if subject.folder is None else str(subject.folder),
        "model": None if subject.model is None else subject.model.name,
        "digest": plan.digest,
        "workers": plan.workers,
        "ranks": plan.ranks,
        "replicas": list(plan.replicas),
        "outer": None if plan.outer is None else asdict(plan.outer),
        "outer_step": outer_facts(plan),
        "microbatches": plan.microbatches,
        "schedule": plan.schedule,
        "policy": plan.policy,
        "autocast": plan.precision.autocast,
        "params": plan.precision.params,
        "codec": plan.codec,
        "device": plan.device,
        "torch": plan.torch,
        "samples": samples_of(plan),
        "loss_worker": plan.loss.worker,
        "graph": [list(firsts) for firsts in graph_of_edges(plan.edges, plan.workers)],  # empty for a chain
        "cuts": cuts,
        "cuts_refused": why_shared(costs.partitions, subject.profile) if costs.partitions else "",
        "costs": "measured" if subject.measured else "computed",
        "speeds": [] if set(subject.costs.speeds) <= {1.0} else list(subject.costs.speeds),
        "links": costs.links.to_row(),
        "optimizer_bytes": costs.optimizer_bytes,
        "packed": packed_bytes(plan),
        "microbatch_loss": microbatch_facts(plan),
        "shapes": shape_facts(plan),
        "padding": [asdict(rule) for rule in plan.padding],
        "evaluation": evaluation_facts(plan),
        "settings": {row.name: asdict(row) for row in plan.model_file.settings},
        "arguments": list(plan.model_file.given_arguments),
        "passes": list(subject.passes),
        "edited": list(subject.edited),
        "stale": list(subject.stale),
    }


def packed_bytes(plan: Plan) -> dict[str, int]:
    """By the form of packed weights, their bytes, with what says how they are packed."""
    forms = {name: p.packed for p in plan.parameters if p.packed for name in p.names}
    total = Counter[str]()
    for p in plan.parameters:
        total.update({p.packed: p.tensor.bytes} if p.packed else {})
    for b in plan.buffers:
        holder = holder_of(b.names, forms)
        total.update({forms[holder]: b.tensor.bytes} if holder else {})
    return dict(total)


def grid_facts(subject: Subject, recipe: Recipe | None, run: dict[str, Any] | None = None) -> Facts:
    """Which weights each action sees under the schedule and the policy."""
    if recipe is None:
        schedule, policy = _ran_with(run)
        return {"schedule": schedule or subject.plan.schedule, "policy": policy or subject.plan.policy, "rows": []}
    return {"schedule": recipe.schedule.name, "policy": str(recipe.policy), "rows": grid_rows(recipe)}

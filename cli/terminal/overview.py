"""What `fxpipe inspect` prints of a build: header, module tree, workers, edges, and what a run left."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from itertools import chain
from typing import Any

from fxpipe.cli.output import print_columns, print_text
from fxpipe.cli.terminal.module_tree import print_modules
from fxpipe.cli.terminal.run_section import print_run
from rich.console import Console

from fxpipe.inspection import tables
from fxpipe.inspection.codecs import outer_text
from fxpipe.inspection.evaluation import evaluation_text
from fxpipe.inspection.formats import TimeUnit, number
from fxpipe.messages import plain
from fxpipe.plan.spec import OuterSpec
from fxpipe.planner.quantity import size
from fxpipe.schedule.graph import graph_text

Facts = dict[str, Any]


def print_overview(facts: Facts, console: Console, depth: int | None = None, edges: bool = False) -> None:
    """Everything, in order.

    Args:
        depth: of the module tree.
        edges: whether every edge gets its line.
    """
    print_header(facts, console)
    console.print()
    print_modules(facts["modules"], console, depth)
    console.print()
    print_workers(facts, console)
    console.print()
    print_edges(facts["edges"], console, edges)
    if facts["run"] is not None:
        console.print()
        print_run(facts, console)
    console.print()
    print_hints(facts, console)


def print_header(facts: Facts, console: Console) -> None:
    """What the build is, and its forecast."""
    build, forecast = facts["build"], facts["forecast"]
    count, parts = build["workers"], build["microbatches"]
    names = [name for name in (build["folder"], build["model"]) if name]
    on = f" on {build['ranks']} process{'es' if build['ranks'] > 1 else ''}" if build["ranks"] < count else ""
    what = [*names, f"{count} worker{'s' if count > 1 else ''}{on}", build["device"]]
    what += [build["autocast"]] if build["autocast"] else []
    what += [f"{build['params']} parameters"] if build["params"] else []
    what += [f"codec {build['codec']}"] if build["codec"] != "none" else []
    _line(console, what)
    efficiency = "" if build["efficiency"] is None else f", {build['efficiency']:.3f} of ideal"
    minibatch = f"{build['samples']} samples in {parts} microbatch{'es' if parts > 1 else ''}"
    _line(console, [build["schedule"], build["policy"], minibatch])
    speeds = [f"speeds {', '.join(f'{speed:g}' for speed in build['speeds'])}"] if build["speeds"] else []
    _line(console, [f"cuts {build['cuts']}{efficiency}", f"times {build['costs']}", *speeds])
    if text := graph_text(tuple(map(tuple, build["graph"]))):
        print_text(console, text)
    named = build["settings"].items()
    given = [f"{name} {row['value']}{' (captured)' if row['captured'] else ''}" for name, row in named]
    if given or build["arguments"]:
        own = [f"settings {', '.join(given)}"] if given else []
        _line(console, own + ([f"arguments {' '.join(build['arguments'])}"] if build["arguments"] else []))
    if evaluation := evaluation_text(build["evaluation"]):
        print_text(console, evaluation)
    changed = [f"edited: {', '.join(build['edited'])}"] if build["edited"] else []
    changed += [f"stale: {', '.join(build['stale'])}"] if build["stale"] else []
    if changed:
        print_text(console, " · ".join(changed), "bold yellow")
    if forecast is not None:
        period = TimeUnit([forecast["milliseconds"]])
        other = (forecast["schedule"], forecast["policy"]) != (build["schedule"], build["policy"])
        under = f" under {forecast['schedule']} · {forecast['policy']}" if other else ""
        _line(
            console,
            [
                f"forecast{under}: {number(forecast['samples_per_second'])} samples/s",
                f"{period(forecast['milliseconds'])} {period.unit} a minibatch",
                f"bubble {100 * forecast['bubble']:.0f} %",
            ],
        )


def _line(console: Console, parts: Sequence[str]) -> None:
    print_text(console, " · ".join(parts))


def print_workers(facts: Facts, console: Console) -> None:
    """A row for each worker, and notes below the table."""
    print_columns(tables.workers(facts), console)
    if facts["build"]["costs"] == "measured":
        print_text(console, "modules add up their operators; workers were timed as they run")
    if facts["build"]["speeds"]:
        print_text(console, "times of modules are for a worker of speed 1")
    for w in facts["workers"]:
        if w["buckets"]:
            print_text(console, _buckets(w, facts["build"]["replicas"][w["worker"]]))
    if facts["build"]["outer"]:
        outer, count = OuterSpec(**facts["build"]["outer"]), facts["build"]["replicas"][0]
        sent = f"; {outer_text(step)}" if (step := facts["build"]["outer_step"]) else ""
        print_text(console, f"{count} replicas of each worker train separately: {outer}{sent}")
    edited = [w["file"] for w in facts["workers"] if w["edited"]]
    if edited:
        print_text(console, f"* {', '.join(edited)}: edited since the compile", "bold yellow")


def _buckets(worker: Facts, replicas: int) -> str:
    """What a worker's replicas add up, in words."""
    sizes = [bucket["bytes"] for bucket in worker["buckets"]]
    several = f" in {len(sizes)} buckets" if len(sizes) > 1 else ""
    shares = " and share out the update" if any(bucket["updaters"] for bucket in worker["buckets"]) else ""
    what = f"{replicas} replicas, which add up {size(sum(sizes))} of gradients{several}{shares}"
    return f"worker {worker['worker']}: {what}"


def print_edges(edges: Sequence[Facts], console: Console, every: bool = False) -> None:
    """A row for each edge, kind by kind; if a kind has many, one row for all between the same workers."""
    if not edges:
        console.print("nothing crosses workers")
        return
    table = tables.edges(edges, every)
    print_columns(table, console)
    console.print("values cross once a microbatch, weights once an update")
    if len(table.rows) < len(edges):
        print_text(console, "edges of one kind between the same workers are summed up; --edges shows each")


def print_hints(facts: Facts, console: Console) -> None:
    """Commands that show more of the build."""
    build = facts["build"]
    target = build["folder"] or build["model"] or "BUILD"
    values = (edge["name"] for edge in facts["edges"] if edge["kind"] in ("activation", "saved", "gradient"))
    parameters = (name for worker in facts["workers"] for name in worker["owned_names"])
    name = plain(next(chain(values, parameters), ""))
    hints = [
        (f"--stage {build['workers'] - 1}", "a stage's code"),
        *([(f"--node {shlex.quote(name)}", "where a value comes from and goes to")] if name else []),
        (f"--schedule {facts['grid']['schedule']}", "the weights that every action sees"),
        ("--html report.html", "all of it on a page"),
    ]
    console.print(f"more: fxpipe inspect {plain(target)} …")
    width = max(len(option) for option, _ in hints)
    for option, what in hints:
        console.print(f"  {option:<{width}}  {what}")

"""What `fxpipe inspect` prints of a build: its parts, what a run left, and which weights its actions see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import accumulate

from rich.console import Console
from rich.text import Text

from fxpipe.cli.output import echo, mark, print_columns, print_text
from fxpipe.cli.terminal.module_tree import print_modules
from fxpipe.inspection import tables
from fxpipe.inspection.report.marks import colour
from fxpipe.inspection.sentences import cuts_text, evaluation_text, outer_text
from fxpipe.inspection.table import Json, TimeUnit, number
from fxpipe.inspection.tables import moves
from fxpipe.inspection.timeline import explained
from fxpipe.messages import plain
from fxpipe.observe.progress import held_out
from fxpipe.observe.rates import rates_text, steps_made
from fxpipe.plan.cost_records import ScheduleForecast
from fxpipe.plan.mesh import OuterSpec
from fxpipe.planner.quantity import size
from fxpipe.schedule.graph import graph_text
from fxpipe.schedule.order import IDLE
from fxpipe.search import counted


def print_overview(facts: Json, console: Console, depth: int | None = None, edges: bool = False) -> None:
    """Everything, in order: the module tree down to `depth`, and a line for every edge if `edges`."""
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


def print_header(facts: Json, console: Console) -> None:
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
    minibatch = f"{build['samples']} samples in {parts} microbatch{'es' if parts > 1 else ''}"
    _line(console, [build["schedule"], build["policy"], minibatch])
    speeds = [f"speeds {', '.join(f'{speed:g}' for speed in build['speeds'])}"] if build["speeds"] else []
    cuts = cuts_text(build["cuts"], facts["partitions"], build["cuts_refused"])
    _line(console, [f"cuts {cuts}", f"times {build['costs']}", *speeds])
    if text := graph_text(tuple(map(tuple, build["graph"]))):
        print_text(console, text)
    named = build["settings"].items()
    settings = [f"{name} {row['value']}{' (captured)' if row['captured'] else ''}" for name, row in named]
    if settings or build["arguments"]:
        texts = [f"settings {', '.join(settings)}"] if settings else []
        _line(console, texts + ([f"arguments {' '.join(build['arguments'])}"] if build["arguments"] else []))
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


def print_workers(facts: Json, console: Console) -> None:
    """A row for each worker, and notes below the table."""
    print_columns(tables.workers(facts), console)
    if facts["build"]["costs"] == "measured":
        print_text(console, "modules add up their operators; workers were timed as they run")
    if facts["build"]["speeds"]:
        print_text(console, "times of modules are for a worker of speed 1")
    for form, held in facts["build"]["packed"].items():
        print_text(console, f"packed as {form}: {size(held)}")
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


def _buckets(worker: Json, replicas: int) -> str:
    """What a worker's replicas add up, in words."""
    sizes = [bucket["bytes"] for bucket in worker["buckets"]]
    several = f" in {len(sizes)} buckets" if len(sizes) > 1 else ""
    shares = " and share out the update" if any(bucket["updaters"] for bucket in worker["buckets"]) else ""
    what = f"{replicas} replicas, which add up {size(sum(sizes))} of gradients{several}{shares}"
    return f"worker {worker['worker']}: {what}"


def print_edges(edges: Sequence[Json], console: Console, every: bool = False) -> None:
    """A row for each edge, kind by kind; if a kind has many, one row for all between the same workers."""
    if not edges:
        console.print("nothing crosses workers")
        return
    table = tables.edges(edges, every)
    print_columns(table, console)
    console.print("values cross once a microbatch, weights once an update")
    if len(table.rows) < len(edges):
        print_text(console, "edges of one kind between the same workers are summed up; --edges shows each")


def print_hints(facts: Json, console: Console) -> None:
    """Commands that show more of the build."""
    build = facts["build"]
    target = build["folder"] or build["model"] or "BUILD"
    hints = [
        (f"--stage {build['workers'] - 1}", "a stage's code"),
        (f"--schedule {facts['grid']['schedule']}", "the weights that every action sees"),
        ("--html report.html", "all of it on a page"),
    ]
    console.print(f"more: fxpipe inspect {plain(target)} …")
    width = max(len(option) for option, _ in hints)
    for option, what in hints:
        console.print(f"  {option:<{width}}  {what}")


def print_run(facts: Json, console: Console) -> None:
    """Throughput, bubble, efficiency, how busy the workers were, where time was lost, and which files are missing."""
    run = facts["run"]
    print_text(console, " · ".join([f"run {run['folder']}", *_settings(run)]))
    if run.get("samples_per_second") is not None:
        parts = rates_text(run).split("  ")
        if run.get("efficiency") is not None:
            parts.append(f"{100 * run['efficiency']:.0f} % of the forecast")
        if run.get("bubble") is not None:
            parts.append(f"bubble {100 * run['bubble']:.0f} %")
        console.print(" · ".join(parts))
    losses = [loss for loss in run["metrics"]["loss"] if loss is not None]
    if losses:
        console.print(f"loss {losses[0]:.4g} → {losses[-1]:.4g}")
    for name, value in (run.get("last_metrics") or {}).items():
        print_text(console, f"{name} {'–' if value is None else f'{value:.4g}'} in the last step")
    if scaling := run.get("loss_scaling"):
        console.print(f"loss scale {scaling['scale']:g}, {scaling['skipped_steps']} steps skipped")
    for evaluation in run["evaluations"][-1:]:
        print_text(console, held_out(evaluation["metrics"]))
    workers = run.get("workers") or []
    if workers:
        shares = [Text.assemble(mark(w["worker"]), f" {100 * w['busy']:.0f} %") for w in workers]
        console.print(Text.assemble("busy  ", Text("  ").join(shares)))
    for loss in run.get("time_losses") or []:
        print_text(console, f"- {loss['text']}")
    if run.get("moves"):
        print_columns(moves(run["moves"]), console)
    for problem in run["problems"]:
        print_text(console, problem, "yellow")


def _settings(run: Json) -> list[str]:
    steps = len(run["metrics"]["step"]) if run.get("steps") is None else run["steps"]
    names = [str(run[name]) for name in ("schedule", "policy") if run.get(name)]
    seconds = [] if run.get("seconds") is None else [f"{run['seconds']:.1f} s"]
    return [*names, steps_made({**run, "steps": steps}), *seconds]


def print_schedules(rows: Sequence[ScheduleForecast], samples: int | None, most: int | None = None) -> None:
    """A row for each schedule and number of microbatches, with what it loses and why; then the impossible ones."""
    fitting = [asdict(row) for row in rows if row.seconds is not None]
    print_columns(tables.schedules(fitting[:most], samples), whole=True)
    for row in rows:
        if row.seconds is None:
            echo(f"{row.schedule or 'every schedule'}, {counted(row.microbatches)}: {row.why}")


MANY = 8
"""With more workers than this, only the columns that fit into the width are shown."""


def print_grid(grid: Json, console: Console) -> None:
    """A sentence that explains a cell, then a row for each rank and a column for each action, broken at the width."""
    rows: list[list[str]] = grid["rows"]
    console.print(f"{grid['schedule']} · {grid['policy']}")
    if not rows:
        console.print("which weights its actions see is not known here")
        return
    print_text(console, f"{explained(rows)} {IDLE} is a worker that waits.")
    console.print()
    columns = max(map(len, rows))
    cell = max(len(text) for row in rows for text in row) + 1
    number = len(str(len(rows) - 1))
    fits = max(1, (console.width - number - 2) // cell)
    if len(rows) > MANY and columns > fits:
        first = _busiest(rows, columns, fits)
        _print_part(rows, first, first + fits, cell, number, console)
        console.print(
            f"columns {first + 1} to {first + fits} of {columns}, those with the most actions; --json has all"
        )
        return
    for first in range(0, columns, fits):
        if first:
            console.print()
        _print_part(rows, first, first + fits, cell, number, console)


def _busiest(rows: Sequence[Sequence[str]], columns: int, width: int) -> int:
    """The window of that width with the most actions; of several, the one in the middle."""
    busy = [sum(column < len(row) and row[column] != IDLE for row in rows) for column in range(columns)]
    sums = [0, *accumulate(busy)]
    counts = [sums[first + width] - sums[first] for first in range(columns - width + 1)]
    best = [first for first, count in enumerate(counts) if count == max(counts)]
    return best[len(best) // 2]


def _print_part(rows: Sequence[Sequence[str]], first: int, end: int, cell: int, number: int, console: Console) -> None:
    for rank, row in enumerate(rows):
        line = Text.assemble(mark(rank, " " * (number - len(str(rank)))), "  ")
        for text in row[first:end]:
            of, action = text.split(":") if ":" in text else (str(rank), text)
            style = "dim" if text == IDLE else f"bold {colour(int(of))}" if action[0] == "B" else colour(int(of))
            line.append(text.ljust(cell), style)
        line.rstrip()
        console.print(line, no_wrap=True)

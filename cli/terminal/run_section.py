"""A run in a terminal, below the build that it ran."""

from __future__ import annotations

from typing import Any

from fxpipe.cli.output import mark, print_columns, print_text
from rich.console import Console
from rich.text import Text

from fxpipe.inspection.tables import moves
from fxpipe.observe.progress import held_out
from fxpipe.observe.rates import rates_text, steps_made


def print_run(facts: dict[str, Any], console: Console) -> None:
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


def _settings(run: dict[str, Any]) -> list[str]:
    steps = len(run["metrics"]["step"]) if run.get("steps") is None else run["steps"]
    known = [str(run[name]) for name in ("schedule", "policy") if run.get(name)]
    seconds = [] if run.get("seconds") is None else [f"{run['seconds']:.1f} s"]
    return [*known, steps_made({**run, "steps": steps}), *seconds]

"""`fxpipe inspect`: what runs where, which values cross workers, and which weights every action sees."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fxpipe.cli.command import Command, option_fields
from fxpipe.cli.output import echo_file, emit_json, new_console, note, put, warn, working
from fxpipe.errors import BuildError
from fxpipe.lowering.options import CompileOptions
from fxpipe.options import option
from fxpipe.plan.build_folder import PLAN
from fxpipe.policy import POLICIES, policy_help
from fxpipe.schedule import schedule_text

if TYPE_CHECKING:
    from fxpipe.inspection.subject import Subject


@dataclass(frozen=True)
class InspectOptions:
    """What of a build is shown."""

    stage: int | None = option(None, minimum=0, metavar="K", help="Print the code of stage K.")
    schedule: str | None = option(
        None, kind=schedule_text, metavar="NAME|FILE.csv", help="Show which weights every action sees with this policy."
    )
    policy: str | None = None
    depth: int | None = option(None, minimum=0, metavar="D", help="Show every module down to this depth.")
    edges: bool = option(False, help="Show every edge, however many there are.")
    run: str | None = None
    html: str | None = option(None, path="file", metavar="FILE", help="Write everything to one HTML page.")


@click.command("inspect", cls=Command)
@click.argument("build", type=click.Path())
@option_fields(InspectOptions, "stage", "schedule")
@option_fields(CompileOptions, policy=policy_help("the build's own"))
@option_fields(InspectOptions, "depth", "edges")
@click.option("--run", type=click.Path(), metavar="DIR", help="Also show what a run of the build wrote to its --out.")
@option_fields(InspectOptions, "html")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object: all facts, or what was asked for.")
def inspect_command(build: str, as_json: bool, **option_values: Any) -> int:
    """Show what runs where, which values cross workers, and which weights every action sees.

    Without options: the module tree with the workers of each module's forward and backward (≠ where they differ), what
    every worker computes, owns and holds, and every edge. Nothing is run, and no weights are loaded. Code of the build
    or of its model file is not imported, except for a --policy that the model file registers.

    --schedule and --policy show the order of actions and the version of the weights that each sees: F3@1+2 is the
    forward of minibatch 3 with the weights after 1 update, predicted 2 further.

    \b
    fxpipe inspect build/
    fxpipe inspect build/ --stage 1
    fxpipe inspect build/ --schedule async --policy stash
    fxpipe inspect build/ --run run/ --html report.html
    """
    from fxpipe.cli.terminal.overview import print_grid, print_overview
    from fxpipe.inspection.facts import facts
    from fxpipe.observe.run_folder import read_run
    from fxpipe.task.model_file import task_of_build

    options = InspectOptions(**option_values)
    stage, schedule, policy, page = options.stage, options.schedule, options.policy, options.html
    if stage is not None and page is not None:
        raise click.UsageError("--stage and --html show different things: give one of them")
    if options.run is not None and stage is not None:
        raise click.UsageError("--stage prints code and shows no run: leave out --run")
    if page is not None:
        _check_page(Path(page))
    subject = _read(build)
    if stage is not None:
        _print_stage(subject, stage, as_json)
        return 0
    run = None if options.run is None else read_run(options.run, subject.plan.digest)
    if policy is not None and policy.split("+")[0] not in POLICIES and subject.model is not None:
        task_of_build(subject.plan, build)  # registers it
    with working("inspecting"):
        shown = facts(subject, schedule=schedule, policy=policy, run=run)
    if shown["forecast"] is None:
        unknown = shown["grid"]["policy"]
        warn(f"policy {unknown} is the model file's own, which is not imported: --policy {unknown} imports it")
    if page is not None:
        from fxpipe.inspection.report.page import write_report

        write_report(shown, Path(page))
        for problem in run["problems"] if run else ():
            warn(problem)
        note(f"wrote {page}")
    if as_json:
        emit_json(shown)
    elif page is None and (schedule is not None or policy is not None):
        print_grid(shown["grid"], new_console())
    elif page is None:
        print_overview(shown, new_console(), options.depth, options.edges)
    return 0


def _check_page(path: Path) -> None:
    """Check, before any work, that the page can be written, and is outside builds, which a compile replaces."""
    folder = path.resolve().parent
    if path.is_dir() or not os.access(folder, os.W_OK):
        raise BuildError(f"--html {path} cannot be written", hint="choose a file in a folder that exists")
    if (folder / PLAN).is_file():
        raise BuildError(f"--html {path} is in a build folder", hint="choose a place outside it")


def _read(build: str) -> Subject:
    from fxpipe.inspection.subject import read_subject

    subject = read_subject(build)
    for file in subject.edited:
        warn(f"{file} was edited since it was compiled: nodes, times and edges are those of the compile")
    if subject.stale:
        warn(f"the build is stale: since it was compiled, {', '.join(subject.stale)}")
    return subject


def _print_stage(subject: Subject, stage: int, as_json: bool) -> None:
    stages = subject.plan.stages
    if stage >= len(stages):
        raise BuildError(f"there is no stage {stage}", hint=f"the stages are 0 to {len(stages) - 1}")
    file = stages[stage].file
    source, edited = subject.files[file], file in subject.edited
    facts = {"stage": stage, "file": file, "edited": edited, "source": source}
    put(facts, as_json, lambda facts: echo_file(facts["source"]))

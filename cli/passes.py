"""`fxpipe passes`: runs a list of passes on a saved program."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fxpipe.cli.command import AbsolutePath, Command
from fxpipe.cli.output import echo, put
from fxpipe.errors import FxpipeError, near
from fxpipe.plan.build_folder import PROGRAM

if TYPE_CHECKING:
    from fxpipe.ir.saved_program import SavedProgram
    from fxpipe.ir.transform import Pass

CAPTURE = "capture"
"""The name for the program before the first pass."""

IS_FOR = {
    **dict.fromkeys(("next_to", "whole_loss"), ": it needs several microbatches"),
    "join_metrics": ": it needs a loss that returns metrics",
    "scale_loss": ": it is for float16",
    "split_backward": ": it needs weight gradients with separate cuts or actions",
    "defer": ": it needs a schedule with separate weight gradients",
    "recompute": ": it needs workers with too little memory",
    "encode": ": it needs edges with codecs",
    "reduce": ": it needs workers with replicas",
    **dict.fromkeys(("merge_equal", "order_evaluation", "place_evaluation"), ": it needs evaluations in the pipeline"),
}
"""What passes need that do not always run."""


def documented() -> list[tuple[str, str, str, str]]:
    """Each pass: its name, the levels that it takes and gives, and what it does, as its file says."""
    from fxpipe.passes import every_pass

    rows = []
    for name, step in every_pass().items():
        text = (sys.modules[step.__module__].__doc__ or "").partition(": ")[2]
        rows.append((name, step.requires.name, step.provides.name, text.removesuffix(".")))
    return rows


@click.command("passes", cls=Command)
@click.argument("program", type=AbsolutePath(), required=False)
@click.option("-p", "--passes", "listed", metavar="LIST", help="Passes, with commas between; else the build's own.")
@click.option("--after", metavar="PASS", help="The build's own passes up to this one; `capture`: none.")
@click.option("--of", metavar="NAME", help="Another program of the build than the first step's: `evaluation 0`, …")
@click.option("--print", "shown", is_flag=True, help="Print the program after the last pass.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def passes_command(
    program: str | None, listed: str | None, after: str | None, of: str | None, shown: bool, as_json: bool
) -> int:
    """Run passes on a saved program, and verify it after each. PROGRAM is program.json of a build, or the build.

    Without PROGRAM: list all passes, each with the levels of the program that it takes and gives.

    \b
    fxpipe passes
    fxpipe passes build/program.json
    fxpipe passes build/program.json -p fold,units --print
    fxpipe passes build/ --after cut --print

    A build keeps what was captured: the step (`training`), that for each further shape of batch, evaluations, and the
    totals of a minibatch, each with the passes that it went through and their options. Nothing is captured or measured
    again, and nothing is written. A line for each pass says how many nodes it left.

    A pass takes a program of one level and gives one; a list in which these do not fit is refused. A pass of a list has
    the options of the build. JSON after its name changes some of them:

    \b
    fxpipe passes build/ -p 'fold,whole_loss{"microbatches":4}' --print
    """
    if program is None:
        if listed or after or of or shown:
            raise click.UsageError("these options need PROGRAM: program.json of a build, or the build")
        rows, fields = documented(), ("pass", "takes", "gives", "does")
        every = {"passes": [dict(zip(fields, row, strict=True)) for row in rows]}
        put(every, as_json, lambda _: echo(_listing(rows), nl=False))
        return 0
    from fxpipe.ir.printer import print_program
    from fxpipe.ir.saved_program import read_programs
    from fxpipe.ir.transform import PassLines, run_passes
    from fxpipe.passes import every_pass

    if listed is not None and after is not None:
        raise click.UsageError("-p names the passes, --after takes the build's own up to one: give one of them")
    path = Path(program)
    path = path / PROGRAM if path.is_dir() else path
    programs = read_programs(path, every_pass())
    if of is not None and of not in programs:
        hint = f"one of: {', '.join(programs)}"
        raise FxpipeError(f"there is no program {of!r}{near(of, programs)}", where="--of", hint=hint)
    saved = after_pass(programs if of is None else {of: programs[of]}, after)
    steps, lines = saved.passes if listed is None else tuple(_parsed(listed, saved)), PassLines()
    result = run_passes(saved.program, steps, [lines])
    text = print_program(result) if shown else ""
    facts = {"of": saved.name, "passes": lines.lines, **({"program": text} if shown else {})}
    put(facts, as_json, lambda facts: echo(text or "\n".join(lines.lines), nl=not text))
    return 0


def _listing(rows: Iterable[tuple[str, str, str, str]]) -> str:
    """What `documented` gives: a paragraph for each pass, next to its name."""
    formatter = click.HelpFormatter()
    for name, takes, gives, does in rows:
        formatter.write_dl([(f"{name:16}", f"{takes if takes == gives else f'{takes} → {gives}'}: {does}")])
    return formatter.getvalue()


def after_pass(programs: Mapping[str, SavedProgram], name: str | None) -> SavedProgram:
    """The first program that goes through a pass, totals last, with its passes up to it; None: the first, with all."""
    from dataclasses import replace

    from fxpipe.passes import every_pass

    first = next(iter(programs.values()))
    if name is None or name == CAPTURE:
        return first if name is None else replace(first, passes=())
    every = (CAPTURE, *every_pass())
    if name not in every:
        hint = f"the passes, in their order: {', '.join(every)}"
        raise FxpipeError(f"there is no pass {name!r}{near(name, every)}", where="--after", hint=hint)
    for saved in sorted(programs.values(), key=lambda one: one.name.startswith("totals")):
        names = [step.name for step in saved.passes]
        if name in names:
            return replace(saved, passes=saved.passes[: names.index(name) + 1])
    seen = dict.fromkeys([CAPTURE, *(step.name for saved in programs.values() for step in saved.passes)])
    hint = f"the passes that run, in their order: {', '.join(seen)}"
    raise FxpipeError(f"the pass {name} does not run here{IS_FOR.get(name, '')}", where="--after", hint=hint)


def _parsed(listed: str, saved: SavedProgram) -> Iterator[Pass]:
    """The passes of `fold,cut{"cuts": …}`."""
    from fxpipe.ir.saved_program import options_of, pass_of
    from fxpipe.passes import every_pass

    chosen, place = {step.name: options_of(step) for step in saved.passes}, 0
    while place < len(listed):
        spelling = re.compile(r"\s*([^,{]*?)\s*(?=[,{]|$)").match(listed, place)
        assert spelling is not None
        name, place, changes = spelling[1], spelling.end(), dict[str, object]()
        if listed[place : place + 1] == "{":
            try:
                changes, place = json.JSONDecoder().raw_decode(listed, place)
            except json.JSONDecodeError as error:
                what = f"the options of {name} are not JSON: {error.msg} at character {error.pos}"
                hint = f'write {name}{{"option": value}}, in quotes of the shell'
                raise FxpipeError(what, where="-p", hint=hint) from error
        comma = re.compile(r"\s*(,|$)").match(listed, place)
        if comma is None:
            raise FxpipeError(
                f"a comma is missing before {listed[place:].strip()[:20]!r}", where="-p", hint="-p fold,units"
            )
        place = comma.end()
        yield pass_of(every_pass(), name, **{**chosen.get(name, {}), **changes})

"""Compares schedules and numbers of microbatches: what `--schedule auto` and `fxpipe plan` print."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import click
from fxpipe.cli.file_options import is_given
from fxpipe.cli.output import echo, print_columns, stdout_console
from fxpipe.cli.planned import Say, Source

from fxpipe.inspection.tables import schedules
from fxpipe.lowering.options import AUTO, CompileOptions, not_synchronous
from fxpipe.plan.cost_records import ScheduleForecast
from fxpipe.schedule import SCHEDULES, OneFOneB, Schedule, kind_of


def asked_schedule(asked: dict[str, Any], compare: bool = False) -> bool:
    """Decide what the options --schedule and --synchronous mean together; returns whether schedules are compared.

    Args:
        asked: the options by their fields; `schedule` becomes 'auto' where only `synchronous` was asked, and '1f1b'
            where workers have different numbers of replicas and none was asked.
        compare: --compare is given, which compares all schedules.

    Raises:
        ScheduleError: --synchronous is given, and the schedule is not synchronous.
        click.UsageError: one schedule is asked for together with --compare.
    """
    named = asked["schedule"] != AUTO and is_given("schedule")
    if named and compare:
        raise click.UsageError(f"--compare compares all schedules: leave --schedule {asked['schedule']} out")
    if named and asked["synchronous"] and asked["schedule"] in SCHEDULES and not kind_of(asked["schedule"]).synchronous:
        raise not_synchronous(asked["schedule"])
    if not named and asked["schedule"] != AUTO and asked.get("replicas"):
        asked["schedule"] = OneFOneB.name  # of those for different numbers of replicas, the one for any cuts
    elif not named and (compare or asked["synchronous"]):
        asked["schedule"] = AUTO
    return bool(asked["schedule"] == AUTO)


@dataclass(frozen=True)
class Schedules:
    """What was compared, the best first; for a model also the samples in a minibatch.

    Attributes:
        schedule: the one to take.
    """

    rows: tuple[ScheduleForecast, ...]
    samples: int | None
    schedule: Schedule

    def as_json(self) -> dict[str, Any]:
        """One object a row."""
        return {"samples": self.samples, "schedules": [asdict(row) for row in self.rows]}

    def show(self) -> None:
        """The table."""
        print_schedules(self.rows, self.samples)


def compare_schedules(
    source: Source, options: CompileOptions, counts: Sequence[int], modes: Sequence[str], say: Say
) -> Schedules:
    """Capture and cost the step for each number of microbatches; plan and simulate every schedule, or the given one.

    Args:
        counts: numbers of microbatches; if empty, some that suit the schedules.
        modes: the kinds of cuts; if empty, all that a schedule can use.

    Raises:
        FxpipeError: no number can be captured, or nothing fits into memory; says what would fit.
    """
    from fxpipe.lowering.choose_schedule import compare
    from fxpipe.search import Counts

    wanted = Counts(tuple(counts)) if counts else source.counts(options)
    found = compare(lambda count, say: source.read(count, True, say), options, wanted, say, modes=modes)
    return Schedules(found.rows, found.samples, found.best.schedule)


def print_schedules(rows: Sequence[ScheduleForecast], samples: int | None, most: int | None = None) -> None:
    """A row for each schedule and number of microbatches, with what it loses and why; then the impossible ones.

    Args:
        most: how many rows at most.
    """
    from fxpipe.search import counted

    fitting = [asdict(row) for row in rows if row.seconds is not None]
    print_columns(schedules(fitting[:most], samples), stdout_console(), whole=True)
    for row in rows:
        if row.seconds is None:
            echo(f"{row.schedule or 'every schedule'}, {counted(row.microbatches)}: {row.why}")

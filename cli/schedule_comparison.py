"""What --schedule and --synchronous mean together, and the table of the schedules that were compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import click
from fxpipe.cli.file_options import is_given
from fxpipe.cli.output import echo, print_columns, stdout_console

from fxpipe.inspection.tables import schedules
from fxpipe.lowering.options import AUTO, not_synchronous
from fxpipe.plan.cost_records import ScheduleForecast
from fxpipe.schedule import SCHEDULES, OneFOneB, kind_of


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

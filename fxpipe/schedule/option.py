"""How `--schedule` is read."""

from __future__ import annotations

from fxpipe.schedule import kind_of, of_text, to_csv
from fxpipe.schedule.csv_rows import NAME


def schedule_text(text: str) -> str:
    """The name of a schedule; or the text of one that is in a file, so that no process has to find the file again.

    Builds that were made with a file call theirs 'csv', a name for these alone: see `fxpipe.schedule.of_plan`.

    Raises:
        ScheduleError: there is no such schedule, or the file is wrong.
    """
    if text == NAME:
        return text
    made = of_text(text)
    return kind_of(text).name if made is None else to_csv(made)

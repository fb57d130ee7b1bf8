"""How `--schedule` is read."""

from __future__ import annotations

from fxpipe.schedule import kind_of, of_text, to_csv


def schedule_text(text: str) -> str:
    """The name of a schedule; or the text of one that is in a file, so that no process has to find the file again.

    Raises:
        ScheduleError: there is no such schedule, or the file is wrong.
    """
    made = of_text(text)
    return kind_of(text).name if made is None else to_csv(made)

"""Finds how much memory, or how many workers, would be enough if a profile does not fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fxpipe.errors import CutError, ProfileError, ScheduleError
from fxpipe.planner.candidates import MODES
from fxpipe.planner.partition import Partition, TooLittleMemory, fits, partitions
from fxpipe.planner.profile import Profile
from fxpipe.planner.quantity import size
from fxpipe.planner.setting import Setting

_TRIED = (1, 2, 3, 4)
"""How many more workers are tried, and, above 1, how many times as many."""


def advised_partitions(
    profile: Profile,
    setting: Setting,
    count: int,
    modes: Sequence[str] = MODES,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Partition]:
    """Like `partitions`, for `count` workers; if nothing fits, the error says what would be enough.

    Raises:
        TooLittleMemory: nothing fits; the hint has the memory and the number of workers that would be enough.
    """
    workers = setting.workers(count)
    try:
        return partitions(profile, workers, modes, say)
    except TooLittleMemory as error:
        if len(set(setting.memory)) > 1 or len(set(setting.speeds)) > 1:
            error.hint = "give that worker more memory, or use more workers"
            raise
        enough = f"give every worker {size(error.share * setting.memory[0], enough=True)}"
        more = _enough_workers(profile, setting, count, say)
        several = setting.schedule_of(count).several
        alone = "" if several else "; more workers alone do not help"
        error.hint = f"{enough}, or use -n {more}" if more else f"{enough}{alone}"
        if setting.recompute == "none":
            error.hint += "; or let backwards compute values again (--recompute auto)"
        raise


def _enough_workers(
    profile: Profile,
    setting: Setting,
    count: int,
    say: Callable[[str], None],
) -> int | None:
    """The smallest number of workers that fits, among the next few and a few larger ones."""
    if setting.schedule_of(count).several:
        return None  # several workers share a process, so more of them may not help
    tried = sorted({count + more for more in _TRIED} | {count * times for times in _TRIED[1:]})
    for more in tried:
        say(f"does it fit into {more} workers?")
        try:
            if fits(profile, setting.workers(more)):
                return more
        except (CutError, ProfileError, ScheduleError):  # links or placement are for another number of workers
            return None
    return None

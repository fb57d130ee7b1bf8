"""What would do, where a profile does not fit into the workers' memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fxpipe.planner.candidates import MODES
from fxpipe.planner.partition import BUDGET, Partition, TooLittleMemory, partitions
from fxpipe.planner.profile import Profile
from fxpipe.planner.quantity import size
from fxpipe.planner.setting import Setting

_TRIED = 8  # numbers of workers


def advised_partitions(
    profile: Profile,
    setting: Setting,
    count: int,
    modes: Sequence[str] = MODES,
    say: Callable[[str], None] = lambda text: None,
    budget: int = BUDGET,
) -> dict[str, Partition]:
    """As `partitions`, for `count` workers; if nothing fits, the error says what would do.

    Raises:
        TooLittleMemory: nothing fits; the hint has the memory and the number of workers that would do.
    """
    workers = setting.workers(count)
    try:
        return partitions(profile, workers, modes, say, budget)
    except TooLittleMemory as error:
        equal = len(set(workers.memory)) == len(set(workers.speeds)) == 1
        enough = f"give every worker {size(error.share * workers.memory[0])}" if equal else "give that worker more"
        widest = [mode for mode in MODES if mode in modes][-1]
        more = _enough_workers(profile, setting, count, widest, say, budget) if equal else None
        error.hint = f"{enough}, or use -n {more}" if more else f"{enough}; more workers alone do not help"
        if not equal:
            error.hint = f"{enough}, or use more workers"
        raise


def _enough_workers(
    profile: Profile,
    setting: Setting,
    count: int,
    mode: str,
    say: Callable[[str], None],
    budget: int,
) -> int | None:
    """The least number of workers that fits, among the next few and a few larger ones."""
    tried = sorted({*range(count + 1, count + 1 + _TRIED // 2), *(count * 2**i for i in range(1, 1 + _TRIED // 2))})
    for more in tried:
        say(f"does it fit {more} workers?")
        try:
            partitions(profile, setting.workers(more), (mode,), budget=budget // 10)
        except TooLittleMemory:
            continue
        return more
    return None

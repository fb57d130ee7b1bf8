"""What replicas read must be the same: each takes its share of it."""

from __future__ import annotations

from collections.abc import Sequence

from fxpipe.errors import RunError, listed


def unlike_first(numbers: Sequence[object]) -> str:
    """The replicas whose number is not that of replica 0, for a message; empty if there are none."""
    others = [f"replica {j}" for j, number in enumerate(numbers) if number != numbers[0]]
    return listed(others) if others else ""


def check_read_alike(numbers: Sequence[object], what: str, hook: str) -> None:
    """Compare what each replica of worker 0 has read.

    Args:
        numbers: of each replica, what stands for the data that it has read.
        what: it is, such as `step 3`.
        hook: that gives the data.

    Raises:
        RunError: a replica has read other data than replica 0; names all that have.
    """
    if others := unlike_first(numbers):
        raise RunError(
            f"the replicas of worker 0 read different batches in {what}: {others} another than replica 0",
            where=hook,
            hint="every replica reads all data and takes its share: they must come in the same order in every "
            "process, as with random numbers of the process's own generators, which are seeded alike",
        )

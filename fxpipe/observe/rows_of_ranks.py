"""What the workers of a run did, added up by rank: a rank runs several in turn, and none of them is idle meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_TIMES = ("forward_ms", "backward_ms", "update_ms", "copy_ms")


def share_ranks(rows: Sequence[dict[str, Any]]) -> None:
    """In rows of `run.json`, separate the time in which a worker's rank ran its other workers from unexplained time.

    `spent` gets an entry `others` where a rank has several workers; its entries still add up to `seconds`.
    """
    taken = [sum(row["spent"].values()) - row["spent"]["other"] for row in rows]
    for row in rows:
        others = [taken[i] for i, each in enumerate(rows) if each["rank"] == row["rank"] and each is not row]
        if others:
            rest = row["spent"]["other"]
            here = min(sum(others), rest)
            row["spent"] = {**row["spent"], "others": here, "other": rest - here}


def rows_of_ranks(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for each rank, in which `worker` is the rank, and what it and others wait for are ranks.

    Args:
        rows: of workers, after `share_ranks`.
    """
    place = {row["worker"]: row["rank"] for row in rows}
    found = []
    for rank in sorted(set(place.values())):
        own = [row for row in rows if row["rank"] == rank]
        spent = {kind: sum(row["spent"][kind] for row in own) for kind in own[0]["spent"] if kind != "others"}
        spent["other"] = own[0]["spent"]["other"]  # the same on all of them
        found.append(
            {
                "worker": rank,
                "rank": rank,
                "busy": sum(row["busy"] for row in own),
                "seconds": max(row["seconds"] for row in own),
                "spent": spent,
                "took": {kind: sum(row["took"][kind] for row in own) for kind in own[0]["took"]},
                "waits": [wait | {"from": place.get(wait["from"])} for row in own for wait in row["waits"]],
                "fill": sum(row["fill"] for row in own),
                "host": own[0].get("host"),  # the same, but for the moments when each began and ended
            }
        )
    return found


def plans_of_ranks(planned: Sequence[Mapping[str, Any]], placement: Sequence[int]) -> list[dict[str, float]]:
    """The same of the rows of a forecast's workers."""
    return [
        {
            name: sum(row.get(name) or 0.0 for row, own in zip(planned, placement, strict=True) if own == rank)
            for name in _TIMES
        }
        for rank in sorted(set(placement))
    ]

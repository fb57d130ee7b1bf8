"""Where a run lost its time, by three rules: the pipeline fills, the cuts are uneven, other threads take the cores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fxpipe.observe.run_json import LostTime, WorkerJson

LEAST = 0.05
"""The least share of a run that is worth a sentence."""

HAS_A_CORE = 0.8
"""The least share of its work in which a worker's thread runs on a core, if no other program takes the core."""

_COMPUTES = ("F", "B", "W", "predict", "update")


@dataclass(frozen=True)
class _Rank:
    """What a rank's workers did, added up, in seconds."""

    number: int
    name: str
    empty: float  # how long it waits for its first backwards, and after its last ones for the end of the run
    work: float  # forwards, backwards, updates and copies of messages as planned; as measured without a forecast
    # how much longer than planned its forwards and backwards took; without a forecast, how long no core computed them
    late: float
    computes: float  # how long it computed, on a core or not
    host: Mapping[str, Any]

    @staticmethod
    def of(
        noun: str,
        rows: Sequence[WorkerJson],
        plans: Sequence[Mapping[str, float]],
        seconds: float,
        counts: tuple[int, int],
    ) -> _Rank:
        """Of the rows of its workers, and of theirs in a forecast, if any; `counts` are steps and microbatches."""
        steps, microbatches = counts
        host, end = rows[0].host, max(row.seconds for row in rows)
        fill = sum(min(row.fill, row.spent["wait"]) for row in rows)
        computes = sum(row.spent[kind] for row in rows for kind in _COMPUTES)
        took = sum(row.took["F"] + row.took["B"] for row in rows)
        if plans:
            actions = steps * microbatches * sum(plan["forward_ms"] + plan["backward_ms"] for plan in plans) / 1e3
            others = sum(plan["update_ms"] + plan["copy_ms"] for plan in plans) / 1e3
            work, late = actions + steps * others, took - actions
        else:
            work = took + sum(row.took["update"] for row in rows)
            late = computes - (host.get("cpu_seconds") or 0.0)
        number = rows[0].rank
        return _Rank(number, f"{noun} {number}", fill + max(seconds - end, 0.0), work, late, computes, host)


def time_losses(
    workers: Sequence[WorkerJson], forecast: Mapping[str, Any] | None, seconds: float, steps: int, microbatches: int
) -> list[LostTime]:
    """The losses of time of a run, largest first: `{"worker", "share", "cause", "text"}`.

    `share` is that of the run, 0 to 1; `worker` is None for a loss of all workers, and a rank where ranks have several
    workers. `cause` is `fill`, `uneven` or `cores`. Without a forecast, what was measured is taken as planned.
    """
    if steps <= 0 or not workers or not seconds > 0:
        return []
    planned = [] if forecast is None else forecast["workers"]
    places = [row.rank for row in workers]
    noun = "worker" if len(set(places)) == len(places) else "rank"
    ranks = []
    for place in dict.fromkeys(places):
        own = [i for i, rank in enumerate(places) if rank == place]
        plans = [planned[i] for i in own] if planned else []
        ranks.append(_Rank.of(noun, [workers[i] for i in own], plans, seconds, (steps, microbatches)))
    losses = [*_filling(ranks, seconds), *_uneven(ranks), *_crowded(ranks, seconds)]
    return sorted((loss for loss in losses if loss["share"] >= LEAST), key=lambda loss: -loss["share"])


def _loss(worker: int | None, share: float, cause: str, text: str) -> LostTime:
    return {"worker": worker, "share": min(share, 1.0), "cause": cause, "text": text}


def _filling(ranks: Sequence[_Rank], seconds: float) -> Iterator[LostTime]:
    share = max(rank.empty for rank in ranks) / seconds
    yield _loss(None, share, "fill", f"the pipeline fills and empties for {share:.0%} of the run: train longer")


def _uneven(ranks: Sequence[_Rank]) -> Iterator[LostTime]:
    """While the busiest rank works, the others wait for it."""
    busiest, mean = max(ranks, key=lambda rank: rank.work), sum(rank.work for rank in ranks) / len(ranks)
    if mean > 0:
        text = f"{busiest.name} has {busiest.work / mean - 1:.0%} more to do than the mean: the cuts are uneven"
        yield _loss(busiest.number, 1 - mean / busiest.work, "uneven", text)


def _crowded(ranks: Sequence[_Rank], seconds: float) -> Iterator[LostTime]:
    """What others on its cores cost the rank that lost most to them."""
    crowded = [rank for rank in ranks if _crowd(rank)]
    if crowded:
        latest = max(crowded, key=lambda rank: rank.late)
        yield _loss(latest.number, latest.late / seconds, "cores", _crowd(latest))


def _crowd(rank: _Rank) -> str:
    """What takes a rank's cores, and what to do; empty where nothing does."""
    host, ran = rank.host, rank.host.get("cpu_seconds")
    if ran is None:  # as on CUDA, where the cores do not compute
        return ""
    processes, threads, cores = host["processes"], host["threads"], host["cores"]
    if processes * threads > cores:
        own = "process" if processes == 1 else "processes"
        each = "thread" if threads == 1 else "threads"
        less = f"--threads {cores // processes}, " if processes <= cores else ""
        fewer = "" if processes == 1 else "fewer processes on this host, or --local"
        advice = (less + fewer).removesuffix(", ")
        return f"{processes} {own} × {threads} {each} share {cores} core{'s' if cores > 1 else ''} ({advice})"
    if ran < HAS_A_CORE * rank.computes:
        return (
            f"{rank.name} had a core for at most {ran / rank.computes:.0%} of its work: other programs "
            "use the cores (end them, or use another host)"
        )
    return ""

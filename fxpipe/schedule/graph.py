"""The graph of a pipeline's workers: the workers for whose forwards each worker's forward waits.

Most pipelines are chains. Branches of a model may be on workers that do not wait for each other:

    worker 0: a tower ───────┬─→ worker 2: the head        ((), (), (0, 1))
    worker 1: another one ───┘

Backwards wait in the reverse order. A worker that waits for no other begins with the batch. Worker 0 sends it when its
own forward begins, so both compute at the same time. Edges always go to later workers, and from every worker there is a
way to the last one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from fxpipe.plan.spec import EdgeSpec
from fxpipe.schedule.action import Action, Event

Graph = tuple[tuple[int, ...], ...]
"""For each worker, those whose forwards its own waits for, without those that another of them waits for; () stands for
the chain, however many workers it has."""


def chain(workers: int) -> Graph:
    """The chain, written out."""
    return ((), *((worker - 1,) for worker in range(1, workers)))[:workers]


def graph_of(orders: Iterable[tuple[int, int]], fed: Collection[int], workers: int) -> Graph:
    """The graph in which these pairs of workers, an earlier and a later one, keep their order; () for the chain.

    A worker on which no other one depends is before the next one. A worker that depends on none is after the previous
    one, unless it begins with the batch.

    Args:
        fed: the workers whose forwards receive the batch from worker 0.
    """
    before: list[set[int]] = [set() for _ in range(workers)]
    for first, later in orders:
        before[later].add(first)
    awaited = {first for firsts in before for first in firsts}
    for worker in range(1, workers):
        if worker - 1 not in awaited or not (before[worker] or worker in fed):
            before[worker].add(worker - 1)
    reach: list[set[int]] = []
    for firsts in before:
        reach.append(firsts.union(*(reach[first] for first in firsts)))
    graph = tuple(
        tuple(sorted(firsts.difference(*(reach[first] for first in firsts)))) if firsts else () for firsts in before
    )
    return () if graph == chain(workers) else graph


def graph_of_edges(edges: Iterable[EdgeSpec], workers: int) -> Graph:
    """The graph that the edges of a training step enforce."""
    orders, fed = set(), set()
    for edge in edges:
        if edge.src_phase == edge.dst_phase == "F":
            if edge.kind != "input":
                orders.add((edge.src, edge.dst))
            elif edge.src == 0:
                fed.add(edge.dst)
        elif edge.src_phase == "B":
            orders.add((edge.dst, edge.src))
    return graph_of(orders, fed, workers)


def reach_of(graph: Graph) -> list[frozenset[int]]:
    """For each worker of a graph that is written out, all workers before it."""
    reach: list[frozenset[int]] = []
    for firsts in graph:
        reach.append(frozenset(firsts).union(*(reach[first] for first in firsts)))
    return reach


def behind(graph: Graph) -> Graph:
    """For each worker of a graph that is written out, the workers that directly wait for it."""
    followers: list[list[int]] = [[] for _ in graph]
    for worker, firsts in enumerate(graph):
        for first in firsts:
            followers[first].append(worker)
    return tuple(map(tuple, followers))


def senders(worker: int, action: Action, graph: Graph, behind: Graph) -> tuple[Event, ...]:
    """The actions of the same microbatch on other workers whose messages an action waits for; W waits for none.

    Args:
        graph, behind: for each worker, those whose F its F waits for, and those whose B its B waits for. A worker's F
            that waits for none needs the batch, which the F of worker 0 sends when it begins.
    """
    if action.phase == "F":
        return tuple((first, action) for first in graph[worker] or ((0,) if worker else ()))
    return tuple((later, action) for later in behind[worker]) if action.phase == "B" else ()


def handed_on_by(
    home: int, readers: Sequence[int], reach: Sequence[frozenset[int]], of_batch: bool = False
) -> list[int | None]:
    """For each reader of a value, the place of the earlier one that sends it on; None if its home does.

    Only a worker for which the reader waits anyway sends a value on, or one that waits for the reader, if the value
    goes back.

    Args:
        readers: all after the home, or all before it, the nearest first.
        reach: for each worker, all workers before it.
        of_batch: the value is the batch's own.
    """

    def may(first: int, then: int) -> bool:
        if then < home:
            return then in reach[first]
        return first in reach[then] and (of_batch or home in reach[first])

    return [
        next((place for place in reversed(range(i)) if may(readers[place], reader)), None)
        for i, reader in enumerate(readers)
    ]


def ways(graph: Graph) -> list[list[int]]:
    """Ways along the edges of a graph, which together use every edge once."""
    left = [list(later) for later in behind(graph)]
    paths = []
    for worker in range(len(graph)):
        while left[worker]:
            way = [worker]
            while left[way[-1]]:
                way.append(left[way[-1]].pop(0))
            paths.append(way)
    return paths


def graph_text(graph: Graph) -> str:
    """Which workers wait for which: `side by side: workers 0 → 1 → 3, 2 → 3`; '' for the chain."""
    return f"side by side: workers {', '.join(' → '.join(map(str, way)) for way in ways(graph))}" if graph else ""

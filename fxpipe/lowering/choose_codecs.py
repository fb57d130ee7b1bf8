"""Which edges get codecs: as asked, or with `auto` only the edges whose links the workers wait for."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

from fxpipe.builds.build import Build
from fxpipe.codecs import codec
from fxpipe.codecs.accuracy_warnings import used_by, warning
from fxpipe.codecs.encoding import Encoding
from fxpipe.ir.program import Program
from fxpipe.lowering.choose_cuts import Choice
from fxpipe.lowering.emit import Codecs, Emitter
from fxpipe.plan.cost_records import CodecTimes
from fxpipe.plan.plan import Plan
from fxpipe.plan.spec import EdgeSpec
from fxpipe.planner.costs_file import BuildCosts
from fxpipe.planner.setting import Setting
from fxpipe.planner.workers import Ratios
from fxpipe.simulator.of_build import forecast

WORTH = 0.02
"""How much faster a pipeline must become for codecs that lose something to be worth it."""

SLACK = 0.005
"""How much slower it may become without a codec that hardly matters."""

PLAIN = Encoding()
"""Values travel without codecs."""

Way = tuple[str, int, int]
"""A kind of edge, and the two workers that it connects."""


def way_of(edge: EdgeSpec) -> Way:
    """The way of an edge."""
    return edge.kind, edge.src, edge.dst


def of_edges(encoding: Encoding, ways: Collection[Way] | None, edges: Sequence[EdgeSpec]) -> dict[str, str]:
    """The codecs by edge name, for the edges that get one.

    Args:
        ways: the ways to encode; None for all.
    """
    taken = (e for e in edges if ways is None or way_of(e) in ways)
    return {e.name: text for e in taken if (text := encoding.codec_of(e.kind, e.tensor))}


def like(plan: Plan) -> Codecs:
    """The codecs asked for in a plan, for the edges of another shape of batch; `auto` encodes the same ways."""
    asked = Encoding.parse(plan.codec)
    if not asked.auto:
        return partial(of_edges, asked, None)
    lossy: dict[Way, str] = {}
    for edge in plan.edges:
        if edge.codec and not codec(edge.codec).lossless:
            lossy[way_of(edge)] = edge.codec
    ways = {way_of(edge) for edge in plan.edges if edge.codec}

    def found(edges: Sequence[EdgeSpec]) -> Mapping[str, str]:
        texts: dict[str, str] = {}
        for edge in edges:
            if (way := way_of(edge)) in ways:
                texts |= of_edges(Encoding.parse(f"{edge.kind}={lossy.get(way, 'bits')}"), None, [edge])
        return texts

    return found


def emit_encoded(emitter: Emitter) -> tuple[Program, Build]:
    """Cut and emit a program whose edges have codecs; the build warns of codecs that lost much in the accuracy study.

    Raises:
        CutError: as `choose_cuts`.
    """
    encoding = emitter.step.options.encoding
    if encoding.auto:
        choice, encoding, ways, plain, coded = _choose(emitter)
    else:
        choice, ways, plain, coded = emitter.choose(_with_ratios(emitter, encoding)), None, None, None
    codecs = partial(of_edges, encoding, ways)
    program, build = emitter.emit(choice, codecs)
    warned = warning(used_by(build.plan))
    return program, replace(
        build,
        costs=replace(build.costs, without_codecs=plain, with_codecs=coded),
        warnings=(*build.warnings, *([warned] if warned else [])),
    )


def _choose(emitter: Emitter) -> tuple[Choice, Encoding, frozenset[Way], float, float]:
    """The cuts, the encoding, the ways to encode, and the seconds of a minibatch without codecs and with them."""
    choice = emitter.choose(emitter.setting)
    trial = _Forecasts(emitter, choice)
    plain = best = trial.seconds(PLAIN, frozenset())
    found: tuple[Choice, Encoding, frozenset[Way], _Forecasts] = (choice, PLAIN, frozenset(), trial)
    for encoding in emitter.step.options.encoding.candidates:
        coded = emitter.choose(_with_ratios(emitter, encoding))
        other = trial if coded.cuts == choice.cuts else _Forecasts(emitter, coded)
        for each in {id(one): one for one in (trial, other)}.values():
            seconds = each.seconds(encoding, each.ways)
            if seconds < best * (1 - WORTH):
                best, found = seconds, (each.choice, encoding, each.ways, each)
    choice, encoding, ways, trial = found
    ways = trial.fewest(encoding, ways, best)
    return choice, encoding, ways, plain, trial.seconds(encoding, ways)


def _with_ratios(emitter: Emitter, encoding: Encoding) -> Setting:
    return replace(emitter.setting, ratios=ratios_of(encoding))


def ratios_of(encoding: Encoding) -> Ratios:
    """How many bytes travel for each byte of float32 values of each kind."""
    kinds = ("activation", "gradient", "saved", "weights")
    return Ratios(*(encoding.ratio(kind) for kind in kinds))


class _Forecasts:
    """One choice of cuts, emitted once without codecs, to forecast it with any."""

    def __init__(self, emitter: Emitter, choice: Choice) -> None:
        self.choice = choice
        _, self._build = emitter.emit(choice, lambda edges: {}, observed=False)
        self._times = emitter.codec_times
        self.ways = frozenset(way_of(edge) for edge in self._build.plan.edges if edge.kind != "token")

    def seconds(self, encoding: Encoding, ways: Collection[Way]) -> float:
        """Of a minibatch, with these ways encoded."""
        plan, costs = self._build.plan, self._build.costs
        codecs = of_edges(encoding, ways, plan.edges)
        return forecast(*encoded(plan, costs, codecs, self._times)).seconds_per_minibatch

    def fewest(self, encoding: Encoding, ways: frozenset[Way], best: float) -> frozenset[Way]:
        """The ways without those that hardly matter: those on the least busy links go first.

        Takes a number of forecasts that is logarithmic in the ways.
        """
        ordered = sorted(ways, key=lambda way: (self._occupies(way), way))
        enough = best * (1 + SLACK)
        low, high = 0, len(ordered)  # without the first `low` it is fast enough; without `high` perhaps not
        while low < high:
            middle = (low + high + 1) // 2
            if self.seconds(encoding, frozenset(ordered[middle:])) <= enough:
                low = middle
            else:
                high = middle - 1
        return frozenset(ordered[low:])

    def _occupies(self, way: Way) -> float:
        """How many seconds a link is busy with this way and all others between its workers in this direction."""
        _, src, dst = way
        plan = self._build.plan
        links = self._build.costs.links.on([plan.rank_of(worker) for worker in range(plan.workers)])
        own = sum(e.tensor.bytes for e in plan.edges if (e.src, e.dst) == (src, dst))
        return links.seconds(src, dst, own)


def encoded(
    plan: Plan, costs: BuildCosts, codecs: Mapping[str, str], times: Mapping[str, CodecTimes]
) -> tuple[Plan, BuildCosts]:
    """A plan and its costs with these codecs on these edges."""
    edges = tuple(_encoded(edge, codecs.get(edge.name, "")) for edge in plan.edges)
    workers = list(costs.workers)
    for edge in edges:
        own = times.get(edge.codec, CodecTimes())
        for worker, phase, seconds in (
            (edge.src, edge.src_phase, own.pack * edge.tensor.bytes),
            (edge.dst, edge.dst_phase, own.unpack * edge.tensor.bytes),
        ):
            row = workers[worker]
            name = {"F": "forward", "B": "backward", "W": "weight"}[phase]
            workers[worker] = replace(row, **{name: getattr(row, name) + seconds})
    return plan.with_step(edges=edges), replace(costs, workers=tuple(workers))


def _encoded(edge: EdgeSpec, text: str) -> EdgeSpec:
    return replace(edge, codec=text, packed=codec(text).packed(edge.tensor)) if text else edge

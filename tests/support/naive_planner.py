"""The stated model once more, unit by unit in plain Python, and every plan tried: the judge of the planner."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from fxpipe.planner.profile import Profile
from fxpipe.planner.workers import Workers

Cuts = tuple[int, ...]


def every_cut(units: int, workers: int) -> Iterator[Cuts]:
    """All ways to cut a chain, empty parts included."""
    for inner in itertools.combinations_with_replacement(range(units + 1), workers - 1):
        yield (0, *inner, units)


def every_plan(profile: Profile, workers: Workers, mode: str) -> Iterator[tuple[Cuts, Cuts, Cuts]]:
    """All plans of a mode."""
    cuts = list(every_cut(len(profile.units), workers.count))
    for f in cuts:
        if any(p in profile.uncut for p in f[1:-1]):
            continue
        if mode == "same":
            yield f, f, f
            continue
        for b in cuts:
            if mode == "bidirectional":
                yield f, b, b
            else:
                yield from ((f, b, w) for w in cuts if all(x >= y for x, y in zip(w, b, strict=True)))


def every_choice(workers: Workers) -> Iterator[Cuts]:
    """For every boundary, whether mismatched units are computed again."""
    for inner in itertools.product((0, 1), repeat=workers.count - 1):
        yield (0, *inner, 0)


def best(profile: Profile, workers: Workers, mode: str) -> float:
    """The least bottleneck of all plans; inf if none fits into memory."""
    return min(
        max(costs(profile, workers, *plan, choice))
        for plan in every_plan(profile, workers, mode)
        for choice in (every_choice(workers) if mode != "same" else [(0,) * (workers.count + 1)])
    )


def least_share(profile: Profile, workers: Workers, mode: str) -> float:
    """How full the fullest worker is in the emptiest plan, in units of its memory."""
    return min(
        max(
            price(profile, workers, k, *(c[k : k + 2] for c in (*plan, choice)))[1] / workers.memory[k]
            for k in range(workers.count)
        )
        for plan in every_plan(profile, workers, mode)
        for choice in (every_choice(workers) if mode != "same" else [(0,) * (workers.count + 1)])
    )


def costs(profile: Profile, workers: Workers, f: Cuts, b: Cuts, w: Cuts, r: Cuts) -> list[float]:
    """Every worker's cost; inf where its memory does not do."""
    found = []
    for k in range(workers.count):
        time, memory = price(profile, workers, k, *(c[k : k + 2] for c in (f, b, w, r)))
        found.append(time if memory <= workers.memory[k] else float("inf"))
    return found


def price(
    profile: Profile, workers: Workers, k: int, f: Sequence[int], b: Sequence[int], w: Sequence[int], r: Sequence[int]
) -> tuple[float, float]:
    """Milliseconds and bytes of worker k with F of units [f0, f1), B of [b0, b1), W of [w0, w1)."""
    units, links, speed = profile.units, workers.links, workers.speeds[k]
    forward, backward = (set(range(*span)) for span in (f, b))
    owns = {i for i, u in enumerate(units) if u.weight_ms or u.parameter_bytes or u.update_ms}
    works = {i for i, u in enumerate(units) if u.weight_ms}
    weight = set(range(*w)) & owns
    share, ratios = 1 / workers.microbatches, workers.ratios
    others = [other for other in (k - 1, k + 1) if 0 <= other < workers.count]

    def ms(size: float, side: int) -> float:
        other = k - 1 if side == 0 else k + 1
        assert other in others or not size, "nothing comes from beyond the ends"
        return 1e3 * size / links.bandwidth_of(other, k) if size else 0.0

    def saved(back: Iterable[int], weights: Iterable[int]) -> float:
        back, weights = set(back), set(weights) & works
        return sum(
            units[i].saved_bytes if i in weights else units[i].saved_bytes - units[i].weight_saved_bytes
            for i in back | weights
        )

    def crossing(position: int) -> float:
        return sum(v.bytes for v in profile.activations if v.producer < position <= max(v.readers, default=0))

    def run(back: set[int], weights: set[int], again: int) -> tuple[float, float, float]:
        """Bytes that travel, milliseconds computed again, bytes that are there at once then."""
        members = {i for i in back if units[i].saved_bytes > units[i].weight_saved_bytes}
        members |= {i for i in weights & works if units[i].saved_bytes}
        if not again or not members:
            return saved(back, weights), 0.0, 0.0
        hull = range(min(members), max(members) + 1)
        size = crossing(hull.start) + sum(units[i].fixed_bytes for i in hull)
        return size, sum(units[i].forward_ms for i in hull), saved(back, weights)

    busy = sum(units[i].forward_ms for i in forward) + sum(units[i].backward_ms for i in backward)
    busy += sum(units[i].weight_ms + share * units[i].update_ms for i in weight)
    busy += share * workers.owned_ms[k] * sum(units[i].parameter_bytes for i in weight)

    def sides(found: set[int], span: Sequence[int]) -> tuple[set[int], set[int]]:
        return {i for i in found if i < span[0]}, {i for i in found if i >= span[1]}

    # A span of W is only as long as its units that own something; an empty one still stands somewhere.
    start = next((i for i in range(w[0], len(units)) if i in owns), len(units))
    end = next((i + 1 for i in range(w[1] - 1, -1, -1) if i in owns), 0)
    from_front = run(sides(backward, f)[0], sides(weight, f)[0], r[0])
    from_back = run(sides(backward, f)[1], sides(weight, f)[1], r[1])
    to_front = run(sides(forward, b)[0], {i for i in forward if i < start}, r[0])
    to_back = run(sides(forward, b)[1], {i for i in forward if i >= end}, r[1])

    activation = ratios.activation * sum(
        v.bytes for v in profile.activations if v.producer < f[0] and any(i in forward for i in v.readers)
    )
    gradient = ratios.gradient * sum(
        v.bytes for v in profile.gradients if v.producer >= b[1] and any(i in backward for i in v.readers)
    )

    def parameters(found: Iterable[int]) -> float:
        return sum(units[i].parameter_bytes for i in found)

    read = forward | backward
    copies_in = [parameters(i for i in read if i < start), parameters(i for i in read if i >= end)]
    copies_out = [
        parameters({i for i in weight if i < f[0]} | {i for i in weight if i < b[0]}),
        parameters({i for i in weight if i >= f[1]} | {i for i in weight if i >= b[1]}),
    ]
    handed = ratios.gradient * sum(units[i].gradient_bytes for i in (weight - backward) & works)
    given = ratios.gradient * sum(units[i].gradient_bytes for i in (backward - weight) & works)

    copies = share * ratios.weights
    own_f = sum(units[i].forward_ms for i in forward) / speed
    own_b = sum(units[i].backward_ms for i in backward) / speed
    waits = ms(activation, 0) + ms(gradient + handed, 1) + sum(1e3 * links.latency_of(other, k) for other in others)
    waits += max(ms(ratios.saved * from_front[0], 0) - own_f, 0) + max(ms(ratios.saved * to_front[0], 0) - own_b, 0)
    waits += max(ms(copies * copies_out[1], 1) - own_f, 0) + max(ms(copies * copies_in[1], 1) - own_b, 0)
    arriving = (
        activation + copies * copies_in[0] + ratios.saved * from_front[0],
        gradient + handed + copies * copies_in[1] + ratios.saved * from_back[0],
    )
    wire = max(ms(arriving[0], 0), ms(arriving[1], 1))
    leaving = sum(v.bytes for v in profile.gradients if v.producer >= b[0] > min(v.readers, default=v.producer))
    sent = ratios.activation * crossing(f[1]) + ratios.gradient * leaving + given
    sent += copies * sum(copies_out) + ratios.saved * (to_front[0] + to_back[0])
    spent = (busy + from_front[1] + from_back[1]) / speed + 1e3 * links.copy * (sum(arriving) + sent)

    span = set(range(min(weight), max(weight) + 1)) if weight else set()
    memory = workers.owned_factor[k] * parameters(weight) + sum(copies_in)
    memory += sum(units[i].frozen_bytes for i in read)
    kept = to_front[0] + to_back[0] + from_back[0]
    memory += workers.in_flight[k] * kept + workers.in_flight[max(k - 1, 0)] * from_front[0]
    memory += max((units[i].temporary_bytes for i in read | span), default=0.0) + from_front[2] + from_back[2]
    found = []
    own = forward & backward
    for again, values in keepings(profile, workers, k, own, saved(own, forward & weight), saved(own, own & weight)):
        found.append((max(spent + again / speed + waits, wire), memory + values))
    fitting = [row for row in found if row[1] <= workers.memory[k]]
    return min(fitting) if fitting else min(found, key=lambda row: row[1])


def keepings(
    profile: Profile, workers: Workers, k: int, own: set[int], plain: float, here: float
) -> Iterator[tuple[float, float]]:
    """Milliseconds computed again and bytes kept for it, for every level that worker k may have.

    Args:
        own: the units whose F and B it has.
        plain: what F saves for them, and for W of units whose B is elsewhere; `here`: the first alone.
    """
    units, held = profile.units, workers.in_flight[k]
    count = max(len(u.levels) for u in units)
    asked = workers.recompute
    if asked == "none" or (asked == "auto" and workers.memory[k] == float("inf")):
        yield 0.0, held * plain
        return
    if asked == "auto":
        yield 0.0, held * plain
    for level in range(count or 1):
        again = kept = made = later = most = 0.0
        for i in own:
            if count:
                row = units[i].levels[level]
                mine = (row.again_ms, row.saved_bytes, row.made_bytes, row.deferred_bytes, row.alive_bytes)
            else:
                inputs = units[i].fixed_bytes + sum(v.bytes for v in profile.activations if i in v.readers)
                of_weights = units[i].saved_bytes if units[i].weight_ms else 0.0
                mine = (units[i].forward_ms, inputs, units[i].saved_bytes, of_weights, units[i].saved_bytes)
                if inputs >= units[i].saved_bytes:
                    mine = (0.0, units[i].saved_bytes, 0.0, 0.0, 0.0)
            again, kept, made, later = again + mine[0], kept + mine[1], made + mine[2], later + mine[3]
            most = max(most, mine[4])
        if count and own:
            first = min(own)
            kept += sum(v.bytes for v in profile.activations if v.producer < first <= max(v.readers, default=0))
        values = held * (kept + plain - here) + workers.deferred[k] * later + min(most, made)
        if asked == "auto" or level == (count or 1) - 1:
            yield again, values

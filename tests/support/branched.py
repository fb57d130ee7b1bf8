"""Profiles of models with branches."""

from __future__ import annotations

from fxpipe.planner.profile import Profile, Unit, Value, backward_values, in_turn


def branched(*lengths: int, head: float = 0.1, forward: float = 1.0, size: float = 1e3) -> Profile:
    """Branches of so many units that begin with the batch, and a head that reads all of them."""
    count = sum(lengths)
    units = [Unit(f"u{i}", forward, 2 * forward, output_bytes=size, parameter_bytes=size) for i in range(count)]
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    ends = [start + length - 1 for start, length in zip(starts, lengths, strict=True)]
    values = [Value(i, size, (count if i in ends else i + 1,)) for i in range(count)]
    gradients = backward_values([*units, Unit("head", 0.0, 0.0)], values)
    batch = [Value(0, size, tuple(starts[1:]), batch=True)] if starts[1:] else []
    return Profile(
        (*units, Unit("head", head, 2 * head, parameter_bytes=size)), tuple(in_turn([*values, *batch])), gradients
    )

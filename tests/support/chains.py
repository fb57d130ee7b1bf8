"""Profiles of units in a chain, whose messages weigh nothing."""

from __future__ import annotations

from collections.abc import Sequence

from fxpipe.planner.profile import Profile, Unit, Value, backward_values


def chain(times: Sequence[tuple[float, float, float]], saved: float = 0.0, parameters: float = 0.0) -> Profile:
    """Units with these times F, B and W, in milliseconds, that save and own so many bytes each.

    What they save cannot be computed again.
    """
    units = tuple(
        Unit(f"u{i}", *unit, output_bytes=0.0, saved_bytes=saved, fixed_bytes=saved, parameter_bytes=parameters)
        for i, unit in enumerate(times)
    )
    values = tuple(Value(i, 0.0, (i + 1,)) for i in range(len(units) - 1))
    return Profile(units, values, backward_values(units, values))

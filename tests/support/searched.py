"""Searches by hypothesis whose examples take long."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings


def searched(examples: int, derandomize: bool = True) -> settings:
    """So many examples, each of which is a capture; the same ones every time, or other ones."""
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=derandomize,
        print_blob=True,
        phases=(Phase.explicit, Phase.generate),  # shrinking would take minutes: each example is a capture
        suppress_health_check=list(HealthCheck),
    )

"""Searches by hypothesis whose examples take long."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings


def searched(examples: int) -> settings:
    """So many examples, each of which is a capture; the same ones every time, or others with another profile."""
    return settings(
        max_examples=examples,
        deadline=None,
        print_blob=True,
        phases=(Phase.explicit, Phase.generate),  # shrinking would take minutes: each example is a capture
        suppress_health_check=list(HealthCheck),
    )

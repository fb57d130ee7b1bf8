"""How old weights are, in words."""

from __future__ import annotations

import pytest

from fxpipe.inspection.sentences import staleness_of
from fxpipe.policy import make as make_policy
from fxpipe.schedule import make as make_schedule
from fxpipe.schedule.versions import versions_of


@pytest.mark.parametrize(
    ("schedule", "policy", "microbatches", "expected"),
    [
        ("async", "stash", 1, "weights are at most 3 updates old"),
        ("async", "latest+ef", 1, "weights are at most 3 updates old, with error feedback"),
        ("async", "spectrain", 2, "weights are at most 2 updates old, predicted"),
        ("async", "2bw+predict+ef", 4, "weights are at most 1 update old, predicted, with error feedback"),
        ("async", "latest+ef+brake", 4, "weights are at most 1 update old, with error feedback and adaptive braking"),
        ("1f1b", "latest", 1, "no weights are stale"),
    ],
)
def test_in_words(schedule: str, policy: str, microbatches: int, expected: str) -> None:
    versions = versions_of(make_schedule(schedule, 4, microbatches))
    assert str(staleness_of(make_policy(policy), versions)) == expected

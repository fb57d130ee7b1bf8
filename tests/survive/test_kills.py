"""Kill anything at any moment, resume, and what the run leaves is the same to the last bit.

Four of the seeds: in a write, in the writing of results, in a restart, by Ctrl-C; `tests/survive/kills.py` plays all.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from killed_runs import drawn_case, played_in

from fxpipe import policy, schedule


def test_the_policies_that_seeds_draw_are_allowed() -> None:
    for case in map(drawn_case, range(400)):
        given = dict(itertools.pairwise([*case.compile, *case.run]))
        if "--policy" in given:
            made = schedule.make("async", case.workers, int(given["--microbatches"]))
            policy.make(given["--policy"]).check(made)


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.parametrize("seed", [4, 6, 9, 12])
def test_a_run_that_is_killed_ends_with_the_same_bits(seed: int, tmp_path: Path) -> None:
    result = played_in(tmp_path / "case", seed)
    assert result.differences == [], result.story
    assert len(result.story) > 1, "nothing was killed"

"""Kill anything at any moment, resume, and what the run leaves is the same to the last bit.

Four of the seeds: in a write, in the writing of results, in a restart, by Ctrl-C; `tests/survive/kills.py` plays all.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from killed_runs import played_in


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.parametrize("seed", [4, 6, 9, 12])
def test_a_run_that_is_killed_ends_with_the_same_bits(seed: int, tmp_path: Path) -> None:
    result = played_in(tmp_path / "case", seed)
    assert result.differences == [], result.story
    assert len(result.story) > 1, "nothing was killed"

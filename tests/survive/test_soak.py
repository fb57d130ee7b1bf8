"""A longer run that is killed again and again; `tests/survive/soak.py` is the whole soak, which looks at memory too."""

from __future__ import annotations

from pathlib import Path

import pytest
from soaked_runs import soaked


@pytest.mark.slow
@pytest.mark.multiproc
def test_a_run_that_is_killed_again_and_again_ends_with_the_same_bits(tmp_path: Path) -> None:
    found = soaked(tmp_path, steps=600, every=100, saved=50)
    assert found.differences == [], found.story
    assert found.met.total() >= 10, found.story  # a moment and a way each
    assert set(found.growth) == {"launcher", "worker 0", "worker 1"}

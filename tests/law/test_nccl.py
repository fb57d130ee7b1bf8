"""Runs that break NCCL's rules are found, so that the law's cases over NCCL prove that fxpipe keeps them."""

from __future__ import annotations

from pathlib import Path

import pytest
from case import of_text
from nccl import OTHER, STUCK
from product import compiled, run_in_processes, runs_of

CASE = of_text("model=gpt cuts=later schedule=async microbatches=4 processes=nccl")


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("fault", "found"),
    [("at once", STUCK), ("any order", OTHER)],
)
def test_a_broken_rule_is_found(tmp_path: Path, fault: str, found: str) -> None:
    compiled(CASE, tmp_path)
    with pytest.raises(AssertionError, match=found):
        run_in_processes(runs_of(CASE, tmp_path), CASE.total, tmp_path, "nccl", fault)

"""Runs that break NCCL's rules are found, so that the law's cases over NCCL prove that fxpipe keeps them."""

from __future__ import annotations

import pretended_device
import pytest
from nccl import ELSEWHERE, LEFT, OTHER, STUCK
from try_case import tried

GPT = "model=gpt cuts=later schedule=async microbatches=4 processes=nccl"
SEEDS = "model=attention-dropout cuts=later processes=nccl device=pretended"
REPLICAS = "cuts=later schedule=async microbatches=4 replicas=two policy=latest processes=nccl"
MIXED = "cuts=later schedule=async-late microbatches=4 replicas=two policy=latest processes=mixed"
needs_device = pytest.mark.skipif(bool(pretended_device.LACKS), reason=pretended_device.LACKS)


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("case", "fault", "found"),
    [
        (GPT, "at once", STUCK),
        (GPT, "any order/32", OTHER),
        (GPT, "two orders", STUCK),
        (REPLICAS, "other place", OTHER),
        (REPLICAS, "sums at once", STUCK),
        (GPT, "left over", LEFT),
        pytest.param(SEEDS, "from the CPU", ELSEWHERE, marks=needs_device),
    ],
)
def test_a_broken_rule_is_found(case: str, fault: str, found: str) -> None:
    """A fault of order shows in most runs, not in all: it is the processes' pace that decides which kernels cross."""
    code, text = next((end for end in (tried(case, fault) for _ in range(4)) if end[0] != 0), (0, ""))
    assert code != 0
    assert found in text


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("case", "fault"),
    [(GPT, "at once/32"), (GPT, "two orders/32"), (MIXED, "late sums")],
)
def test_what_breaks_no_rule_is_not_found(case: str, fault: str) -> None:
    """With a hardware queue for each stream no kernel waits for one of another stream: only the one queue finds it.
    Nor does a kernel that is late break a rule."""
    code, text = tried(case, fault)
    assert code == 0, text


@pytest.mark.slow
@pytest.mark.multiproc
@needs_device
def test_seeds_of_attention_cross() -> None:
    """torch leaves them in the CPU's memory: they travel on the device."""
    code, text = tried(SEEDS)
    assert code == 0, text

"""The law: whatever is legal trains what its references train; whatever is not is refused by name."""

from __future__ import annotations

import functools
import random
from pathlib import Path

import pretended_device
import pytest
import torch
from case import AXES, SLOW, Case, of_text
from choose import drawn, is_legal, pairs_of, possible_pairs, quick, random_cases
from judge import faults
from refused import RULES, Rule, refusals
from try_case import tried

from fxpipe.errors import FxpipeError

RANDOM, ELSEWHERE = 300, 20


@functools.cache
def _has_lstm(dtype: torch.dtype) -> bool:
    """Whether PyTorch has an LSTM under autocast for this CPU: without 16-bit instructions it has none."""
    try:
        with torch.autocast("cpu", dtype), torch.no_grad():
            torch.nn.LSTM(2, 2)(torch.zeros(1, 1, 2))
    except RuntimeError:
        return False
    return True


def _needs_kernels(case: Case) -> None:
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(case.precision)
    if case.model == "lstm" and dtype is not None and not _has_lstm(dtype):
        pytest.skip(f"PyTorch has no LSTM in {dtype} for this CPU")


def _holds(case: Case, folder: Path) -> None:
    _needs_kernels(case)
    found = faults(case, folder)
    assert not found, "\n".join([*found[:8], f"again: python tests/law/try_case.py '{case}'"])


@pytest.mark.multiproc
@pytest.mark.parametrize("case", quick(), ids=str)
def test_the_law(case: Case, tmp_path: Path) -> None:
    _holds(case, tmp_path)


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.parametrize("case", random_cases(RANDOM, "law"), ids=str)
def test_the_law_at_random(case: Case, tmp_path: Path) -> None:
    _holds(case, tmp_path)


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.skipif(bool(pretended_device.LACKS), reason=pretended_device.LACKS)
@pytest.mark.parametrize(
    "case",
    random_cases(ELSEWHERE, "device", "pretended") + random_cases(ELSEWHERE // 2, "mps", "narrow"),
    ids=str,
)
def test_the_law_on_another_device(case: Case) -> None:
    _needs_kernels(case)
    code, text = tried(case)
    assert code == 0, text


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_what_is_not_legal_is_refused_by_name(rule: Rule, tmp_path: Path) -> None:
    case = _forbidden(rule)
    with pytest.raises(FxpipeError) as caught:
        faults(case, tmp_path)
    assert rule.says in f"{caught.value.what} {caught.value.hint}"


def _forbidden(rule: Rule) -> Case:
    """A random case that this rule alone forbids."""
    draw = random.Random(rule.name)
    while True:
        policy = draw.choice(["default", draw.choice(AXES["policy"])])
        case = drawn(draw, SLOW, {"policy": policy, "shapes": "one", "stop": 2, "engine": "eager", "device": "cpu"})
        if case is not None and refusals(case) == [rule]:
            return case


def test_cases_are_written_and_read() -> None:
    for case in quick():
        assert of_text(str(case)) == case
        assert is_legal(case)


def test_every_pair_of_values_meets_that_may() -> None:
    covered = set().union(*(pairs_of(case) for case in quick()))
    draw = random.Random(1)
    for pair in possible_pairs(AXES):
        if pair not in covered:
            assert not any(is_legal(drawn(draw, AXES, dict(pair))) for _ in range(20)), (
                f"{pair}: run tests/law/choose.py"
            )

"""Language features one after the other in random models, under random legal cuts: against eager PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest
from by_path import module_at
from features import MICROBATCHES, WIDTH, Feature, agrees, lowered, squared, vectors
from hypothesis import given
from hypothesis import strategies as st
from random_cuts import legal_cuts, with_units
from searched import searched
from torch import nn

HERE = Path(__file__).parent
FILES = ("buffers", "dtypes", "functions", "memory_layouts", "modules", "operators", "parameters", "references")
PARTS = {
    feature.name: feature
    for name in FILES
    for feature in module_at(HERE / f"test_{name}.py", f"features_of_{name}").FEATURES
    if (feature.loss, feature.batch, feature.alone, feature.autocast) == (squared, vectors, False, None)
}
"""Modules from [samples, WIDTH] to the same."""


def test_there_are_many() -> None:
    assert len(PARTS) > 40


@pytest.mark.slow
@searched(20)
@given(names=st.lists(st.sampled_from(sorted(PARTS)), min_size=1, max_size=3), seed=st.integers(0, 10**6))
def test_random_models(names: list[str], seed: int) -> None:
    """With weight gradients with their backward, and apart."""

    def made() -> nn.Module:
        return nn.Sequential(*(nn.Sequential(PARTS[n].make(), nn.Linear(WIDTH, WIDTH), nn.Tanh()) for n in names))

    draws = any(PARTS[name].draws for name in names)
    feature = Feature("random", made, draws=draws, tolerance=1e-3)
    program = feature.program()
    numbered = with_units(program, MICROBATCHES)
    for part in range(2):
        cuts = legal_cuts(numbered, 3, f"{seed}/{part}")
        agrees(feature, lowered(program, cuts, split_backward=part == 1))

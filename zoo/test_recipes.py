"""The check of a recipe finds what is wrong, and the page tells of it."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import check_recipe
import pytest
import torch
from check import Row
from check_recipe import Trained, train_eagerly
from coverage_page import page
from families import RECIPES, ZOO, Recipe
from families.recipe import KIND, OPTIMIZERS, STEPS
from torch.utils import _pytree as pytree

SMALL = RECIPES["recipe_huber"]


class NoWorkers:
    """What is wrong before distributed training needs none; given a tensor's name, it gets other bits."""

    def __init__(self, changed: str = "") -> None:
        self.changed = changed

    def train(self, recipe: Recipe, build: Any, folder: Any) -> Trained:
        assert self.changed
        found = check_recipe.train_locally(recipe, build, steady=False)
        found.state[self.changed][0].nextafter_(torch.tensor(9.0))
        return found


def test_the_table_is_whole() -> None:
    assert sum(recipe.kind == KIND for recipe in RECIPES.values()) >= 60
    assert sum(recipe.kind == OPTIMIZERS and not recipe.refused for recipe in RECIPES.values()) >= 40
    assert {name for name in (*ZOO, *RECIPES) if re.search("recipe", name)} == set(RECIPES)


def test_batches_are_the_same_again_and_none_is_like_another() -> None:
    before = torch.get_rng_state()
    for recipe in (SMALL, RECIPES["recipe_padded_words"], RECIPES["recipe_matched_boxes"]):
        once, again = (pytree.tree_leaves(recipe.batches()) for _ in range(2))
        assert all(map(torch.equal, once, again))
        steps = [tuple(map(str, pytree.tree_leaves(batch))) for batch in recipe.batches()]
        assert len(set(steps)) == STEPS
    assert torch.equal(before, torch.get_rng_state())


def _changed(monkeypatch: pytest.MonkeyPatch, change: Any) -> Row:
    """The row of a recipe of which eager PyTorch says another thing."""
    eager = train_eagerly(SMALL)
    change(eager)
    monkeypatch.setattr(check_recipe, "train_eagerly", lambda recipe: eager)
    return check_recipe.check_recipe(SMALL, NoWorkers())  # type: ignore[arg-type]


def _loss(eager: Trained) -> None:
    eager.losses[4] *= 1 + 1e-4


def _weight(eager: Trained) -> None:
    eager.state["2.weight"] *= 1 + 1e-6


def _missing(eager: Trained) -> None:
    eager.state["3.weight"] = eager.state["2.weight"]


@pytest.mark.parametrize(
    ("change", "said"),
    [(_loss, "off by"), (_weight, "2.weight is off by 1.0e-06"), (_missing, "3.weight is off by inf")],
)
def test_what_differs_from_eager_fails(monkeypatch: pytest.MonkeyPatch, change: Any, said: str) -> None:
    row = _changed(monkeypatch, change)
    assert row.status == "failed"
    assert said in row.reason


def test_other_bits_than_in_one_process_fail() -> None:
    row = check_recipe.check_recipe(SMALL, NoWorkers("0.bias"))  # type: ignore[arg-type]
    assert row.status == "failed"
    assert "distributed: Failure: 0.bias: other bits" in row.reason


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"refused": ("no such", "")}, "compiled, though its entry says that it is refused"),
        ({"differs": (".", "")}, "compiled with microbatches, though"),
        (
            {"loss": RECIPES["recipe_root_mean_square"].loss, "differs": ("topk", "")},
            "what differs is said to be: the loss",
        ),
    ],
)
def test_what_does_not_fit_its_entry_fails(changes: dict[str, Any], said: str) -> None:
    row = check_recipe.check_recipe(dataclasses.replace(SMALL, **changes), NoWorkers())  # type: ignore[arg-type]
    assert row.status == "failed"
    assert said in row.reason


def test_the_page_has_a_table_of_recipes() -> None:
    rows = [
        Row("a", "passed", "", 1.0, 10, 0.1, 2048, 1e-7),
        Row("b", "passed", "by nature", compile=0.2, error=1e-16, microbatches=1, loss_error=2e-8),
        Row("c", "passed", compile=0.2, error=0.0, microbatches=4, loss_error=2e-8, unproved=True),
    ]
    text = page(rows, {"a": "one", "b": KIND, "c": KIND}, {"torch": "2.13.0"})
    assert "**1 of 1** model families and **2 of 2** training recipes" in text
    assert "| b | passed | 1 | 0.2 | 2e-08 | 1e-16 |" in text
    assert "| c | passed, not proved | 4 | 0.2 | 2e-08 | 0 |" in text
    assert "## Another loss with microbatches, and why\n\n- `b` (training recipes, six steps): by nature" in text

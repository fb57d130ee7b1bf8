"""Builds are warned of for what their codecs lost in the study; what it does not have is named."""

from __future__ import annotations

import pytest

from fxpipe.codecs import accuracy, accuracy_warnings
from fxpipe.codecs.accuracy_warnings import not_studied, warning

TABLE = {
    ("int8", "gpt"): (-0.001, 0.02),
    ("int8", "vgg"): (0.004, 0.005),
    ("int4", "gpt"): (0.03, 0.02),
    ("int4", "vgg"): (0.004, 0.005),
}


@pytest.fixture
def _made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A study in which int4 lost more than a deviation, on one workload."""
    monkeypatch.setattr(accuracy, "LOST", TABLE)
    monkeypatch.setattr(accuracy, "STUDIED", ("int8", "int4"))
    monkeypatch.setattr(accuracy_warnings, "STUDIED", ("int8", "int4"))
    monkeypatch.setattr(accuracy_warnings, "HARMLESS", ("int8",))


@pytest.mark.usefixtures("_made_up")
def test_one_workload_that_lost_more_than_a_deviation_is_enough_for_a_warning() -> None:
    assert accuracy.keeps_the_result("int8")
    assert not accuracy.keeps_the_result("int4")
    assert warning([("activation", "int4"), ("gradient", "int8")]) == (
        "codec int4 lost 3.0% of the result without a codec on gpt, where a standard deviation is 2.0% "
        "(benchmarks/accuracy); int8 lost less than one"
    )
    assert warning([("activation", "int8"), ("gradient", "int8")]) is None
    assert warning([]) is None


@pytest.mark.usefixtures("_made_up")
def test_what_was_not_studied_is_named_and_not_warned_of() -> None:
    used = [("gradient", "topk:0.01"), ("activation", "int8"), ("weights", "topk:0.01"), ("weights", "int8")]
    assert warning(used) is None
    assert not_studied(used) == (
        "the loss of accuracy was not studied (benchmarks/accuracy): "
        "topk:0.01 for gradient and weights, int8 for weights"
    )
    assert not_studied([("activation", "int4"), ("gradient", "int8"), ("saved", "int8")]) is None


@pytest.mark.usefixtures("_made_up")
def test_int4_for_gradients_is_not_the_int4_that_was_studied() -> None:
    used = [("gradient", "int4")]
    assert warning(used) is None
    assert not_studied(used) == "the loss of accuracy was not studied (benchmarks/accuracy): int4 for gradient"

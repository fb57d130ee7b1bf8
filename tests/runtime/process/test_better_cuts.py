"""Speeds of workers, from the numbers that their pulses show."""

from __future__ import annotations

import pytest
from moving import signs

from fxpipe.runtime.process.better_cuts import SAMPLES, STEPS, Window, Windows


def test_a_window_has_the_median_of_each_worker() -> None:
    windows, steps = Windows(2), 2 * STEPS
    found = None
    for beat in range(SAMPLES + 2):
        assert found is None
        hiccup = 50.0 if beat > 2 else 0.0  # in one sample
        slow = signs(beat, beat * steps, beat * steps * 0.4 + hiccup, beat * steps * 0.5 + hiccup)
        found = windows.add([signs(beat, beat * steps, beat * steps * 0.1, beat * steps * 0.5 + hiccup), slow])
    assert found is not None
    assert found.step == (SAMPLES + 1) * steps
    assert (*found.busy, found.pace) == pytest.approx((0.1, 0.4, 0.5))
    assert windows.add([slow, slow]) is None, "windows do not overlap"


def test_between_two_beats_nothing_is_known() -> None:
    """The step is of now, and how busy a worker was is of the last beat."""
    windows = Windows(1)
    for step in range(10 * STEPS * SAMPLES):
        assert windows.add([signs(1, step, 1.0, 1.0)]) is None


def test_steps_around_an_evaluation_make_no_sample() -> None:
    windows, steps = Windows(1), STEPS
    for beat in range(20 * SAMPLES):
        phase = "evaluating" if beat % 2 else "training"
        assert windows.add([signs(beat, beat * steps, beat, beat, phase)]) is None


def test_what_other_cuts_could_save_at_most() -> None:
    window = Window(10, (0.1, 0.4), 0.5)
    assert window.speeds((0.1, 0.2)) == pytest.approx((1.0, 0.5))
    assert window.most((0.1, 0.2)) == pytest.approx(0.5)  # 0.3 s of work at speed 1.5, not 0.4 s
    assert Window(10, (0.1, 0.2), 0.5).most((0.05, 0.1)) == pytest.approx(0.25)
    assert Window(10, (0.2, 0.2), 0.5).most((0.1, 0.1)) == pytest.approx(0.0)

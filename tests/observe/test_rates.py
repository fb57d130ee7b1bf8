"""Rates of a run: what is known of its steps, divided by their time and by what its devices can do."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from fxpipe.observe.rates import NO_WORK, Work, rates_text, steps_made, work_of
from fxpipe.plan.spec import LeafSpec, TensorSpec
from fxpipe.planner.device import INFINITE, Device, at_peak


def plan(flops: dict[str, float], tokens: int = 0) -> Any:
    leaf = LeafSpec("x", TensorSpec((3, 16), (16, 1), "int64"), dim=0)
    return SimpleNamespace(step=SimpleNamespace(given=(leaf,), flops=flops, tokens=tokens), microbatches=4)


def peak(flops: Any) -> Device:
    return Device("one", flops, INFINITE)


def test_mfu_is_the_time_at_the_devices_peak_over_the_time_that_passed() -> None:
    """Two devices, one twice as fast; float32 at half the rate of bfloat16."""
    devices = [peak({"float32": 1e12, "bfloat16": 2e12}), peak({"float32": 2e12, "bfloat16": 4e12})]
    work = work_of(plan({"float32": 3e12, "bfloat16": 6e12}, tokens=48), devices)
    assert work == Work(samples=12, tokens=192, flops=4 * 9e12 / 2, least=4 * (1.0 + 1.0))
    rates = work.rates(16.0)
    assert rates == {"samples_per_second": 0.75, "tokens_per_second": 12.0, "tflops_per_device": 1.125, "mfu": 0.5}
    assert rates_text(rates) == "0.8 samples/s  12 tokens/s  1.12 TFLOP/s/device  MFU 50.0%"


@pytest.mark.parametrize(
    ("flops", "tokens", "devices", "known"),
    [
        ({}, 0, [peak(1.0)], {"samples_per_second"}),
        ({}, 5, [peak(1.0)], {"samples_per_second", "tokens_per_second"}),
        ({"float32": 1.0}, 0, [peak(1.0), None], {"samples_per_second", "tflops_per_device"}),
    ],
)
def test_what_is_not_known_is_left_out(
    flops: dict[str, float], tokens: int, devices: list[Device | None], known: set[str]
) -> None:
    assert work_of(plan(flops, tokens), devices).rates(1.0).keys() == known


def test_a_sum_knows_what_all_its_parts_know() -> None:
    whole = Work(1, 2, 3.0, 4.0)
    assert NO_WORK + whole + whole == Work(2, 4, 6.0, 8.0)
    assert whole + replace(whole, tokens=None, least=None) == Work(2, None, 6.0, None)


@pytest.mark.parametrize(
    ("name", "bfloat16"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA L40S", None),
        ("NVIDIA GH200 480GB", None),
        ("cpu", None),
    ],
)
def test_peaks_are_those_of_the_very_device(name: str, bfloat16: float | None) -> None:
    found = at_peak(name)
    assert (None if found is None else found.flops_of("bfloat16")) == (bfloat16 and pytest.approx(bfloat16))


def test_tf32_has_a_peak_of_its_own() -> None:
    a100, v100 = "NVIDIA A100-SXM4-40GB", "Tesla V100-SXM2-32GB"
    rates = [at_peak(name, tf32).flops_of("float32") for name in (a100, v100) for tf32 in (False, True)]  # type: ignore[union-attr]
    assert rates == pytest.approx([19.5e12, 156e12, 15.7e12, 15.7e12])


@pytest.mark.parametrize(
    ("run", "said"),
    [
        ({"steps": 200}, "200 steps"),
        ({"steps": 1, "resumed_after": 0}, "1 step"),
        ({"steps": 200, "resumed_after": 100}, "steps 101 to 200"),
        ({"steps": 200, "resumed_after": 199}, "step 200"),
    ],
)
def test_a_run_that_went_on_says_which_steps_it_made(run: dict[str, int], said: str) -> None:
    assert steps_made(run) == said

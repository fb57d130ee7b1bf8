"""How fast a run trains: samples, tokens and FLOPs a second, and the share of its devices' peak that these are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fxpipe.plan.plan import Plan
from fxpipe.planner.device import Device

RATES = {
    "samples_per_second": ("samples/s", ".1f"),
    "tokens_per_second": ("tokens/s", ".0f"),
    "tflops_per_device": ("TFLOP/s/device", ".3g"),
    "mfu": ("MFU", ".1%"),
}
"""The rates of a run by their names in `metrics.jsonl` and `run.json`; how each is called and written for people."""


@dataclass(frozen=True)
class Work:
    """What some minibatches are; None for what is not known of one of them."""

    samples: int
    tokens: int | None = None  # their sequences' positions
    flops: float | None = None  # of forward and backward, each device's share
    least: float | None = None  # the seconds that these take at the devices' peak

    def __add__(self, other: Work) -> Work:
        return Work(
            self.samples + other.samples,
            None if self.tokens is None or other.tokens is None else self.tokens + other.tokens,
            None if self.flops is None or other.flops is None else self.flops + other.flops,
            None if self.least is None or other.least is None else self.least + other.least,
        )

    def rates(self, seconds: float) -> dict[str, float]:
        """What is known of `RATES` where this took so long; `mfu` is a share."""
        teraflops = None if self.flops is None else self.flops / 1e12
        amounts = dict(zip(RATES, (self.samples, self.tokens, teraflops, self.least), strict=True))
        return {name: amount / max(seconds, 1e-9) for name, amount in amounts.items() if amount is not None}


NO_WORK = Work(0, 0, 0.0, 0.0)


def samples_of(plan: Plan) -> int:
    """Samples in a minibatch: those of the first tensor that is cut, times the microbatches."""
    sizes = [leaf.tensor.shape[leaf.dim] for leaf in plan.step.given if leaf.tensor and leaf.dim is not None]
    return (sizes[0] if sizes else 1) * plan.microbatches


def work_of(plan: Plan, devices: Sequence[Device | None] = (None,)) -> Work:
    """What a minibatch of the plan is, on devices with their peak as `flops`; None stands for one whose peak is not
    known.
    """
    count = plan.microbatches
    peaks = [device for device in devices if device is not None]
    least = None
    if plan.step.flops and len(peaks) == len(devices):
        least = sum(f * count / sum(d.flops_of(dtype) for d in peaks) for dtype, f in plan.step.flops.items())
    return Work(
        samples_of(plan),
        plan.step.tokens * count or None,
        sum(plan.step.flops.values()) * count / len(devices) if plan.step.flops else None,
        least,
    )


def work_by_shape(
    plan: Callable[[], Plan], shape_of: Callable[[int], int], devices: Sequence[Device | None]
) -> Callable[[int], Work]:
    """What a minibatch is, by the shape of its batch; `plan` gives the plan with all shapes that there are by now."""
    works: list[Work] = []

    def work(minibatch: int) -> Work:
        shape = shape_of(minibatch)
        if shape >= len(works):
            works[:] = [work_of(of_shape, devices) for of_shape in plan().of_shapes]
        return works[shape]

    return work


def rates_text(rates: Mapping[str, float | None]) -> str:
    """`512.0 samples/s  65536 tokens/s  1.24 TFLOP/s/device  MFU 41.2%`: what is known."""
    texts = []
    for name, (noun, form) in RATES.items():
        if (rate := rates.get(name)) is not None:
            texts.append(f"{noun} {rate:{form}}" if name == "mfu" else f"{rate:{form}} {noun}")
    return "  ".join(texts)


def steps_made(run: Mapping[str, Any]) -> str:
    """`200 steps`, or `steps 101 to 200` where the run went on after step 100: what `seconds` of `run.json` covers."""
    first, last = (run.get("resumed_after") or 0) + 1, run["steps"]
    if first == 1:
        return f"{last} step{'' if last == 1 else 's'}"
    return f"steps {first} to {last}" if first < last else f"step {last}"

"""The times of codecs, measured on the device or computed from what they read and write."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from fxpipe.codecs import codec
from fxpipe.codecs.codec import EdgeState
from fxpipe.costs.timer import Rounds, clock_of, quartile, seconds_of
from fxpipe.plan.cost_records import CodecTimes
from fxpipe.plan.spec import TensorSpec
from fxpipe.planner.device import Device
from fxpipe.threads import threads as worker_threads

SHAPE = (256, 1024)
"""The bytes of the timed value: 1 MiB of float32."""

PASSES = 8.0
"""How many times a codec reads or writes its value, if nothing is measured: about what int8 does."""

BUDGET = 0.05


def codec_times(
    texts: Iterable[str], device: str, measured: bool, threads: int | None, computed_for: Device
) -> dict[str, CodecTimes]:
    """The times of each codec, by its text: measured here with so many CPU threads, else `computed_for` a device."""
    times: dict[str, CodecTimes] = {}
    for text in texts:
        if not measured:
            times[text] = CodecTimes(*2 * [PASSES / computed_for.bandwidth])
            continue
        with worker_threads(threads, 1), torch.no_grad():
            times[text] = _measured(text, device)
    return times


def _measured(text: str, device: str) -> CodecTimes:
    coder, clock = codec(text), clock_of(device)
    dtype = next((d for d in ("float32", "bool", "int64") if not coder.refusal(_spec(d))), None)
    if dtype is None:
        return CodecTimes()
    value = torch.zeros(SHAPE, dtype=getattr(torch, dtype), device=device)
    if dtype == "float32":
        generator = torch.Generator(device).manual_seed(0)
        value = torch.randn(SHAPE, device=device, generator=generator)
    state = EdgeState() if coder.keeps_state("gradient") else None
    packed = coder.encode(value, state)
    pack, unpack = [], []
    for counts in Rounds(BUDGET, 3, 20, warm=1).run():
        spans = seconds_of(lambda: coder.encode(value, state), clock)
        other = seconds_of(lambda: coder.decode(packed, SHAPE, value.dtype), clock)
        if counts:
            pack.append(spans)
            unpack.append(other)
    return CodecTimes(quartile(pack) / value.nbytes, quartile(unpack) / value.nbytes)


def _spec(dtype: str) -> TensorSpec:
    return TensorSpec(SHAPE, (SHAPE[1], 1), dtype)

"""`bf16` and `fp16` against torch's own casts."""

from __future__ import annotations

import torch
from packed_values import gaussian, to_and_fro

from fxpipe.codecs import codec


def test_they_are_torchs_casts() -> None:
    for dtype in (torch.float32, torch.float64):
        value = gaussian(40, 50, dtype=dtype) * torch.logspace(-4, 4, 50)
        assert torch.equal(to_and_fro(codec("bf16"), value), value.to(torch.bfloat16).to(dtype))
        assert torch.equal(to_and_fro(codec("fp16"), value), value.to(torch.float16).to(dtype))


def test_float16_ends_at_its_greatest_number() -> None:
    value = torch.tensor([1e5, -1e30, 65519.0, 65520.0, torch.nan, torch.inf, -torch.inf])
    read = to_and_fro(codec("fp16"), value)
    assert read[:4].tolist() == [65504.0, -65504.0, 65504.0, 65504.0]
    assert read[4:].isfinite().tolist() == [False, False, False]


def test_the_most_negative_number_of_a_mask_stays_finite_in_bf16() -> None:
    mask = torch.tensor([torch.finfo(torch.float32).min, 0.0, torch.finfo(torch.float32).max, -torch.inf, torch.nan])
    found = codec("bf16").decode(codec("bf16").encode(mask, None), mask.shape, mask.dtype)
    assert found[:3].isfinite().all()
    assert found[0] < -3e38
    assert found[3] == -torch.inf
    assert found[4].isnan()

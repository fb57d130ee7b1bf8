"""Codecs on a CUDA device: what they promise on a CPU, and the bits of either are read by the other."""

from __future__ import annotations

import pytest
import torch
from packed_values import gaussian, spec_of, state_at, to_and_fro

from fxpipe.codecs import codec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
OF_FLOATS = ("bf16", "fp16", "int8", "int4", "topk:0.1", "lowrank:3")


@pytest.mark.parametrize("text", OF_FLOATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_as_on_a_cpu(text: str, dtype: torch.dtype) -> None:
    value = gaussian(130, 50, dtype=dtype)
    if codec(text).refusal(spec_of(value)):
        pytest.skip("refused")
    for place in (None, "message"):
        here, there, again = (
            codec(text).pack(v, state_at(place) if place else None) for v in (value, value.cuda(), value.cuda())
        )
        assert there.is_cuda
        assert spec_of(there) == codec(text).packed(spec_of(value)) == spec_of(here)
        assert torch.equal(there.view(torch.uint8), again.view(torch.uint8))
        on_cpu = codec(text).unpack(there.cpu(), value.shape, dtype)
        on_device = codec(text).unpack(there, value.shape, dtype)
        torch.testing.assert_close(on_device.cpu(), on_cpu, atol=1e-5, rtol=2**-7)
        if text != "lowrank:3":  # the random columns that it begins from are the device's
            error, expected = (
                (v - value).float().norm() for v in (on_cpu, codec(text).unpack(here, value.shape, dtype))
            )
            assert float(error) <= 1.1 * float(expected)


@pytest.mark.parametrize("text", OF_FLOATS)
def test_what_is_not_finite_arrives_as_not_finite(text: str) -> None:
    for wrong in (torch.nan, torch.inf):
        value = gaussian(130, 50).cuda()
        value[17, 3] = wrong
        assert not to_and_fro(codec(text), value, state_at(0)).isfinite()[17, 3]


def test_lossless() -> None:
    for text, value in (("bits", gaussian(133) > 0), ("int32", (gaussian(133) * 1e6).to(torch.int64))):
        assert torch.equal(to_and_fro(codec(text), value.cuda()).cpu(), value)

"""What all of fxpipe's codecs promise, for every dtype they take: sizes, forms, bits, what is not finite."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from packed_values import FLOATS, gaussian, heavy_tailed, spec_of, state_at, to_and_fro
from torch import Tensor

from fxpipe.codecs import CODECS, codec, without_codecs

OF_FLOATS = ("bf16", "fp16", "int8", "int4", "topk:0.1", "lowrank:3", "sparseloco:8")
SHAPES = ((1,), (63,), (64,), (65,), (7, 9), (3, 5, 11), (40, 50), (2, 1, 33))


def values_of(text: str, shape: tuple[int, ...]) -> list[Tensor]:
    """One of each dtype that the codec takes, for this shape."""
    if text == "bits":
        candidates = [gaussian(*shape) > 0]
    elif text == "int32":
        candidates = [(gaussian(*shape) * 1e8).to(torch.int64)]
    else:
        candidates = [gaussian(*shape, dtype=dtype) for dtype in FLOATS]
    return [value for value in candidates if not codec(text).refusal(spec_of(value))]


CASES = [(text, shape) for text in (*OF_FLOATS, "bits", "int32") for shape in SHAPES if values_of(text, shape)]
every_case = pytest.mark.parametrize(("text", "shape"), CASES)


def test_every_codec_is_tested() -> None:
    assert {text.partition(":")[0] for text, _ in CASES} == set(CODECS)


@every_case
def test_it_packs_into_what_it_says_and_back(text: str, shape: tuple[int, ...]) -> None:
    for value in values_of(text, shape):
        said = codec(text).packed(spec_of(value))
        for state in (None, state_at(0)):
            packed = codec(text).encode(value, state)
            assert spec_of(packed) == said
            assert packed.numel() * packed.element_size() == said.bytes
            read = codec(text).decode(packed, value.shape, value.dtype)
            assert spec_of(read) == spec_of(value)
            assert read.data_ptr() != packed.data_ptr()


@every_case
def test_it_never_changes_what_it_is_given(text: str, shape: tuple[int, ...]) -> None:
    for value in values_of(text, shape):
        state = state_at(0)
        before = value.clone()
        first = codec(text).encode(value, state)
        remembered = {name: (tensor, tensor.clone()) for name, tensor in state.memory.items()}
        copy = first.clone()
        codec(text).decode(first, value.shape, value.dtype).zero_()
        codec(text).encode(value, state)
        assert torch.equal(value, before)
        assert torch.equal(first, copy)
        for tensor, was in remembered.values():
            assert torch.equal(tensor, was)


@every_case
def test_the_same_message_has_the_same_bits(text: str, shape: tuple[int, ...]) -> None:
    for value in values_of(text, shape):
        first, again, other = (codec(text).encode(value, state_at(1, place)) for place in ("a", "a", "b"))
        assert torch.equal(first.view(torch.uint8), again.view(torch.uint8))
        if text in ("int8", "int4") and value.numel() > 60:
            assert not torch.equal(first, other)


@pytest.mark.parametrize("text", [*OF_FLOATS, "bits", "int32"])
def test_any_strides_are_read_back_as_they_were(text: str) -> None:
    for value in values_of(text, (40, 50)):
        turned = value.T
        made = codec(text)
        packed = made.pack(turned)
        read = made.unpack(packed, turned.shape, turned.dtype, turned.stride())
        assert read.stride() == turned.stride()
        assert torch.equal(read, made.unpack(packed, turned.shape, turned.dtype))
        assert torch.equal(read, made.unpack(made.pack(turned.contiguous()), turned.shape, turned.dtype))


@pytest.mark.parametrize("text", [text for text in CODECS if text != "lowrank"])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2)])
def test_empty_tensors_and_single_numbers(text: str, shape: tuple[int, ...]) -> None:
    dtype = {"bits": torch.bool, "int32": torch.int64}.get(text, torch.float32)
    value = torch.ones(shape, dtype=dtype)
    for state in (None, state_at(0)):
        assert codec(text).encode(value, state).numel() == codec(text).packed(spec_of(value)).shape[0]
        torch.testing.assert_close(to_and_fro(codec(text), value, state), value, atol=0, rtol=2**-7)


@pytest.mark.parametrize("text", OF_FLOATS)
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_arrives_as_not_finite(text: str, wrong: float) -> None:
    for value in values_of(text, (40, 50)):
        value[17, 3] = wrong
        for state in (None, state_at(0)):
            assert not to_and_fro(codec(text), value, state).isfinite()[17, 3]


@pytest.mark.parametrize("text", ["int8", "int4"])
def test_what_is_not_finite_stays_in_its_block(text: str) -> None:
    value = gaussian(10, 64)
    value[4, 5] = torch.inf
    read = to_and_fro(codec(text), value)
    assert read[4, 5].isnan()
    assert bool(read[[0, 1, 2, 3, 5, 6, 7, 8, 9]].isfinite().all())


@pytest.mark.parametrize("text", OF_FLOATS)
def test_the_greatest_finite_numbers_stay_finite(text: str) -> None:
    for value in values_of(text, (16, 64)):
        if text == "bf16" or (text == "topk:0.1" and value.dtype == torch.float64):
            continue  # these round as casts do
        value[::3] = torch.finfo(value.dtype).max if value.dtype != torch.float64 else 3e38
        if text == "lowrank:3" and value.dtype != torch.float16:
            continue  # sums of squares of such numbers leave float32's range
        for state in (None, state_at(0)):
            assert bool(to_and_fro(codec(text), value, state).isfinite().all()), value.dtype


@pytest.mark.parametrize("text", ["bf16", "int8", "int4", "topk:0.1", "lowrank:40"])
@pytest.mark.parametrize("scale", [1e-8, 1e-20, 1e-30, 1e30])
def test_small_and_great_values_lose_no_more_than_others(text: str, scale: float) -> None:
    value = gaussian(40, 50) if text != "lowrank:40" else gaussian(100, 20) @ gaussian(20, 100, seed=1)
    error = (to_and_fro(codec(text), value) - value).norm()
    scaled = to_and_fro(codec(text), value * scale) / scale
    assert float((scaled - value).norm()) <= 1.1 * float(error) + 1e-5 * float(value.norm())


@pytest.mark.parametrize("text", ["int8", "int4"])
def test_blocks_too_small_for_a_scale_become_zeros(text: str) -> None:
    """A value of 1e-40 has no inverse in float32."""
    for state in (None, state_at(0)):
        assert not to_and_fro(codec(text), gaussian(40, 50) * 1e-40, state).any()


@pytest.mark.parametrize("text", OF_FLOATS)
def test_zeros_stay_zeros(text: str) -> None:
    for value in values_of(text, (40, 50)):
        assert torch.equal(to_and_fro(codec(text), torch.zeros_like(value), state_at(0)), torch.zeros_like(value))


@pytest.mark.parametrize("text", [*OF_FLOATS, "bits", "int32"])
def test_without_codecs_nothing_is_packed(text: str) -> None:
    for value in values_of(text, (40, 50)):
        with without_codecs():
            assert codec(text).pack(value) is value
            assert codec(text).unpack(value, value.shape, value.dtype, (1, 40)) is value
        assert codec(text).pack(value) is not value


@pytest.mark.parametrize("text", [*OF_FLOATS, "bits", "int32"])
def test_it_refuses_what_it_is_not_for(text: str) -> None:
    for dtype in ("int32", "uint8", "complex64", "float8_e4m3fn"):
        value = torch.zeros(64, 64, dtype=getattr(torch, dtype))
        assert dtype in codec(text).refusal(spec_of(value))


def test_casts_refuse_what_would_not_become_smaller() -> None:
    for name in ("bf16", "fp16"):
        for dtype in (torch.bfloat16, torch.float16):
            assert "would not become smaller" in codec(name).refusal(spec_of(gaussian(64, dtype=dtype)))


@given(data=st.data())
def test_random_shapes_sizes_and_errors(data: Any) -> None:
    """|error| ≤ half a step, or 2⁻⁸, or 2⁻¹¹ of the value, for any shape."""
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
    name = data.draw(st.sampled_from(["bf16", "fp16", "int8", "int4"]))
    value = (heavy_tailed if data.draw(st.booleans()) else gaussian)(*shape, seed=data.draw(st.integers(0, 1000)))
    error = (to_and_fro(codec(name), value) - value).abs()
    absmax = float(value.abs().max())
    bound = {
        "bf16": value.abs() * 2**-8,
        "fp16": value.abs() * 2**-11 + 3e-8,
        "int8": absmax / 254 * (1 + 2**-7) * 1.0001,
        "int4": absmax / 14 * (1 + 2**-7) * 32**0.5 * 1.0001,
    }[name]
    assert bool((error <= torch.as_tensor(bound)).all())


@pytest.mark.parametrize("text", OF_FLOATS)
def test_parameters_are_packed_without_their_history(text: str) -> None:
    value = torch.nn.Parameter(gaussian(40, 50)) * 2
    read = to_and_fro(codec(text), value, state_at(0))
    assert not read.requires_grad
    assert torch.equal(read, to_and_fro(codec(text), value.detach(), state_at(0)))

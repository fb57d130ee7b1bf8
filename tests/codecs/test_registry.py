"""Codecs by name, with options, fxpipe's own and users'."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from packed_values import gaussian, spec_of
from torch import Tensor

from fxpipe.codecs import CODECS, Codec, codec, register
from fxpipe.codecs.codec import EdgeState
from fxpipe.codecs.encoding import Encoding
from fxpipe.codecs.packs import DifferencePack
from fxpipe.errors import CodecError


@pytest.fixture(autouse=True)
def only_ours_afterwards() -> Iterator[None]:
    ours = dict(CODECS)
    yield
    CODECS.clear()
    CODECS.update(ours)


def half(name: str) -> type[Codec]:
    """A codec of one's own, which sends every second value."""

    @dataclass(frozen=True)
    class EverySecond(Codec):
        def packed(self, tensor: Any) -> Any:
            return spec_of(torch.empty(tensor.shape).flatten()[::2].clone())

        def encode(self, value: Tensor, state: EdgeState | None) -> Tensor:
            return value.flatten()[::2].clone()

        def decode(self, packed: Tensor, shape: Any, dtype: torch.dtype) -> Tensor:
            return packed.repeat_interleave(2)[: shape.numel()].view(shape)

    EverySecond.name = name
    return EverySecond


def test_a_text_names_a_codec_that_has_it() -> None:
    for name, kind in CODECS.items():
        assert type(codec(name)) is kind
        assert kind.name == name
        assert codec(codec(name).text) == codec(name)
    assert codec("topk:0.25").text == "topk:0.25"
    assert codec("topk").text == "topk:0.01"
    assert codec("lowrank:8").text == "lowrank:8"


def test_unknown_names_and_options() -> None:
    with pytest.raises(CodecError, match="no codec 'int9', did you mean 'int8'"):
        codec("int9")
    with pytest.raises(CodecError, match="codec 'int8' has no option"):
        codec("int8:3")


def test_ones_own_is_known_by_its_name() -> None:
    mine = register(half("every_second"))
    assert type(codec("every_second")) is mine
    value = gaussian(40, 50)
    assert codec("every_second").unpack(codec("every_second").pack(value), value.shape, value.dtype).shape == (40, 50)
    assert Encoding.parse("every_second").codec_of("saved", spec_of(value)) == "every_second"
    assert Encoding.parse("activation=every_second").codec_of("activation", spec_of(value)) == "every_second"
    register(half("every_second"))  # the model file is imported again


@pytest.mark.parametrize("name", ["", "two words", "int8", "auto", "none"])
def test_names_that_it_cannot_have(name: str) -> None:
    with pytest.raises(CodecError, match=r"EverySecond|already"):
        register(half(name))


@pytest.mark.parametrize(
    ("method", "wrong", "said"),
    [
        ("encode", lambda self, value, state: torch.zeros(7), r"encode of codec 'mine' returned torch.float32\[7\]"),
        ("encode", lambda self, value, state: None, "encode of codec 'mine' returned None"),
        (
            "decode",
            lambda self, packed, shape, dtype: packed[:5],
            r"decode of codec 'mine' returned torch.float32\[5\]",
        ),
        ("decode", lambda self, packed, shape, dtype: torch.zeros(shape).double(), r"returned torch.float64\[4, 5\]"),
    ],
)
def test_what_a_codec_returns_must_have_the_right_shape_and_dtype(method: str, wrong: Any, said: str) -> None:
    kind = register(half("mine"))
    setattr(kind, method, wrong)
    due = r"torch.float32\[10\]" if method == "encode" else r"torch.float32\[4, 5\]"
    value = gaussian(4, 5)
    with pytest.raises(CodecError, match=rf"{said}, and must return {due}"):
        codec("mine").unpack(codec("mine").pack(value), value.shape, value.dtype)
    with pytest.raises(CodecError, match=said):
        DifferencePack({"weight": spec_of(value)}, codec("mine"), ["weight"]).pack(
            {"weight": value}, {"weight": value}, ()
        )

"""What `--codec` says, and which edge gets which codec."""

from __future__ import annotations

import pytest
import torch
from packed_values import spec_of

from fxpipe.codecs.codec import KINDS
from fxpipe.codecs.encoding import Encoding
from fxpipe.errors import CodecError
from fxpipe.plan.spec import TensorSpec


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> TensorSpec:
    return spec_of(torch.empty(shape, dtype=dtype))


def of_all_kinds(text: str, spec: TensorSpec) -> list[str]:
    return [Encoding.parse(text).codec_of(kind, spec) for kind in KINDS]


@pytest.mark.parametrize(
    ("text", "codecs"),  # of input, activation, saved, gradient, weights
    [
        ("none", ["", "", "", "", ""]),
        ("auto", ["", "", "", "", ""]),
        ("bf16", ["bf16", "bf16", "bf16", "bf16", "bf16"]),
        ("int8", ["int8", "int8", "int8", "int8", "int8"]),
        ("int4", ["int4", "int4", "int4", "int8", "int8"]),
        ("topk:0.02", ["", "", "", "topk:0.02", "topk:0.02"]),
        ("lowrank", ["", "", "", "lowrank:4", "lowrank:4"]),
        ("activation=int4,gradient=lowrank:2", ["", "int4", "", "lowrank:2", ""]),
        (" activation = int4 , saved=none,weights=bf16 ", ["", "int4", "", "", "bf16"]),
    ],
)
def test_what_a_float_tensor_gets(text: str, codecs: list[str]) -> None:
    assert of_all_kinds(text, tensor(64, 64)) == codecs


def test_outer_steps_get_only_what_is_named_for_them() -> None:
    """And a codec that is for nothing else; edges stay as they are."""
    texts = ("int8", "topk:0.1", "outer=int8", "outer=none", "activation=int4,outer=topk:0.1", "sparseloco", "none")
    found = {text: Encoding.parse(text).of_outer for text in texts}
    assert found == dict(zip(texts, ["", "", "int8", "", "topk:0.1", "sparseloco:64", ""], strict=True))
    for text in ("outer=int8", "sparseloco:8"):
        assert not Encoding.parse(text).asks
        assert of_all_kinds(text, tensor(64, 64)) == [""] * 5
        assert of_all_kinds(text, tensor(4096, dtype=torch.int64)) == [""] * 5


def test_truth_values_and_whole_numbers_lose_nothing() -> None:
    for text in ("bf16", "int4", "topk", "auto", "weights=int8", "bits"):
        assert of_all_kinds(text, tensor(4096, dtype=torch.bool)) == ["bits"] * 5
        assert of_all_kinds(text, tensor(4096, dtype=torch.int64)) == ["int32"] * 5
    for text in ("none", "input=none"):
        assert of_all_kinds(text, tensor(4096, dtype=torch.int64)) == [""] * 5
    assert of_all_kinds("input=none,saved=int8", tensor(4096, dtype=torch.int64)) == ["", *["int32"] * 4]


@pytest.mark.parametrize(
    ("text", "kind", "spec"),
    [
        ("int8", "token", tensor(64, 64)),
        ("int8", "activation", tensor(255)),  # 1020 bytes
        ("bf16", "activation", tensor(64, 64, dtype=torch.float16)),
        ("int8", "activation", tensor(64, 64, dtype=torch.int32)),
        ("lowrank", "gradient", tensor(4096)),
        ("lowrank:64", "gradient", tensor(64, 64)),
        ("int8", "activation", tensor(0, 64)),
    ],
)
def test_what_is_better_sent_as_it_is(text: str, kind: str, spec: TensorSpec) -> None:
    assert Encoding.parse(text).codec_of(kind, spec) == ""


def test_1024_bytes_are_enough() -> None:
    assert Encoding.parse("int8").codec_of("activation", tensor(256)) == "int8"


def test_float16_edges_of_int8() -> None:
    assert of_all_kinds("int8", tensor(64, 64, dtype=torch.float16)) == ["int8"] * 5


def test_what_is_asked() -> None:
    asks = {text: Encoding.parse(text).asks for text in ("none", "auto", "int8", "saved=bf16", "saved=none")}
    assert asks == {"none": False, "auto": True, "int8": True, "saved=bf16": True, "saved=none": False}
    assert Encoding.parse("auto").auto
    assert Encoding.parse("none") == Encoding()
    assert hash(Encoding.parse("int4")) == hash(Encoding.parse("int4"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("int9", ["no codec 'int9', did you mean 'int8'"]),
        ("atuo", ["did you mean 'auto'"]),
        ("", ["no codec ''"]),
        ("int8:2", ["no option"]),
        ("topk:2", ["no fraction"]),
        ("activation", ["no codec 'activation'"]),
        (
            "activatoin=int4,saved=topk,gradient=lowrank:0,gradient=int8,x,weights=bf15",
            [
                "no kind of edge 'activatoin', did you mean 'activation'",
                "topk is only for gradient, weights, outer, not for saved",
                "'lowrank:0' has no rank",
                "gradient has two codecs",
                "'x' is not KIND=CODEC",
                "no codec 'bf15', did you mean 'bf16'",
            ],
        ),
        ("activation=auto", ["no codec 'auto'"]),
        ("sparseloco:6", ["no number of values"]),
        ("gradient=sparseloco", ["sparseloco is only for outer, not for gradient"]),
        ("outer=lowrank,outter=int8", ["no kind of edge 'outter', did you mean 'outer'"]),
        ("token=int8", ["no kind of edge 'token'"]),
        ("activation=int8,", ["'' is not KIND=CODEC"]),
    ],
)
def test_mistakes_are_named_all_at_once(text: str, words: list[str]) -> None:
    with pytest.raises(CodecError) as caught:
        Encoding.parse(text)
    assert caught.value.hint
    for each in words:
        assert each in caught.value.what

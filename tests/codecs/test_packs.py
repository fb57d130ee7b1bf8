"""Both ends make the same of a message of differences, and what one message loses is in the next."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from packed_values import gaussian, spec_of
from torch import Tensor

from fxpipe.codecs import codec
from fxpipe.codecs.packs import DifferencePack, gains
from fxpipe.plan.packing import ALIGNMENT

TEXTS = ["int8", "bf16", "fp16", "int4", "topk:0.1", "lowrank:2"]
VALUES = {"matrix": gaussian(40, 30), "turned": gaussian(30, 40, seed=1).t(), "bias": gaussian(3, seed=2)}


def pack_of(values: dict[str, Tensor], text: str, *differences: str) -> DifferencePack:
    return DifferencePack({name: spec_of(v) for name, v in values.items()}, codec(text), differences)


@pytest.mark.parametrize("text", TEXTS)
def test_the_receiver_makes_what_the_sender_knows(text: str) -> None:
    pack = pack_of(VALUES, text, "matrix", "turned")
    base = {name: value + 0.1 * gaussian(*value.shape, seed=5) for name, value in VALUES.items()}
    given = {name: value.clone() for name, value in base.items()}
    block, made = pack.pack(VALUES, base, (0,))
    assert block.shape == (pack.bytes,)
    found = pack.unpack(block.clone(), given)
    for name, value in VALUES.items():
        assert torch.equal(found[name], made[name])
        assert found[name].stride() == value.stride(), "operators choose by it how they add up"
        assert found[name].data_ptr() % ALIGNMENT == 0
        assert torch.equal(base[name], given[name])
        assert found[name].data_ptr() != given[name].data_ptr()
    assert torch.equal(found["bias"], VALUES["bias"])
    assert not torch.equal(found["matrix"], VALUES["matrix"])
    assert (found["matrix"] - VALUES["matrix"]).norm() < (base["matrix"] - VALUES["matrix"]).norm()


def test_sizes_are_those_of_the_codec() -> None:
    whole = pack_of(VALUES, "int8")
    assert whole.bytes == 2 * 1200 * 4 + ALIGNMENT
    assert pack_of(VALUES, "int8", "matrix").bytes == 1200 * 4 + 1280 + ALIGNMENT  # 19 blocks of 66 bytes


def test_whole_tensors_need_neither_codec_nor_base() -> None:
    pack = DifferencePack({name: spec_of(value) for name, value in VALUES.items()}, None)
    block, made = pack.pack(VALUES, {}, ())
    for name, value in VALUES.items():
        assert torch.equal(made[name], value)
        assert torch.equal(pack.unpack(block, {})[name], value)


@pytest.mark.parametrize(
    ("text", "value", "expected"),
    [
        ("int8", gaussian(64, 64), True),
        ("int8", gaussian(3), False),  # both take one aligned block
        ("int8", torch.zeros(100, dtype=torch.int64), False),
        ("int8", torch.zeros(100, dtype=torch.complex64), False),
        ("bf16", gaussian(64, 64, dtype=torch.bfloat16), False),
        ("bits", torch.zeros(1000, dtype=torch.bool), False),
        ("lowrank:4", gaussian(64), False),
        ("lowrank:40", gaussian(64, 64), False),
    ],
)
def test_what_gains(text: str, value: Tensor, expected: bool) -> None:
    assert gains(codec(text), spec_of(value)) is expected


# how far a reader is from its owner, for steps of 1, over the sizes of steps
BOUNDS = {"int8": 0.01, "bf16": 0.004, "fp16": 0.001, "int4": 0.3, "topk:0.1": 8.0, "lowrank:2": 12.0}


@pytest.mark.parametrize("text", TEXTS)
def test_errors_do_not_add_up(text: str) -> None:
    """A reader is as near to its owner after 400 updates as after 200, though the codec is deterministic."""
    values = {"w": gaussian(40, 30)}
    pack = pack_of(values, text, "w")
    made = {"w": values["w"].clone()}
    apart = []
    for version in range(400):
        values["w"] = values["w"] + gaussian(40, 30, seed=version)
        _, made = pack.pack(values, made, (0, version))
        apart.append(((made["w"] - values["w"]).norm() / values["w"].numel() ** 0.5).item())
    assert max(apart[200:]) < 1.3 * max(apart[100:200])
    assert max(apart) < BOUNDS[text]


@pytest.mark.parametrize("text", TEXTS)
def test_a_reader_arrives_where_its_owner_rests(text: str) -> None:
    values, made = {"w": gaussian(40, 30)}, {"w": torch.zeros(40, 30)}
    pack = pack_of(values, text, "w")
    for version in range(60):
        _, made = pack.pack(values, made, (0, version))
    assert (made["w"] - values["w"]).abs().max() < 1e-3


@pytest.mark.parametrize("wrong", [torch.inf, torch.nan])
def test_what_is_no_number_arrives_as_none(wrong: float) -> None:
    values = {"w": gaussian(64, 64)}
    base: dict[str, Any] = {"w": values["w"].clone()}
    values["w"] = values["w"].clone()
    values["w"][3, 4] = wrong
    for text in TEXTS:
        _, made = pack_of(values, text, "w").pack(values, base, (0,))
        assert not made["w"].isfinite().all(), text


def test_the_place_decides_alone() -> None:
    """No memory: a message is written again with the same bits, as a run does that goes on."""
    values, base = {"w": gaussian(40, 30)}, {"w": torch.zeros(40, 30)}
    for text in TEXTS:
        pack = pack_of(values, text, "w")
        _, first = pack.pack(values, base, (0, 1))
        pack.pack(values, base, (0, 2))
        _, again = pack.pack(values, base, (0, 1))
        assert torch.equal(first["w"], again["w"]), text

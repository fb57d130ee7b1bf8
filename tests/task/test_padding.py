"""What is appended to which leaves, and what cannot be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fxpipe.errors import BatchError, TaskError
from fxpipe.plan.spec import PadSpec
from fxpipe.task.batch import Batch
from fxpipe.task.padding import padding_of


def padded(batch: Any, padding: Any) -> Any:
    return Batch.of(batch).padded(padding).given


def batch_of(length: int = 5) -> dict[str, Any]:
    return {
        "ids": torch.arange(2 * length).view(2, length),
        "pairs": torch.ones(2, length, length, dtype=torch.bool),
        "nested": [torch.rand(length, 2), "text"],
        "scale": torch.tensor(2.0),
    }


def test_leaves_grow_to_the_next_multiple_and_others_stay() -> None:
    pad = {"ids": 7, "pairs": (False, (1, -1)), "batch['nested'][0]": (-torch.inf, 0)}
    padding = padding_of(pad, 4, [Batch.of(batch_of())])
    batch = batch_of()
    found = padded(batch, padding)
    assert found["ids"].tolist() == [[0, 1, 2, 3, 4, 7, 7, 7], [5, 6, 7, 8, 9, 7, 7, 7]]
    assert found["pairs"].shape == (2, 8, 8)
    assert found["pairs"].sum() == 50
    assert found["nested"][0].shape == (8, 2)
    assert found["nested"][0][5:].isinf().all()
    assert found["nested"][1] == "text"
    assert found["scale"] is batch["scale"]
    assert batch["ids"].shape == (2, 5)


def test_a_padded_batch_is_left_alone() -> None:
    padding = (PadSpec("ids", 0, (1,), 4),)
    once = padded(batch_of(), padding)
    assert padded(once, padding) is once
    assert padded(once, ()) is once
    assert padded({"other": torch.ones(2, 3)}, padding)["other"].shape == (2, 3)
    assert padded({"ids": torch.ones(3)}, padding)["ids"].shape == (3,)


@pytest.mark.parametrize("dtype", [torch.float16, torch.uint8, torch.bool, torch.int64, torch.bfloat16])
def test_every_dtype_keeps_its_values(dtype: torch.dtype) -> None:
    tensor: Tensor = torch.ones(2, 3).to(dtype)
    (found,) = padded([tensor], (PadSpec("batch[0]", 1, (1,), 5),))
    assert found.dtype == dtype
    assert torch.equal(found, torch.ones(2, 5).to(dtype))


def test_a_function_may_say_what_is_padded() -> None:
    padding = padding_of(
        lambda batch: dict.fromkeys([name for name in batch if name == "ids"], 0), 4, [Batch.of(batch_of())]
    )
    assert padding == (PadSpec("ids", 0, (1,), 4),)


@pytest.mark.parametrize(
    ("pad", "said"),
    [
        ({"idz": 0}, "pad names idz, which the batch does not have"),
        ({"scale": 0}, r"along dimension 1, but it has 0"),
        ({"ids": (0, 2)}, r"along dimension 2, but it has 2"),
        ({"pairs": -100}, "bool cannot hold it"),
        ({"ids": 0.5}, "int64 cannot hold it"),
        ({"batch['nested'][1]": 0}, "which is 'text', not a tensor"),
    ],
)
def test_what_a_leaf_cannot_get_is_refused(pad: Any, said: str) -> None:
    with pytest.raises(BatchError, match=said):
        padding_of(pad, 4, [Batch.of(batch_of())])


@pytest.mark.parametrize(
    ("pad", "pad_to", "said"),
    [
        ({"ids": "x"}, 4, "neither a number nor"),
        ({"ids": (0, 1, 2)}, 4, "neither a number nor"),
        (["ids"], 4, "not a dictionary"),
        ({"ids": 0}, 0, "pad_to is 0"),
        ({"ids": 0}, "64", "pad_to is '64'"),
        (lambda batch: batch["none"], 4, r"pad\(batch\) raised KeyError"),
        ({"ids": 0}, None, "given without pad_to"),
    ],
)
def test_what_says_nothing_is_refused(pad: Any, pad_to: Any, said: str) -> None:
    with pytest.raises(TaskError, match=said):
        padding_of(pad, pad_to, [Batch.of(batch_of())])


def test_shapes_are_shown_where_nothing_is_named() -> None:
    for pad in (None, {}):
        with pytest.raises(BatchError, match=r"batch\['ids'\] \(\[\d+, 5\], \[\d+, 7\]\)"):
            padding_of(pad, 64, [Batch.of(batch_of(5)), Batch.of(batch_of(7))])

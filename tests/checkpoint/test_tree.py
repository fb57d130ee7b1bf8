"""Values that a checkpoint holds come back the same, to the bit."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict, deque
from typing import Any

import pytest
import torch
from torch import Tensor

from fxpipe.checkpoint.tree import Decoder, Encoder, Unwritable


def there_and_back(value: Any) -> Any:
    encoder = Encoder()
    body = json.loads(json.dumps(encoder(value, "value"), allow_nan=False))
    return Decoder(lambda name: encoder.tensors[name].contiguous().clone())(body)


def same(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor):
        return (
            isinstance(second, Tensor)
            and first.dtype == second.dtype
            and first.stride() == second.stride()
            and torch.equal(first, second)
        )
    if isinstance(first, dict):
        return (
            type(first) is type(second)
            and list(first) == list(second)
            and all(same(first[k], second[k]) for k in first)
        )
    if isinstance(first, (list, tuple, deque)):
        return type(first) is type(second) and len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, float) and math.isnan(first):
        return math.isnan(second)
    return type(first) is type(second) and first == second


VALUES = [
    None, True, 3, -0.0, 1e-320, math.inf, -math.inf, math.nan, "text", 1 + 2j, torch.float16, torch.device("cpu"),
    [1, [2, []]], (), (1, (2.5,)), {"a": {"b": [None]}}, {1: "a", (2, "b"): 3}, {"tensor": 1}, {"tuple": [1, 2]},
    {1, 2}, frozenset("ab"), deque([1, 2]), Counter({3: 1, 5: 2}), OrderedDict(a=1, b=2),
    torch.arange(6.0).reshape(2, 3), torch.arange(6.0).reshape(2, 3).t(), torch.tensor(3), torch.zeros(0, 2),
    torch.arange(96.0).reshape(2, 3, 4, 4).to(memory_format=torch.channels_last),
    {"deep": [(torch.ones(2), {"x": torch.zeros(1)})]},
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_comes_back(value: Any) -> None:
    assert same(value, there_and_back(value))


def test_a_tensor_that_occurs_twice_is_one_again() -> None:
    shared = torch.ones(2)
    first, second = there_and_back([shared, {"again": shared}])
    assert second["again"] is first


def test_names_say_where_a_tensor_is() -> None:
    encoder = Encoder()
    encoder(
        {
            "state": {"layers.0.weight": {"exp_avg": torch.ones(1), "pair": [torch.ones(1)]}},
            "state.layers": torch.ones(1),
        }
    )
    assert list(encoder.tensors) == [
        "state.layers.0.weight.exp_avg",
        "state.layers.0.weight.pair[0]",
        "state.layers",
    ]


def test_names_that_would_be_the_same_are_not() -> None:
    encoder = Encoder()
    body = encoder({"a": {"b": torch.zeros(1)}, "a.b": torch.ones(1)})
    assert len(encoder.tensors) == 2
    assert float(Decoder(encoder.tensors.__getitem__)(body)["a.b"]) == 1


@pytest.mark.parametrize(
    ("value", "what"), [({"rule": abs}, "rule is a builtin_function"), ([object()], r"\[0\] is a object")]
)
def test_refuses_what_has_no_form(value: Any, what: str) -> None:
    with pytest.raises(Unwritable, match=what):
        Encoder()(value)

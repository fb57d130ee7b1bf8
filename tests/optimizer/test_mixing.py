"""Every element of a result is made of the workers' values that it is computed from, and of no others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fxpipe.optimizer.mixing import spread
from fxpipe.optimizer.number_of import NumberOf
from fxpipe.optimizer.whose import UNSURE, Whose, several

A, B, C = 1, 2, 4


class Watching(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.whose = Whose()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        spread(self.whose, func, args, kwargs or {}, result, lambda: "here")
        return result


def sets(compute: Callable[[Tensor, Tensor], Any]) -> list[Any]:
    """What the results of this computation with a matrix of A and one of B are made of."""
    a, b = (torch.rand(2, 2, dtype=torch.float64) + 0.1 for _ in range(2))
    with Watching() as watching:
        watching.whose.put(a, A)
        watching.whose.put(b, B)
        result = compute(a, b)
    tensors = [result] if isinstance(result, Tensor) else result
    return [watching.whose.elements(tensor).tolist() for tensor in tensors]


def flat(a: Tensor, b: Tensor) -> Tensor:
    return torch.cat([a.flatten(), b.flatten()])


def into_one_buffer(a: Tensor, b: Tensor) -> Tensor:
    buffer = torch.zeros(8, dtype=a.dtype)
    buffer[:4].view(2, 2).copy_(a)
    buffer[4:].view(2, 2).copy_(b).mul_(2)
    return buffer


def used_again(a: Tensor, b: Tensor) -> Tensor:
    buffer = torch.empty_like(a)
    torch.mul(a, 2, out=buffer)
    buffer.zero_()
    return buffer.add_(b)


def in_place(a: Tensor, b: Tensor) -> list[Tensor]:
    torch._foreach_mul_([a, b], [2.0, 3.0])
    return [a, b]


def by_a_tensor(a: Tensor, b: Tensor) -> list[Tensor]:
    torch._foreach_mul_([a, b], a.norm())
    return [a, b]


def norms_apart(a: Tensor, b: Tensor) -> list[Tensor]:
    norms = torch.stack(torch._foreach_norm([a, b]))
    torch._foreach_div_([a, b], list(norms.unbind()))
    return [a, b]


def scalars(a: Tensor, b: Tensor) -> list[Tensor]:
    ones = [torch.zeros_like(a), torch.zeros_like(a)]
    torch._foreach_addcmul_(ones, [torch.ones_like(a)] * 2, [torch.ones_like(a)] * 2, torch.stack([a.sum(), b.sum()]))
    return ones


CASES: dict[str, tuple[Callable[[Tensor, Tensor], Any], list[Any]]] = {
    "elementwise": (lambda a, b: a * 2 + 1, [[[A, A], [A, A]]]),
    "together": (lambda a, b: a + b[0], [[[A | B, A | B], [A | B, A | B]]]),
    "shape alone": (lambda a, b: torch.zeros_like(a + b), [[[0, 0], [0, 0]]]),
    "a sum": (lambda a, b: a.sum() + b.sum(), [A | B]),
    "a view": (lambda a, b: flat(a, b)[3:5], [[A, B]]),
    "a stack": (lambda a, b: torch.stack([a, b])[:, 0], [[[A, A], [B, B]]]),
    "sums of rows": (lambda a, b: torch.stack([a, b]).sum((1, 2)), [[A, B]]),
    "a sum of rows": (lambda a, b: torch.cat([a, b]).sum(0), [[A | B, A | B]]),
    "norms of rows": (lambda a, b: torch.linalg.vector_norm(torch.cat([a, b]), dim=1), [[A, A, B, B]]),
    "a product": (lambda a, b: torch.cat([a, b]) @ a, [[[A, A], [A, A], [A | B, A | B], [A | B, A | B]]]),
    "products": (lambda a, b: (s := torch.stack([a, b])) @ s.mT, [[[[A, A], [A, A]], [[B, B], [B, B]]]]),
    "decompositions": (lambda a, b: torch.linalg.eigvalsh(torch.stack([a, b])), [[[A, A], [B, B]]]),
    "a decision": (lambda a, b: torch.where(a.sum() > 5, b, b + 1), [[[A | B, A | B], [A | B, A | B]]]),
    "finite": (lambda a, b: torch.stack([a.isfinite().all(), b.isfinite().all()]).all(), [A | B]),
    "by index": (lambda a, b: flat(a, b)[torch.tensor([0, 7])], [[A, B]]),
    "bfloat16": (lambda a, b: (s := torch.stack([a, b]).bfloat16()).mul_(s).double()[:, 0, 0], [[A, B]]),
    "not known": (lambda a, b: flat(a, b).sort().values, [[A | B | UNSURE] * 8]),
    "one buffer": (into_one_buffer, [[A] * 4 + [B] * 4]),
    "a buffer used again": (used_again, [[[B, B], [B, B]]]),
    "lists": (in_place, [[[A, A], [A, A]], [[B, B], [B, B]]]),
    "lists by a tensor": (by_a_tensor, [[[A, A], [A, A]], [[A | B, A | B], [A | B, A | B]]]),
    "lists by lists": (norms_apart, [[[A, A], [A, A]], [[B, B], [B, B]]]),
    "lists by elements": (scalars, [[[A, A], [A, A]], [[B, B], [B, B]]]),
}


@pytest.mark.parametrize("name", CASES)
def test_each_element(name: str) -> None:
    compute, expected = CASES[name]
    assert sets(compute) == expected


def test_the_dead_are_forgotten_and_what_is_kept_is_told() -> None:
    a, b = torch.ones(2), torch.ones(2)
    with Watching() as watching:
        watching.whose.put(a, A)
        watching.whose.put(b, B)
        stacked = torch.stack([a, b])
        assert watching.whose.kept() == []
        total = stacked.sum()
        assert watching.whose.kept() == ["here"]
        del total
        assert watching.whose.kept() == []


def test_several_are_more_than_one_worker() -> None:
    assert [several(workers) for workers in (0, A, B | UNSURE, A | B, A | B | C | UNSURE)] == [False] * 3 + [True] * 2


def test_a_number_knows_whose_it_is() -> None:
    met: list[int] = []
    a, b = (NumberOf(2.0, worker, lambda: met.append(1)) for worker in (A, B))
    own = 1 - abs(-(3 * a)) / a**2
    assert (own, own.workers, met) == (-0.5, A, [])
    total = sum([a, b])
    assert (total, total.workers, len(met)) == (4.0, A | B, 1)
    assert not a < b
    assert len(met) == 2
    assert type(a.__reduce__()[1][0]) is float
    assert hash(a) == hash(2.0)

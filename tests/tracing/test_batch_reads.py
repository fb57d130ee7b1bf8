"""Numbers and strings of a batch: what a step only computes with, or does not read, may be another in every batch."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.errors import BatchError
from fxpipe.lowering.first_of_each import fits
from fxpipe.task.batch import Batch, as_scalar
from fxpipe.tracing.capture import capture

Loss = Callable[[Tensor, Any], Tensor]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def batch(given: Any, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    return {"x": torch.randn(8, 4, generator=torch.Generator().manual_seed(1)).to(dtype), "given": given}


def of(loss: Loss) -> Callable[[nn.Module, Any], Tensor]:
    return lambda model, batch: loss(model(batch["x"]), batch["given"])


ARITHMETIC: dict[str, tuple[Loss, Any, Any]] = {
    "a factor of a scalar": (lambda y, n: y.square().mean() * n, 0.3, 0.7),
    "and of a tensor": (lambda y, n: (n * y).sum(), 0.3, 0.1),
    "what is computed of it": (lambda y, n: (1 - n) ** 2 * y.mean() / (n / 3 + 2), 0.3, 0.9),
    "an int, divided": (lambda y, n: y.mean() * (n / 7) + (n + 1) // 2, 3, 4),
    "torch's functions": (lambda y, n: torch.lerp(y, y * 2, n).sum() + torch.where(y > 0, n, 0.0).sum(), 0.3, 0.6),
    "a tensor made of it": (lambda y, n: (y * torch.tensor(n)).mean() + torch.as_tensor(n) * y.sum(), 0.3, 0.1),
    "several in a list": (lambda y, n: n[0] * y.mean() + n[1]["b"] * y.sum(), [0.3, {"b": 2.0}], [0.4, {"b": 1}]),
    "a comparison": (lambda y, n: y.mean() * (n > 0.5) + y.sum(), 0.3, 0.7),
    "with integers": (lambda y, n: ((y > 0).long() * n).float().mean() * y.sum() + (y > 0).sum() * n * y.mean(), 2, 5),
    "names that are not read": (lambda y, n: y.mean(), ["a", "b"], ["c"]),
    "a name that is not read": (lambda y, n: y.mean() if isinstance(n, str) else y.sum(), "a", "b"),
    "a tensor that is not read": (lambda y, n: y.mean(), torch.zeros(3), torch.zeros(5, 2, dtype=torch.int64)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("what", ARITHMETIC)
def test_one_program_has_eagers_loss_with_every_value(what: str, dtype: torch.dtype) -> None:
    loss, first, second = ARITHMETIC[what]
    made = model().to(dtype)
    program = capture(made, of(loss), batch(first, dtype))
    assert fits(program, Batch.of(batch(second, dtype)))
    for given in (first, second):
        expected = of(loss)(made, batch(given, dtype))
        found = _loss(program, batch(given, dtype))
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected.detach(), rtol=0 if dtype == torch.float32 else 1e-2, atol=0)


def _loss(program: Any, given: dict[str, Any]) -> Tensor:
    leaves = {}
    for row, value in zip(program.batch, Batch.of(given).values, strict=True):
        if row.node is not None:
            number = row.leaf.read and not isinstance(value, Tensor)
            found = as_scalar(value).to(program.example[row.node].dtype) if number else value
            leaves[row.node] = found if row.leaf.read else program.example[row.node]
    results = program.run(values=program.values, batch=leaves)
    return next(r for o, r in zip(program.outputs, results, strict=True) if o.kind == "loss")


READ: dict[str, tuple[Loss, list[Any]]] = {
    "an index": (lambda y, n: y.repeat(1, 3)[:, n].sum(), [0, 1, 2, 3, 4]),
    "a branch": (lambda y, n: y.mean() * (2.0 if n > 0.5 else 1.0), [0.1, 0.2, 0.3, 0.6, 0.7]),
    "a function of Python's": (lambda y, n: y.mean() * math.exp(n), [0.1, 0.2, 0.3, 0.6, 0.7]),
    "a function that takes no tensor": (lambda y, n: nn.functional.dropout(y, n).sum(), [0.1, 0.2, 0.3, 0.4, 0.5]),
    "a string": (lambda y, n: y.mean() * len(n), ["a", "bb", "ccc", "dddd", "eeeee"]),
    "a string as a key": (lambda y, n: y.mean() * {"a": 2}.get(n, 1), ["a", "b", "c", "d", "e"]),
    "a string that C reads": (lambda y, n: y.mean() * int(n), ["1", "2", "3", "4", "5"]),
    "strings in a list": (lambda y, n: y.mean() * n.count("a"), [["a"] * k + ["b"] * (6 - k) for k in range(5)]),
    "what is printed into a key": (lambda y, n: y.mean() * {"0.1": 2}.get(f"{n}", 1), [0.1, 0.2, 0.3, 0.4, 0.5]),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", READ)
def test_what_the_step_reads_is_a_constant_and_may_not_change_much(what: str) -> None:
    loss, values = READ[what]
    made, batches = model(), [batch(value) for value in values]
    two = fxpipe.compile(made, of(loss), batches[0], shapes=batches[1:2], workers=1, microbatches=1)
    assert len(two.plan.steps) == 2, "each value has stages of its own"
    with pytest.raises(BatchError, match=r"batch\['given'\]") as caught:
        fxpipe.compile(made, of(loss), batches[0], shapes=batches[1:], workers=1, microbatches=1)
    assert "torch.where" in str(caught.value.hint)
    assert caught.value.where is None or "test_batch_reads.py" in caught.value.where


def test_an_int_before_floats_is_a_float() -> None:
    loss = of(lambda y, n: y.mean() * n)
    build = fxpipe.compile(model(), loss, batch(0), shapes=[batch(0.5), batch(1)], workers=1, microbatches=1)
    assert [leaf.tensor.dtype for leaf in build.plan.step.batch if leaf.tensor] == ["float32", "float64"]
    assert len(build.plan.steps) == 1


def test_a_flag_has_stages_for_both_values() -> None:
    loss = of(lambda y, n: y.mean() * 2 if n is True else y.sum())
    build = fxpipe.compile(model(), loss, batch(False), shapes=[batch(True)], workers=1, microbatches=1)
    assert len(build.plan.steps) == 2


def test_the_users_batch_is_left_alone() -> None:
    given = batch([0.5, {"b": "name"}])
    before = copy.deepcopy(given)
    capture(model(), of(lambda y, n: y.mean() * n[0]), given)
    assert given["given"] == before["given"]

"""Minibatches: what replicas compare of one is read where it was given, and at once."""

from __future__ import annotations

from types import SimpleNamespace as Made
from typing import Any

import pytest
import torch
from torch import Tensor

from fxpipe.plan.plan import LossSpec
from fxpipe.plan.spec import LeafSpec, TensorSpec
from fxpipe.stages.minibatch import Minibatches, number_of
from fxpipe.task.batch import Batch
from fxpipe.torch_private import pytree


def compared(batch: tuple[Tensor, Tensor], device: str) -> tuple[int, int]:
    """The minibatch and its checksum, of a run whose workers are on a device; its steps read the first tensor."""
    spec = TensorSpec((4,), (1,), "float32")
    leaves = [LeafSpec("batch[0]", spec, dim=0), LeafSpec("batch[1]", spec, dim=0, read=False)]
    tree = pytree.treespec_dumps(Batch.of(batch).tree)
    plan: Any = Made(device=device, step=Made(given=leaves, batch_spec=tree, made=[], totals=None))
    plan.microbatches, plan.dp, plan.padding = 2, 1, ()
    plan.loss, plan.scales_loss, plan.outer = LossSpec(0), False, None
    numbers = list[tuple[int, int]]()
    Minibatches(plan, {}, {}, None)(batch, 3, lambda *given: numbers.append(given))
    return numbers[0]


def test_a_batch_is_compared_before_its_copies() -> None:
    """A tensor of the meta device has no values that could be compared; what no step reads may differ."""
    x, y = torch.arange(8.0), torch.zeros(8)
    assert compared((x, y), "meta") == compared((x, y + 1), "cpu") != compared((x + 1, y), "cpu")
    assert compared((x, y), "cpu")[0] == 3


def test_a_checksum_waits_once(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = list[int]()
    cpu = Tensor.cpu
    monkeypatch.setattr(Tensor, "cpu", lambda self: waits.append(1) or cpu(self))
    parts = [(torch.ones(3), torch.arange(5 * part), "text") for part in range(8)]
    assert number_of(parts) != number_of(parts[::-1])
    assert len(waits) == 2

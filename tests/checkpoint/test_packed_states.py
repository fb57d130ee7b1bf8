"""Optimizer states of 8 and 4 bits, which wrap other tensors: saved, resumed to the bit, counted by their own bytes."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from packed_tensors import Packed
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe
from fxpipe.checkpoint.tree import Decoder, Encoder
from fxpipe.costs.allocations import tensors_in
from fxpipe.task.one_optimizer import OptimizerRefused


@pytest.mark.parametrize(("library", "name"), [("bitsandbytes", "AdamW8bit"), ("bitsandbytes", "Lion8bit"),
                                               ("torchao", "AdamW8bit"), ("torchao", "AdamW4bit"),
                                               ("torchao", "AdamWFp8")])  # fmt: skip
@pytest.mark.filterwarnings("ignore")
def test_a_pipeline_goes_on_from_packed_states_to_the_bit(library: str, name: str, tmp_path: Path) -> None:
    kind = getattr(importlib.import_module(f"{library}.optim"), name)
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.Tanh())))
    batches = [(torch.randn(8, 64), torch.randn(8, 64)) for _ in range(4)]
    build = fxpipe.compile(model, _loss, batches[0], workers=2, schedule="1f1b", microbatches=2, cost="analytic")

    def pipeline() -> Any:
        return build.local(optimizer=lambda named: kind([p for _, p in named], lr=1e-3))

    with torch.compiler.set_stance("force_eager"), pipeline() as first, pipeline() as second:  # theirs is compiled
        for batch in batches[:2]:
            first.step(batch)
        first.save(tmp_path / "saved")
        second.load(tmp_path / "saved")
        for each in (first, second):
            for batch in batches[2:]:
                each.step(batch)
        whole, resumed = first.state_dict(), second.state_dict()
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())


def _loss(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def test_a_wrapper_is_written_as_what_it_wraps() -> None:
    packed = Packed.of(torch.randn(3, 5))
    encoder = Encoder()
    body = encoder({"state": [packed, 1]})
    assert list(encoder.tensors) == ["state[0].codes", "state[0].scales"]
    again = Decoder(encoder.tensors.__getitem__)(body)["state"][0]
    assert type(again) is Packed
    assert torch.equal(again.unpacked(), packed.unpacked())
    assert sum(each.nbytes for each in tensors_in(packed)) == 15 + 12
    body["state"][0]["wrapper"]["class"] = "os.system"
    with pytest.raises(ValueError, match=r"'os\.system' is no class of tensors that is imported"):
        Decoder(encoder.tensors.__getitem__)(body)


def test_options_of_single_parameters_are_refused() -> None:
    from bitsandbytes.optim import AdamW, GlobalOptimManager

    build = fxpipe.compile(nn.Linear(4, 4), lambda m, x: m(x).sum(), torch.randn(2, 4), workers=1, cost="analytic")
    manager = GlobalOptimManager.get_instance()
    manager.register_module_override(nn.Linear(2, 2), "weight", {"lr": 0.5})
    try:
        with pytest.raises(OptimizerRefused, match="finds by objects of the model that workers do not have"):
            build.local(optimizer=lambda named: AdamW([p for _, p in named]))
    finally:
        manager.module_weight_config_triple.clear()


def test_a_paged_optimizer_is_refused_with_its_name() -> None:
    from bitsandbytes.optim import PagedAdamW8bit

    build = fxpipe.compile(nn.Linear(4, 4), lambda m, x: m(x).sum(), torch.randn(2, 4), workers=1, cost="analytic")
    with pytest.raises(OptimizerRefused, match="PagedAdamW8bit keeps its state in memory that CUDA pages") as caught:
        build.local(optimizer=lambda named: PagedAdamW8bit([p for _, p in named]))
    assert "use AdamW8bit" in str(caught.value)

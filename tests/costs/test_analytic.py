"""Computed costs follow the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from random_cuts import numbered
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe
from fxpipe.costs.analytic import analytic_seconds
from fxpipe.ir.program import Program, info
from fxpipe.ir.transform import run_passes
from fxpipe.passes import front_passes
from fxpipe.passes.cost import Cost
from fxpipe.planner.device import CPU, Device


def made(model: nn.Module, step: Callable[[nn.Module, Any], Tensor], batch: Any, **options: Any) -> Program:
    return run_passes(fxpipe.capture(model, step, batch, **options), front_passes())


def costs(program: Program, device: Device, operator: str) -> list[float]:
    found = [analytic_seconds(n, device) for n in program if str(n.target).startswith(f"aten.{operator}.")]
    assert found, operator
    return found


def test_a_product_costs_its_flops() -> None:
    program = made(nn.Linear(32, 16, bias=False), lambda m, x: m(x).sum(), torch.randn(8, 32))
    busy = Device("busy", 1.0, float("inf"), launch=0.5)
    assert costs(program, busy, "mm")[0] == 2 * 8 * 32 * 16 + 0.5
    slow = Device("slow", float("inf"), 1.0, launch=0.5)
    assert costs(program, slow, "mm")[0] == 4 * (8 * 32 + 32 * 16 + 8 * 16) + 0.5
    assert costs(program, slow, "t") == [0.0] * len(costs(program, slow, "t")), "views are free"
    assert info(next(iter(Cost(device=busy)(program)))).seconds is not None


def test_flops_are_counted_in_their_dtype() -> None:
    device = Device("d", {"float32": 1.0, "bfloat16": 4.0}, float("inf"), launch=0.0)
    model, batch = nn.Linear(32, 16, bias=False), torch.randn(8, 32)
    full = made(model, lambda m, x: m(x).sum(), batch)
    half = made(model, lambda m, x: m(x).sum(), batch, autocast="bf16")
    assert costs(full, device, "mm")[0] == 4 * costs(half, device, "mm")[0]


def test_attention_traced_on_a_cpu_costs_flops() -> None:
    def step(model: nn.Module, x: Tensor) -> Tensor:
        q = model(x).view(2, 64, 4, 8).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q, is_causal=True).sum()

    program = made(nn.Linear(32, 32), step, torch.randn(2, 64, 32))
    device = Device("busy", 1.0, float("inf"), launch=0.0)
    forward = costs(program, device, "_scaled_dot_product_flash_attention_for_cpu")
    backward = costs(program, device, "_scaled_dot_product_flash_attention_for_cpu_backward")
    assert forward == [4.0 * 2 * 4 * 64 * 64 * 8]
    assert backward == [2.5 * forward[0]]


def test_an_embedding_reads_the_rows_it_gives() -> None:
    program = made(nn.Embedding(10_000, 8), lambda m, x: m(x).sum(), torch.arange(16))
    device = Device("slow", float("inf"), 1.0, launch=0.0)
    assert costs(program, device, "embedding") == [2 * 16 * 8 * 4 + 16 * 8]


def test_the_default_device_is_one_core() -> None:
    program = numbered("gpt")
    assert [info(n).seconds for n in Cost()(program)] == [analytic_seconds(n, CPU) for n in program]

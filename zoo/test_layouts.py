"""What keep_layouts takes to be certain is: every operator of some models, on inputs in every layout, as its kernel."""

from __future__ import annotations

from collections.abc import Iterator

import check
import pytest
import torch
from families import ZOO
from relaid_calls import Call, calls, mispredicted
from torch._subclasses.fake_tensor import FakeTensorMode

import fxpipe
from fxpipe.ir.aten import is_view_operator
from fxpipe.ir.transform import run_passes
from fxpipe.passes.analysis.predicted_strides import ON_CPU, PRODUCTS, predicts
from fxpipe.passes.fold import Fold
from fxpipe.passes.keep_layouts import KeepLayouts
from fxpipe.task.batch import split
from fxpipe.tracing.fake_strides import KernelStrides

MODELS = (
    "longt5", "nerf", "sew", "mixtral_balanced", "gat", "vq_vae", "dlrm", "pointnet", "fourier_operator", "alexnet",
    "lraspp_mobilenet_v3_large", "distillation", "hf_mobilenet_v1", "mbart", "blip_2", "splinter", "hf_mobilevitv2",
    "fnet", "lstm_crf", "byol", "recurrent_cells", "recurrent_gemma", "proxy_anchor", "unet", "layer_norm_transposed",
    "rrelu_transposed", "batch_norm_transposed",
)  # fmt: skip
"""Small ones, each with operators that those before it lack: together they call what the list of certain ones holds."""


def swept() -> Iterator[Call]:
    seen: set[tuple[object, ...]] = set()
    for name in MODELS:
        if reason := ZOO[name].missing():
            pytest.skip(reason)
        model, loss, batch = ZOO[name].make()
        check.quiet(model)
        program = fxpipe.capture(model, loss, split(batch, check.MICROBATCHES)[0])
        for kind, call in calls(run_passes(program, [Fold(), KeepLayouts()])).items():
            if kind not in seen:
                seen.add(kind)
                yield call


def is_certain(call: Call) -> bool:
    return is_view_operator(call.operator) or predicts(call.operator, call.tensors)


def test_certain_layouts_are_foretold_as_the_kernels_give_them() -> None:
    wrong: dict[str, list[str]] = {}
    seen = set()
    mode = KernelStrides()
    for call in swept():
        seen.add(call.operator)
        if found := mispredicted(call, mode, is_certain):
            wrong.setdefault(str(call.operator), []).extend(found)
    assert not wrong, "\n".join(f"{len(found)} like {found[0]}" for found in wrong.values())
    assert seen >= PRODUCTS | ON_CPU, "the list of certain operators has some that no model here calls"


def test_the_sweep_finds_what_torch_foretells_wrongly() -> None:
    x, weight = torch.rand(2, 3, 4), torch.rand(3)
    norm = Call(torch.ops.aten._native_batch_norm_legit.no_stats, (x, weight, weight, True, 0.1, 1e-5), {})
    assert any("predicted are [(12, 1, 3), (1,), (1,)]" in text for text in mispredicted(norm, FakeTensorMode()))
    assert not mispredicted(norm, KernelStrides())

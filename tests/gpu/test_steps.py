"""Steps on a CUDA device: the kernels of attention, what waits for the device, late kernels, no memory left, export."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cached import cuts
from commands import fxpipe as command
from covering import covering
from small_models import CASES
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

import fxpipe
from fxpipe.device_copies import ToDevice
from fxpipe.errors import RunError
from fxpipe.lowering.compare_with_eager import compare_with_eager
from fxpipe.runtime.worker.executor import Executor
from fxpipe.runtime.worker.offload import Offload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = "cuda"
KERNELS = {
    SDPBackend.MATH: "softmax",
    SDPBackend.EFFICIENT_ATTENTION: "efficient_attention",
    SDPBackend.FLASH_ATTENTION: "flash_attention",
    SDPBackend.CUDNN_ATTENTION: "cudnn_attention",
}
"""What the emitted code calls."""
SMALL = """
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))

def loss(model, batch):
    return model(batch).square().mean()

def train_data():
    return [torch.randn(8, 4)]
"""


def sgd(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.01, momentum=0.9)


class Attention(nn.Module):
    """A residual attention with one kernel, 2 heads of 16."""

    def __init__(self, kernel: SDPBackend, dropout: float) -> None:
        super().__init__()
        self.qkv, self.kernel, self.dropout = nn.Linear(32, 96), kernel, dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(len(x), 16, 3, 2, 16).permute(2, 0, 3, 1, 4)
        with sdpa_kernel(self.kernel):
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout)
        return x + y.transpose(1, 2).reshape(x.shape)


def square(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).float().square().mean()


@pytest.mark.parametrize(
    ("kernel", "autocast", "dropout", "backward"),
    covering(list(KERNELS), [None, "bf16", "fp16"], [0.0, 0.1], ["1", "2"]),
)
def test_each_kernel_of_attention(kernel: SDPBackend, autocast: str | None, dropout: float, backward: str) -> None:
    """With cuts apart, an attention's forward and backward are on two workers: its seeds cross with dropout."""
    model = nn.Sequential(*(Attention(kernel, dropout) for _ in range(3))).to(DEVICE)
    batch = torch.randn(4, 16, 32, device=DEVICE)
    try:
        with torch.autocast(
            DEVICE, getattr(torch, {"bf16": "bfloat16", "fp16": "float16"}.get(str(autocast), "float32"))
        ):
            square(model, batch).backward()
    except RuntimeError as error:  # this device has no such kernel, or not for this type
        pytest.skip(str(error).splitlines()[0])
    options: dict[str, Any] = {"cost": "analytic", "autocast": autocast, "schedule": "1f1b", "microbatches": 2}
    build = fxpipe.compile(model, square, batch, workers=2, **options, forward_at=["2"], backward_at=[backward])
    assert any(KERNELS[kernel] in text for text in build.files.values())
    assert compare_with_eager(build, model, square, batch).largest < (1e-4 if autocast is None else 1e-2)


CLIP = {"clip.py", "clip_grad.py"}  # norms are read, and the common one is copied back


@pytest.mark.parametrize(
    ("schedule", "compiled", "options", "places"),
    [
        ("1f1b", {}, {}, set()),
        ("async", {}, {}, set()),
        ("async", {}, {"offload": True}, set()),
        ("1f1b", {}, {"clip_norm": 1.0}, CLIP),
        ("1f1b", {"autocast": "fp16"}, {}, {"loss_scaler.py"}),
        ("async", {"codec": "int32"}, {}, {"lossless.py"}),
    ],
)
def test_what_waits_for_the_device(
    schedule: str, compiled: dict[str, Any], options: dict[str, Any], places: set[str]
) -> None:
    """Batches in the CPU's memory, and losses that are not read: steps 3 to 5 wait nowhere else."""
    case = CASES["gpt"]
    whole = {"workers": 2, "schedule": schedule, "microbatches": 2, "cost": "analytic", **compiled, **cuts(case, 2, 1)}
    batches = case.batches(5)
    on_device = pytree.tree_map(lambda value: value.to(DEVICE), batches[0])
    build = fxpipe.compile(case.make().to(DEVICE), case.loss, on_device, **whole)
    found = set()
    with build.local(optimizer=sgd, **options) as pipeline:
        for number, batch in enumerate(batches):
            torch.cuda.set_sync_debug_mode("warn" if number >= 2 else "default")
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                pipeline.step(batch)
            found |= {Path(w.filename).name for w in caught if "synchroniz" in str(w.message)}
        torch.cuda.set_sync_debug_mode("default")
    assert found <= places


def late(call: Callable[..., Any]) -> Callable[..., Any]:
    def run(*given: Any, **more: Any) -> Any:
        torch.cuda._sleep(5_000_000)  # some milliseconds of the current stream
        return call(*given, **more)

    return run


def test_late_kernels_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies that begin before the values are made, or end after they are read, would."""
    net = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(6))).to(DEVICE)
    batches = [torch.randn(512, 256) for _ in range(4)]
    options: dict[str, Any] = {"workers": 2, "schedule": "gpipe", "microbatches": 4, "cost": "analytic"}
    build = fxpipe.compile(net, square, batches[0].to(DEVICE), **options, forward_at=["3"])
    expected = build.local(optimizer=sgd).run(batches)
    for place, name in ((Executor, "execute"), (Offload, "_entry"), (Offload, "bring"), (ToDevice, "__call__")):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, late(getattr(place, name)))  # _entry sleeps on the stream of copies
            assert build.local(optimizer=sgd, offload=True).run(batches) == expected, name


def test_out_of_memory_is_named() -> None:
    net = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.Tanh()) for _ in range(4))).to(DEVICE)
    batch = torch.randn(65536, 1024, device=DEVICE)  # 256 MB each layer
    build = fxpipe.compile(net, square, batch, workers=2, schedule="gpipe", cost="analytic", forward_at=["2"])
    with build.local(optimizer=sgd) as pipeline:
        torch.cuda.empty_cache()
        limit = torch.cuda.memory_reserved() + (300 << 20)
        torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
        try:
            with pytest.raises(RunError, match=r"forward of step 1 .* failed on worker \d: OutOfMemoryError") as caught:
                pipeline.step(batch)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
    assert "more microbatches" in str(caught.value.hint)


def test_stages_are_exported(tmp_path: Path) -> None:
    import needs_onnx  # noqa: F401

    (tmp_path / "model.py").write_text(SMALL)
    compiled = ("compile", tmp_path / "model.py", "--device", DEVICE, "--cost", "analytic", "--fp-cut", "1")
    assert command(*compiled, "-n", 2, "-o", tmp_path / "build").code == 0
    result = command("export", tmp_path / "build", "-o", tmp_path / "onnx")
    assert result.code == 0, result.err
    assert len(list((tmp_path / "onnx").glob("*.onnx"))) >= 4
